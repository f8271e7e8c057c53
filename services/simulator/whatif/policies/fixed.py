"""Fixed rollout pools: nothing comes, nothing goes."""

from __future__ import annotations

from services.simulator.whatif.policies.base import Policy

POLICIES = (
    Policy(
        name="roll",
        models="ROLL (paper 6.1): asynchronous, a fixed pool of the reserved rollout GPUs, colocated, a batch after another",
        leaves_out="its queue scheduling and redundant environments",
    ),
    Policy(
        name="roll-large",
        models="ROLL-Large (paper 6.1): ROLL on a fixed pool as large as the trace is on average, in whole workers",
        leaves_out="as roll; these GPUs are reserved ones, so they cost more than the trace's",
        large=True,
    ),
    Policy(
        name="areal",
        models="AReaL: fixed pool, colocated, fully asynchronous within the bound; a weight update interrupts what runs, "
        "whose KV cache is computed again",
        leaves_out="its decoupled PPO objective, and bounds above the common one",
        early_start=True,
        update_pause="retract",
    ),
    Policy(
        name="laminar",
        models="Laminar: fixed pool, colocated, trajectory-level asynchrony: the next ones start as others end",
        leaves_out="its repacking of long-tail trajectories and its relay workers (updates here take as long as for all)",
        early_start=True,
    ),
)
