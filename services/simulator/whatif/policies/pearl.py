"""PEARL, as the paper has it and as it is here."""

from __future__ import annotations

from services.simulator.whatif.policies.base import Policy

POLICIES = (
    Policy(
        name="pearl-paper",
        models="the paper's PEARL: preemptible and lent GPUs, mode and ratio by eq. 1-3, gate by eq. 7, a batch after another",
        leaves_out="nothing that the paper describes; its thresholds are not given there, ours are the job file's defaults",
        elastic=True,
        lending=True,
        decision="paper",
    ),
    Policy(
        name="pearl",
        models="this product as it is",
        leaves_out="the services' processes and the bus: messages take no time",
        elastic=True,
        lending=True,
        decision="planner",
        early_start=True,
    ),
)
