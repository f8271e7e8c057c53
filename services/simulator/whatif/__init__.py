"""The what-if simulator: the production cores on modelled engines, over a trace, a workload and a policy."""
