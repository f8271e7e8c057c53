"""The elastic scheduler: the rollout budget, that is which worker slots rollout may use now (paper 4.1.2, stage 1)."""
