"""The report of a what-if run: a folder with the plots, the JSON and one page. Writes files; the rest is pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from services.jobfile import ConfigError
from services.simulator.whatif.report import html, plots
from services.simulator.whatif.report.html import Cell, num
from services.simulator.whatif.report.sensitivity import Sensitivity
from services.simulator.whatif.report.summary import (
    Interval,
    PolicySummary,
    base_name,
    gains,
    reference_of,
    summarise,
)
from services.simulator.whatif.report.svg import Drawing
from services.simulator.whatif.result import Result

MOST_DECISIONS: Final = 200
"""Rows of the table of decisions, of each policy; the JSON has all of them."""


def drawings(results: Sequence[Result], reference: str) -> dict[str, tuple[Drawing, str]]:
    """File name without ending -> drawing and caption. What changes over time is of the first seed."""
    first = results[0]
    summaries = summarise(results, reference)
    oracles = [(each.name, each.throughput_tokens_per_s) for each in first.oracles or (first.oracle,)]
    oracles = [(name, value) for name, value in oracles if value > 0]
    told = inputs_line(results)
    found = {
        "throughput": (
            plots.throughput(first),
            "Tokens/s of each train step (generated and trained tokens over the step's time) above the GPU budget. "
            + told,
        ),
        "policies": (
            plots.bars(summaries, oracles, reference),
            "Mean over seeds; whiskers: 95 % confidence interval. " + told,
        ),
    }
    if any(each.uses for each in summaries):
        found["gpu-hours"] = (
            plots.uses(summaries),
            "What bounds a policy: GPU-hours by use, of all GPUs that were there under it. " + told,
        )
    for name, policy in first.policies.items():
        if policy.spans:
            found[f"roles-{file_name(name)}"] = (plots.roles(first, name), f"A row a GPU, under {name}. {told}")
    found["decisions"] = (
        plots.decisions(first),
        "Decisions under which a whole batch ran. Left: its rollout time; right: what changes gained over what ran before them. "
        "On the dashed line prediction and outcome agree. " + told,
    )
    return found


def file_name(name: str) -> str:
    """A policy's name as part of a file's."""
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in name)


def inputs_line(results: Sequence[Result]) -> str:
    """What every figure is labelled with."""
    first = results[0]
    seeds = ", ".join(str(each.seed) for each in results)
    return (
        f"Simulated: trace {base_name(first.trace)}, workload {base_name(first.workload)}, hardware {base_name(first.hardware)}, "
        f"{first.hours:g} h, seed{'s' if len(results) > 1 else ''} {seeds}."
    )


def write_report(
    results: Sequence[Result],
    folder: Path,
    *,
    reference: str = "",
    sensitivity: Sensitivity | None = None,
    command: str = "",
) -> list[Path]:
    """Write `index.html`, `result.json` and a plot a file into `folder`, which is made; returns what was written.

    `results` are of one input and differ by their seed. Raises ConfigError where the folder cannot be written.
    """
    assert results
    chosen = reference_of(results[0], reference)
    pictures = drawings(results, chosen)
    if sensitivity is not None and sensitivity.rows:
        pictures["sensitivity"] = (sensitivity.drawing(), sensitivity.caption())
    files = {f"{name}.svg": drawing.svg() for name, (drawing, _) in pictures.items()}
    files["index.html"] = whole_page(results, chosen, pictures, sensitivity, command)
    files["result.json"] = msgspec.json.format(msgspec.json.encode(results), indent=1).decode() + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {folder}: cannot be written ({error})") from error
    return [folder / name for name in files]


def whole_page(
    results: Sequence[Result],
    reference: str,
    pictures: dict[str, tuple[Drawing, str]],
    sensitivity: Sensitivity | None,
    command: str,
) -> str:
    """The page of a run."""
    first = results[0]
    summaries = summarise(results, reference)
    parts = [html.paragraph(f"{inputs_line(results)} Nothing here was measured on GPUs.", "note")]
    parts += [html.paragraph(line, "verdict") for line in verdict(summaries, reference)]
    if command:
        parts.append(html.paragraph(f"Made by: {command}", "note"))
    parts += [html.heading("Policies"), policies_table(summaries, reference)]
    for name in ("policies", "throughput", "gpu-hours"):
        if name in pictures:
            parts.append(html.figure(*pictures[name]))
    timelines = [name for name in pictures if name.startswith("roles-")]
    if timelines:
        parts.append(html.heading("What each GPU did"))
        *others, last = timelines
        parts.append(html.figure(*pictures[last]))
        parts += [html.folded(pictures[name][0].title, html.figure(*pictures[name])) for name in others]
    parts += [html.heading("Decisions"), html.figure(*pictures["decisions"]), *decision_tables(first)]
    if sensitivity is not None:
        parts += [
            html.heading("Sensitivity"),
            html.paragraph(sensitivity.verdict()),
            *([html.figure(*pictures["sensitivity"])] if "sensitivity" in pictures else []),
            sensitivity.table(),
        ]
    parts += [html.heading("What each policy stands for"), models_table(summaries)]
    parts += [html.heading("Inputs"), inputs_table(first)]
    parts.append(
        html.paragraph(
            "Throughput is counted as in the paper's 6.1: tokens of rollout and training over the steps' time. Cost counts every "
            "GPU-hour that was there, at your prices, over those tokens. The reward is the recorded trajectories': the simulated "
            "policy does not learn.",
            "note",
        )
    )
    return html.page(f"PEARL what-if: {base_name(first.trace)}", parts)


def verdict(summaries: Sequence[PolicySummary], reference: str) -> list[str]:
    """The conclusion in words: what is best, by how much, at what cost; and what would make it void."""
    best = max(summaries, key=lambda each: each.throughput.mean)
    base = next(each for each in summaries if each.name == reference)
    lines: list[str] = []
    if best.throughput.mean <= 0:
        return ["No policy finished a train step in this time: simulate more hours, or a smaller batch."]
    others = [each for each in summaries if each is not best]
    text = f"{best.name} has the highest throughput: {best.throughput.mean:,.0f} tokens/s{_plus_minus(best.throughput, ',.0f')}"
    if best is not base and best.ratio is not None:
        text += f", {best.ratio.mean:.2f}x{_plus_minus(best.ratio, '.2f')} {base.name}"
    if others:
        second = max(others, key=lambda each: each.throughput.mean)
        if second.throughput.mean > 0 and second is not base:
            text += f"; {best.throughput.mean / second.throughput.mean - 1:+.1%} over the next, {second.name}"
        if best.throughput.count > 1 and best.throughput.low <= second.throughput.high:
            text += ". Their intervals overlap: simulate more seeds before deciding between the two"
    lines.append(text + ".")
    costs = [(each.cost.mean, each) for each in summaries if each.cost is not None]
    if costs:
        cheapest = min(costs, key=lambda each: each[0])
        line = f"Cheapest at your prices: {cheapest[1].name}, {cheapest[0]:.3g} per million tokens"
        if base.cost is not None and cheapest[1] is not base:
            line += f" ({cheapest[0] / base.cost.mean - 1:+.0%} against {base.name})"
        lines.append(line + ".")
    if best.of_oracle is not None:
        lines.append(
            f"That is {best.of_oracle.mean:.0%} of what a clairvoyant choice at no switching cost would reach."
        )
    if 0 < best.wait_share < 1:
        lines.append(
            f"What bounds it: of {best.name}'s train steps, training waits {best.wait_share:.0%} of the time for its batch. The rest is "
            f"training itself, which no rollout shortens: at most {1 / (1 - best.wait_share):.2f}x its throughput is left to gain."
        )
    lines += [f"{each.name} lost {each.lost} trajectories." for each in summaries if each.lost]
    lines += [
        f"{each.name} returned borrowed GPUs late {each.late_returns} times." for each in summaries if each.late_returns
    ]
    return lines


def _plus_minus(value: Interval, form: str) -> str:
    return f" ± {value.half:{form}}" if value.count > 1 else ""


def policies_table(summaries: Sequence[PolicySummary], reference: str) -> str:
    """A row a policy. Staleness and reward stand with every throughput."""
    columns = ["policy", "tokens/s", "±", f"x {reference}", "of oracle", "train step s", "training waits", "GPUs busy"]
    columns += ["staleness", "reward", "lost", "preemptions", "borrows", "denied"]
    priced = any(each.cost is not None for each in summaries)
    columns += ["cost/M tokens"] if priced else []
    rows: list[list[Cell | str]] = []
    for each in summaries:
        row: list[Cell | str] = [
            each.name,
            num(each.throughput.mean),
            num(each.throughput.half if each.throughput.count > 1 else None),
            num(None if each.ratio is None else each.ratio.mean, ".2f"),
            num(None if each.of_oracle is None else 100 * each.of_oracle.mean, ".0f", " %"),
            num(each.step_s, ",.1f"),
            num(100 * each.wait_share, ".0f", " %"),
            num(100 * each.busy, ".0f", " %"),
            num(each.staleness_max),
            num(each.reward, ".3f"),
            Cell(str(each.lost), each.lost, "bad" if each.lost else ""),
            num(each.preemptions, ".0f"),
            num(each.borrows, ".0f"),
            num(each.denied, ".0f"),
        ]
        if priced:
            row.append(num(None if each.cost is None else each.cost.mean, ".3g"))
        rows.append(row)
    return html.table(columns, rows)


def models_table(summaries: Sequence[PolicySummary]) -> str:
    """What each policy models and leaves out."""
    return html.table(
        ["policy", "stands for", "leaves out"],
        [[each.name, each.models or "-", each.leaves_out or "-"] for each in summaries],
        texts=(0, 1, 2),
    )


def inputs_table(result: Result) -> str:
    """The settings with where their defaults come from; the first seed's."""
    settings = result.settings
    rows: list[html.Row] = [
        ("trace", base_name(result.trace), ""),
        ("workload", base_name(result.workload), ""),
        ("hardware", base_name(result.hardware), "each constant with its source in the description"),
        ("hours", f"{result.hours:g}", ""),
        *(
            (name, f"{value:g}" if isinstance(value, float) else str(value), str(settings.get(f"{name}.source", "")))
            for name, value in settings.items()
            if not name.endswith(".source")
        ),
    ]
    return html.table(["setting", "value", "source of the default"], rows, texts=(0, 1, 2))


def decision_tables(result: Result) -> list[str]:
    """Decisions of each policy that decides, folded."""
    found: list[str] = []
    for name, policy in result.policies.items():
        if not policy.decided:
            continue
        rows: list[list[Cell | str]] = []
        gained = {index: (predicted, realised) for index, predicted, realised in gains(policy.decided)}
        for index, each in enumerate(policy.decided[:MOST_DECISIONS]):
            predicted, realised = gained.get(index, (None, None))
            rows.append(
                [
                    num(each.at_s / 60, ".1f"),
                    each.cause,
                    plots.shape(each),
                    "yes" if each.borrow else "",
                    num(each.predicted_s, ",.0f"),
                    num(each.realised_s, ",.0f"),
                    num(None if predicted is None else 100 * predicted, "+.1f", " %"),
                    num(None if realised is None else 100 * realised, "+.1f", " %"),
                    each.reason,
                ]
            )
        columns = [
            "minute",
            "cause",
            "chosen",
            "borrow",
            "predicted s",
            "realised s",
            "predicted gain",
            "realised gain",
            "reason",
        ]
        of = "" if len(policy.decided) <= MOST_DECISIONS else f", the first {MOST_DECISIONS} of {len(policy.decided)}"
        text = html.table(columns, rows, texts=(1, 2, 3, 8))
        found.append(html.folded(f"{name}: {len(policy.decided)} decisions{of}", text))
    return found
