"""Table 3: reconfiguration latencies (paper 6.5.2): what goes in, and what a simulated operation then takes in a busy cluster."""

from __future__ import annotations

from typing import Final

from services.simulator.whatif.paper import segments
from services.simulator.whatif.paper.base import Claim, Figure, Sheet, claim
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import LARGE, MODELS, SEGMENTS, SMALL, Runner
from services.simulator.whatif.report.html import Row, num
from services.simulator.whatif.report.summary import interval
from services.simulator.whatif.result import PolicyResult, Span
from services.timing.hardware import load as load_hardware

NAME: Final = "table3"
SPOT, TRAINING = "s", "t"
"""How simulated nodes' names begin, by zone."""
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
        expansion = paper["preparation"] + paper["finalization"]
        for text, zone, expected, note in (
            (
                "an expansion, from the arrival of its GPUs to serving",
                SPOT,
                expansion,
                "preparation and finalization together",
            ),
            ("a borrow, from the release of its GPUs to serving", TRAINING, paper["activation"], "activation"),
        ):
            took = [seconds for each in runs for seconds in joining(each, zone)]
            simulated = interval(took) if took else None
            claims.append(
                claim(f"{text}, {model}", "6.5.2", expected, "s", simulated, 0.15 * expected, f"the paper: {note}")
            )
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
            "The paper's means are of the operations alone. What joins a running cluster also waits for the plan before it and "
            "for others of its group, all of which are admitted at once; what had begun when a newer plan came is adopted by it.",
        ),
        sheets=(Sheet("Seconds", ("operation", "paper", "input of the simulation"), tuple(rows)),),
    )


def joining(result: PolicyResult, zone: str) -> list[float]:
    """Seconds from each GPU's coming until it serves; those at the very beginning are the job's start, those that never served are left out."""
    found: list[float] = []
    by_gpu: dict[str, list[Span]] = {}
    for span in result.spans:
        if span.gpu.startswith(zone):
            by_gpu.setdefault(span.gpu, []).append(span)
    for spans in by_gpu.values():
        begun_s: float | None = None
        for span in sorted(spans, key=lambda each: each.start_s):
            if span.use == "preparing":
                begun_s = span.start_s if begun_s is None else begun_s
            elif span.use in ("prefill", "decode", "colocated"):
                if begun_s:  # not at 0
                    found.append(span.start_s - begun_s)
                begun_s = None
            elif span.use != "switching":
                begun_s = None
    return found
