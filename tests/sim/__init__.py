"""The real cores wired together in one process, on a virtual clock."""
