"""The batch as a closed queueing network, phase by phase: cheap enough to rank every configuration. Pure.

A trajectory cycles through prefill, (transfer,) decode and environment; how long one cycle takes depends on how many are under
way. They become fewer as the batch goes on: the batch is cut into phases of turns, and each phase's cycle time comes from
approximate mean value analysis (Schweitzer's fixed point) of the network with the trajectories that still run then. The makespan
is the sum over phases. So serial stages add up, prefill queues, and the long tail runs nearly alone; nothing is counted twice
and no bubble ratio is needed: how many decode at once is a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec

from services.decision_engine.predict_model import Machine, Turns

PHASES = 10
ITERATIONS = 12
EVICTED_SLOPE = 3.0
"""How fast prefixes are lost beyond capacity, per share that does not fit."""


class Phase(msgspec.Struct, frozen=True):
    """`turns` turns that `active` trajectories make; means over those turns."""

    turns: float
    active: float
    new: float  # prompt tokens
    replied: float  # tokens of the reply before, which a prefill worker computes again
    reply: float
    context: float  # while it decodes
    env_s: float


def phases_of(batch: Sequence[Turns], scale: float = 1.0) -> tuple[Phase, ...]:
    """Cut a batch into phases. `scale`: the batch stands for so many times its trajectories."""
    lengths = sorted(len(turns) for turns in batch)
    longest = lengths[-1]
    # Edges at quantiles of the lengths, so that the tail has phases of its own.
    edges = sorted({0, longest, *(lengths[(len(lengths) - 1) * cut // (PHASES - 1)] for cut in range(PHASES))})
    spans = list(pairwise(edges))
    totals = [[0.0] * 6 for _ in spans]  # turns, new, replied, reply, context * reply, env
    for turns in batch:
        context, before, place = 0.0, 0.0, 0
        for index, (new, reply, env_s, _) in enumerate(turns):
            if index >= spans[place][1]:
                place += 1
            context += new
            each = totals[place]
            each[0] += 1
            each[1] += new
            each[2] += before
            each[3] += reply
            each[4] += reply * (context + reply / 2)
            each[5] += env_s
            context += reply
            before = reply
    return tuple(
        Phase(
            float(last - first),
            scale * each[0] / (last - first),
            each[1] / each[0],
            each[2] / each[0],
            each[3] / each[0],
            each[4] / max(each[3], 1.0),
            each[5] / each[0],
        )
        for (first, last), each in zip(spans, totals, strict=True)
    )


def makespan_s(phases: Sequence[Phase], machine: Machine, prefill: int, decode: int, colocated: int) -> float:
    """Predicted seconds of the batch on these workers."""
    if colocated:
        return sum(phase.turns * _colocated_cycle_s(phase, machine, colocated) for phase in phases)
    return sum(phase.turns * _disaggregated_cycle_s(phase, machine, prefill, decode) for phase in phases)


def _evicted(sessions: float, context: float, capacity: float) -> float:
    """Share of turns whose prefix was evicted: least recently used goes first, so soon after they no longer all fit."""
    return min(1.0, max(0.0, sessions * context / max(capacity, 1.0) - 1) * EVICTED_SLOPE)


def _colocated_cycle_s(phase: Phase, machine: Machine, workers: int) -> float:
    """One turn: a prompt waits for the group before it; decoding is stretched by the prompts computed meanwhile."""
    each = phase.active / workers  # trajectories a worker
    missed = max(machine.missed, _evicted(each, phase.context, machine.capacity))
    work_s = (phase.new * (1 - missed) + phase.context * missed) * machine.prefill_s
    decoding = each * 0.5
    cycle_s = 0.0
    for _ in range(ITERATIONS):
        others = max(0.0, each - 1) / each if each > 0 else 0.0
        iteration_s = machine.fixed_s + machine.kv_s * phase.context * max(1.0, 1 + decoding * others)
        # Prompts of the others that arrive in a cycle are computed in iterations that this one's decoding shares.
        prompt_s = iteration_s + work_s
        busy = min(0.95, each * others * work_s / cycle_s) if cycle_s > 0 else 0.0
        wait_s = busy * prompt_s
        decode_s = max(phase.reply - 1, 0.0) * iteration_s / (1 - busy)
        cycle_new = phase.env_s + wait_s + prompt_s + decode_s
        cycle_s = cycle_new if not cycle_s else 0.5 * (cycle_s + cycle_new)
        decoding = each * decode_s / cycle_s if cycle_s > 0 else 0.0
    return cycle_s


def _disaggregated_cycle_s(phase: Phase, machine: Machine, prefill: int, decode: int) -> float:
    """One turn: queue and compute on a prefill worker, hand over, decode among others, environment."""
    active = phase.active
    if active <= 0:
        return phase.env_s
    others = max(0.0, active - 1) / active
    lost = max(machine.missed, _evicted(active / decode, phase.context, machine.capacity))
    missed = max(machine.missed, _evicted(active / prefill, phase.context, machine.capacity))
    tokens = (phase.new + phase.replied) * (1 - missed) + phase.context * missed
    lacking = phase.new * (1 - lost) + phase.context * lost
    fixed_s = machine.fixed_s if machine.fused else 0.0
    alone_s = fixed_s + tokens * machine.prefill_s
    # Waiting prompts share a chunk's fixed cost.
    together_s = fixed_s * min(1.0, tokens / machine.chunk) + tokens * machine.prefill_s
    link_s = lacking * machine.transfer_s
    queue, decoding, sending = active / 4 / prefill, active / 2, 0.0
    cycle_s = 0.0
    for _ in range(ITERATIONS):
        prefill_s = alone_s + together_s * queue * others
        hand_s = min(lacking, machine.chunk) * machine.transfer_s + link_s * sending * others
        iteration_s = machine.fixed_s + machine.kv_s * phase.context * max(1.0, 1 + decoding * others / decode)
        decode_s = max(phase.reply - 1, 0.0) * iteration_s
        cycle_new = phase.env_s + prefill_s + hand_s + decode_s
        cycle_s = cycle_new if not cycle_s else 0.5 * (cycle_s + cycle_new)
        rate = active / cycle_s if cycle_s > 0 else 0.0
        queue = min(rate * prefill_s, active) / prefill
        decoding = min(rate * decode_s, active)
        sending = min(rate * hand_s, active) / prefill
    return cycle_s
