"""The runtime tracker: the workload profile and learned costs, from telemetry (paper 4.3.2, 5)."""
