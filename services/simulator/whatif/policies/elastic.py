"""Elastic rollout pools, lending, and static disaggregation."""

from __future__ import annotations

from services.simulator.whatif.policies.base import Policy

POLICIES = (
    Policy(
        name="rlboost",
        models="RLBoost+ (paper 6.1): reserved and preemptible rollout GPUs, colocated, asynchronous, a batch after another",
        leaves_out="its seeding window on training GPUs, which the paper says does not apply to asynchronous runs",
        elastic=True,
    ),
    Policy(
        name="rose",
        models="ROSE: elastic and colocated on serving slack: as the trace counts, without a cold start (the paper's Table 3 "
        "activation instead of its preparation) and without notice of a reclaim",
        leaves_out="the serving requests beside it, and their SLOs",
        elastic=True,
        slack=True,
    ),
    Policy(
        name="seamlessflow",
        models="SeamlessFlow: the reserved rollout GPUs, and all training GPUs whenever training is idle; colocated",
        leaves_out="its tag scheduling across several models",
        lending=True,
        gated=False,
    ),
    Policy(
        name="lending",
        models="BiDiRL, and verl's dynamic scheduling: the reserved rollout GPUs, and training GPUs where the benefit gate "
        "(eq. 7) allows; colocated",
        leaves_out="lending rollout GPUs to training, which BiDiRL does too",
        lending=True,
    ),
    Policy(
        name="elastic-lending",
        models="RLBoost+ with gated lending: what both kinds of elasticity give without disaggregation and early start",
        leaves_out="it is no system of the paper's: an ablation",
        elastic=True,
        lending=True,
    ),
    Policy(
        name="static-pd",
        models="RollArt, NeMo RL, slime: disaggregated at a ratio fixed at launch (2:3, the paper's choice at 10 GPUs), here "
        "on RLBoost+'s elastic pool",
        leaves_out="their other features; their pools are fixed, which would only make them slower here",
        elastic=True,
        decision="static-pd:2:3",
    ),
)
