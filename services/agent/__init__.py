"""Episodes: an environment and a policy taking turns, and the journal that survives them (paper 2.1)."""
