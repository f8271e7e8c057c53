"""All cores on a virtual clock: `faults` breaks what a seed can break, `whatif` asks what a policy would gain."""
