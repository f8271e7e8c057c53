"""Table 3: reconfiguration latencies (paper 6.5.2): what goes in, and what a simulated operation then takes in a busy cluster."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper import segments
from services.simulator.whatif.paper.base import Claim, Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import LARGE, MODELS, SEGMENTS, SMALL, Runner
from services.simulator.whatif.report.html import Row, num
from services.simulator.whatif.report.summary import interval
from services.simulator.whatif.result import PolicyResult
from services.timing.hardware import load as load_hardware

NAME: Final = "table3"
PAPER: Final = {
    SMALL: {"preparation": 56.29, "finalization": 11.05, "activation": 6.26, "deactivation": 3.18},
    LARGE: {"preparation": 67.06, "finalization": 17.89, "activation": 6.09, "deactivation": 4.38},
}


def figure(run: Runner, options: Options) -> Figure:
    """The paper's means are this simulation's inputs; what is compared is the whole expansion as it came out."""
    done = segments.runs(run, options)
    claims: list[Claim] = []
    rows: list[Row] = []
    for hardware, model in MODELS.items():
        paper = PAPER[hardware]
        runs = [each for segment in SEGMENTS for each in done[hardware, segment, "pearl"]]
        expansions = [seconds for each in runs for seconds in preparing(each)]
        if expansions:
            claims.append(
                claim(
                    f"an expansion from the arrival of its GPUs to serving, {model}",
                    "6.5.2",
                    paper["preparation"] + paper["finalization"],
                    "s",
                    interval(expansions),
                    0.15 * (paper["preparation"] + paper["finalization"]),
                    "the paper's preparation and finalization together",
                )
            )
        else:
            claims.append(claim(f"an expansion, {model}", "6.5.2", 0.0, "s", None, 0.0, "none happened"))
        hw = load_hardware(hardware)
        inputs = {
            "preparation": hw.prepare_s.value,
            "finalization": hw.finalize_s.value,
            "activation": hw.activate_s.value,
            "deactivation": hw.deactivate_s.value,
        }
        rows += [
            (f"{operation}, {model}", num(paper[operation], ".2f"), num(value, ".2f"))
            for operation, value in inputs.items()
        ]
    return Figure(
        name=NAME,
        title="Table 3: reconfiguration latency",
        section="6.5.2",
        setting="The runs of Figure 5. The single operations' times are taken over from the paper: they cannot agree or disagree.",
        claims=tuple(claims),
        differences=(
            "The paper's means are of the operations alone. An expansion in a running cluster also waits for the plan before it and "
            "for others of its group, all of which are admitted at once.",
        ),
        sheets=(Sheet("Seconds", ("operation", "paper", "input of the simulation"), tuple(rows)),),
    )


def preparing(result: PolicyResult) -> list[float]:
    """Seconds of each GPU's preparation that ended in serving; those at the very beginning are the job's start."""
    found: list[float] = []
    by_gpu: dict[str, list[tuple[float, float, str]]] = {}
    for span in result.spans:
        by_gpu.setdefault(span.gpu, []).append((span.start_s, span.end_s, span.use))
    for spans in by_gpu.values():
        spans.sort()
        for index, (start_s, end_s, use) in enumerate(spans):
            served = index + 1 < len(spans) and spans[index + 1][2] in ("prefill", "decode", "colocated")
            if use == "preparing" and start_s > 0 and served:
                found.append(end_s - start_s)
    return found
