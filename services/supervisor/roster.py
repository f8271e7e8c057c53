"""Which service processes a job consists of on one machine. Pure.

Workers and trainers are not here: node agents launch those.
"""

from __future__ import annotations

import msgspec

from services.emulated_fleet.config import fleets
from services.jobfile import JobFile


class ServiceProcess(msgspec.Struct, frozen=True):
    """One process to keep running. `name` is unique; `arguments` follow `pearl service`."""

    name: str
    service: str
    arguments: tuple[str, ...] = ()
    essential: bool = True  # False: may end by itself (a feed whose trace is over) without being restarted


def roster(job: JobFile, *, standby_orchestrators: int = 1) -> tuple[ServiceProcess, ...]:
    """Every service process of a job, in starting order."""
    control = (
        "orchestrator",
        "elastic_scheduler",
        "decision_engine",
        "cluster_rebuilder",
        "toggle_manager",
        "runtime_tracker",
        "pipeline_scheduler",
        "router",
    )
    processes = [ServiceProcess(name, name) for name in (*control, "monitor")]
    processes += [
        ServiceProcess(f"orchestrator-standby{index}", "orchestrator") for index in range(standby_orchestrators)
    ]
    if job.gateway.bind:
        processes += [
            ServiceProcess(f"router-{index}", "router", ("--index", str(index)))
            for index in range(1, job.gateway.instances)
        ]
    shared = range(len(fleets(job)))
    processes += [
        ServiceProcess(f"emulated_fleet-{index}", "emulated_fleet", ("--index", str(index))) for index in shared
    ]
    if not shared:
        nodes = [node.name for node in job.nodes]
        processes += [ServiceProcess(f"node_agent-{node}", "node_agent", ("--node", node)) for node in nodes]
    processes += [
        ServiceProcess(f"agent-{index}", "agent", ("--index", str(index))) for index in range(job.agent.processes)
    ]
    processes += [
        ServiceProcess(f"harness-{index}", "harness", ("--index", str(index))) for index in range(job.harness.processes)
    ]
    if job.feed.trace:
        processes.append(ServiceProcess("preemption_feed", "preemption_feed", essential=False))
    return tuple(processes)
