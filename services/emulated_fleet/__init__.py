"""Many emulated workers, with their node agents, in one process."""
