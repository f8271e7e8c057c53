"""Cluster rebuilder (paper 4.5): executes a plan's part in the reserved and preemptible zones."""
