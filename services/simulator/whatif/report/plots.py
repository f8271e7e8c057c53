"""The plots of a what-if run. Pure. Each takes results and gives a drawing; all times are simulated."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from services.simulator.whatif.report.summary import (
    USES,
    PolicySummary,
    base_name,
    gains,
)
from services.simulator.whatif.report.svg import DASHES, SERIES, Drawing, Scale, amount, from_zero, number
from services.simulator.whatif.result import Budget, Decided, PolicyResult, Result, Span, Step

WIDTH: Final = 860
LEFT: Final = 64
RIGHT: Final = 56
MOST_GPUS: Final = 64
"""Rows of the role timeline; of more GPUs every n-th is drawn."""
THINNEST_PX: Final = 0.25
"""Spans thinner than this are left out of the picture."""
MOST_DOTS: Final = 2000
FINEST: Final = 2000
"""Parts of the time axis that are told apart."""

_Dot = tuple[int, float, float, str]


def colour(index: int) -> str:
    """The colour of the index-th policy."""
    return f"s{index % SERIES}"


def dash(index: int) -> str:
    """Its line's dashes."""
    return DASHES[index % len(DASHES)]


def indices(names: Sequence[str]) -> dict[str, int]:
    """Which colour and dashes each policy has: PEARL the first, the others in order."""
    rest = [name for name in names if name != "pearl"]
    found = {name: index for index, name in enumerate(rest, start=1)}
    if "pearl" in names:
        found["pearl"] = 0
    return {name: found[name] for name in names}


def throughput(result: Result) -> Drawing:
    """Tokens/s of each train step over time, above the GPU budget: training, reserved, preemptible (paper Figure 6)."""
    drawing = Drawing(WIDTH, 400, f"Throughput over time, {base_name(result.trace)}, simulated")
    top, bottom = 56.0, 340.0
    time = Scale(0.0, max(result.hours * 60, 1e-9), LEFT, WIDTH - RIGHT)
    series = [(name, _stepped(policy)) for name, policy in result.policies.items()]
    rate = from_zero((value for _, points in series for _, _, value in points), bottom, top)
    most = max((each.reserved_gpus + each.preemptible_gpus + each.training_gpus for each in result.budget), default=0)
    gpus = from_zero([most], bottom, top)
    budget = _thinned(result.budget, result.hours * 3600 / FINEST)
    layers = (("training", "area0"), ("reserved", "area1"), ("preemptible", "area2"))
    for index, (name, fill) in enumerate(layers):
        drawing.path(
            _layer(budget, index, result.hours, time, gpus),
            fill=fill,
            more=' fill-opacity="0.55"',
            tip=f"{name} GPUs",
        )
    drawing.y_axis(rate, LEFT, WIDTH - RIGHT, "tokens/s of a train step")
    drawing.x_axis(time, bottom, top, "minutes")
    if most:
        drawing.y_axis(gpus, WIDTH - RIGHT, LEFT, "GPUs", grid=False)
    index_of = indices(list(result.policies))
    for name, points in series:
        index = index_of[name]
        data = "".join(
            f"{'M' if position == 0 else 'L'}{number(time(begin / 60))} {number(rate(value))}H{number(time(end / 60))}"
            for position, (begin, end, value) in enumerate(points)
        )
        style = f' stroke-width="{2.6 if index == 0 else 1.8}" stroke-linejoin="round" stroke-dasharray="{dash(index)}"'
        drawing.path(data, stroke=colour(index), tip=name, more=style)
    entries = [(name, colour(index), dash(index)) for name, index in index_of.items()]
    drawing.legend(LEFT, 18, [*entries, *((f"{name} GPUs", fill, "box") for name, fill in layers)], WIDTH - 20)
    return drawing


def _stepped(policy: PolicyResult) -> list[tuple[float, float, float]]:
    """(from, to, tokens/s) of each train step; without steps, of the fixed intervals."""
    if policy.steps:
        return [(step.start_s, step.end_s, _rate(step)) for step in policy.steps]
    points = policy.throughput
    return [(begin, end, value) for (begin, value), (end, _) in pairwise(points)]


def _rate(step: Step) -> float:
    return (step.rollout_tokens + step.trained_tokens) / max(step.end_s - step.start_s, 1e-9)


def _thinned(budget: Sequence[Budget], least_s: float) -> list[Budget]:
    """Without what is narrower than can be seen: of changes within `least_s` of each other the last."""
    found: list[Budget] = []
    for each in budget:
        if found and each.at_s - found[-1].at_s < least_s:
            found[-1] = Budget(found[-1].at_s, each.reserved_gpus, each.preemptible_gpus, each.training_gpus)
        else:
            found.append(each)
    return found


def _layer(budget: Sequence[Budget], index: int, hours: float, time: Scale, gpus: Scale) -> str:
    """The index-th layer of the stacked budget, as a closed path."""
    if not budget:
        return ""

    def heights(each: Budget) -> tuple[int, int]:
        parts = (each.training_gpus, each.reserved_gpus, each.preemptible_gpus)
        return sum(parts[:index]), sum(parts[: index + 1])

    edges = [*(each.at_s / 60 for each in budget), hours * 60]
    upper, lower = "", ""
    for position, each in enumerate(budget):
        below, above = heights(each)
        begin, end = time(min(edges[position], hours * 60)), time(min(edges[position + 1], hours * 60))
        upper += f"{'L' if upper else 'M'}{number(begin)} {number(gpus(above))}H{number(end)}"
        lower = f"L{number(end)} {number(gpus(below))}H{number(begin)}" + lower
    return upper + lower + "Z"


def bars(summaries: Sequence[PolicySummary], oracles: Sequence[tuple[str, float]], reference: str) -> Drawing:
    """A bar a policy, its 95 % interval over seeds, and its ratio to the reference; oracles as lines."""
    row, left, right = 30, 190, 150
    top = 40.0
    drawing = Drawing(WIDTH, int(top) + row * len(summaries) + 56, "Throughput by policy, simulated")
    bottom = top + row * len(summaries)
    values = [each.throughput.high for each in summaries] + [value for _, value in oracles]
    scale = from_zero(values, left, WIDTH - right)
    drawing.x_axis(scale, bottom, top, "tokens/s")
    index_of = indices([each.name for each in summaries])
    for index, each in enumerate(summaries):
        y = top + index * row
        found = each.throughput
        tip = f"{each.name}: {found.mean:.0f} tokens/s" + (f" ± {found.half:.0f}" if found.count > 1 else "")
        drawing.text(left - 8, y + 20, each.name, "end")
        drawing.rect(left, y + 6, scale(found.mean) - left, row - 12, colour(index_of[each.name]), tip)
        if found.count > 1:
            middle = y + row / 2
            low, high = scale(max(0.0, found.low)), scale(found.high)
            drawing.line(low, middle, high, middle, "ink", ' stroke-width="1.5"')
            for end in (low, high):
                drawing.line(end, middle - 5, end, middle + 5, "ink", ' stroke-width="1.5"')
        ratio = "" if each.ratio is None else f"{each.ratio.mean:.2f}x"
        mark = f"  {ratio} {reference}" if each.name != reference and ratio else ""
        drawing.text(WIDTH - right + 8, y + 20, amount(found.mean) + mark)
    for index, (name, value) in enumerate(oracles):
        drawing.line(scale(value), top - 6, scale(value), bottom, "ink", ' stroke-dasharray="4 4"')
        drawing.text(scale(value) - 4, top - 10 - 14 * index, f"oracle, {name}", "end", "faint")
    return drawing


def uses(summaries: Sequence[PolicySummary]) -> Drawing:
    """Where the GPU-hours went: a stacked bar a policy."""
    shown = [each for each in summaries if each.uses]
    row, left, top = 28, 190, 48.0
    drawing = Drawing(WIDTH, int(top) + row * len(shown) + 50, "Where the GPU-hours went, simulated")
    scale = Scale(0.0, 100.0, left, WIDTH - 30)
    drawing.x_axis(scale, top + row * len(shown), top, "% of the GPU-hours that were there")
    for index, each in enumerate(shown):
        y, at = top + index * row, 0.0
        drawing.text(left - 8, y + 19, each.name, "end")
        for use, share in each.uses:
            wide = scale(100 * share) - scale(0)
            tip = f"{each.name}: {use} {share:.1%}"
            drawing.rect(scale(at), y + 5, wide, row - 10, use, tip)
            if wide > 30:
                drawing.text(
                    scale(at) + wide / 2,
                    y + 19,
                    f"{100 * share:.0f}",
                    "middle",
                    "",
                    ' style="paint-order:stroke;stroke:var(--ground);stroke-width:3px"',
                )
            at += 100 * share
    drawing.legend(left, 18, [(use, use, "box") for use in USES], WIDTH - 10)
    return drawing


def roles(result: Result, name: str) -> Drawing:
    """A row a GPU: what it did when. GPUs that are not there leave the row empty."""
    by_gpu: dict[str, list[Span]] = {}
    for span in result.policies[name].spans:
        by_gpu.setdefault(span.gpu, []).append(span)
    gpus = sorted(by_gpu, key=_natural)
    every = -(-len(gpus) // MOST_GPUS) if gpus else 1
    shown = gpus[::every]
    row = 13 if len(shown) <= 40 else 9
    top = 46.0
    bottom = top + row * len(shown)
    title = f"Roles of each GPU under {name}, simulated" + (f" (every {every}th GPU)" if every > 1 else "")
    drawing = Drawing(WIDTH, int(bottom) + 46, title)
    time = Scale(0.0, max(result.hours * 60, 1e-9), LEFT + 20, WIDTH - 16)
    drawing.x_axis(time, bottom, top, "minutes")
    boxes: dict[str, list[str]] = {use: [] for use in USES}
    for index, gpu in enumerate(shown):
        y = top + index * row
        drawing.text(LEFT + 14, y + row - 3, gpu, "end", "faint", ' font-size="9"')
        for span in _merged(by_gpu[gpu]):
            begin, end = time(min(span.start_s / 60, time.high)), time(min(span.end_s / 60, time.high))
            if end - begin >= THINNEST_PX:
                boxes.setdefault(span.use, []).append(
                    f"M{number(begin)} {number(y + 1)}h{number(end - begin)}v{row - 2}h{number(begin - end)}z"
                )
    for use, parts in boxes.items():
        drawing.path("".join(parts), fill=use if use in USES else "idle", tip=use)
    drawing.legend(LEFT + 20, 18, [(use, use, "box") for use in USES if boxes[use]], WIDTH - 10)
    return drawing


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one use as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: each.start_s):
        last = found[-1] if found else None
        if last is not None and last.use == span.use and abs(last.end_s - span.start_s) < 1e-6:
            found[-1] = Span(span.gpu, last.start_s, span.end_s, span.use)
        else:
            found.append(span)
    return found


def _natural(gpu: str) -> tuple[tuple[int, int, str], ...]:
    """n2/1 before n10/0."""
    parts: list[tuple[int, int, str]] = []
    digits, letters = "", ""
    for each in gpu + "\0":
        if each.isdigit() and each.isascii():
            if letters:
                parts.append((1, 0, letters))
                letters = ""
            digits += each
        else:
            if digits:
                parts.append((0, int(digits), ""))
                digits = ""
            letters += each
    return tuple(parts)


def decisions(result: Result) -> Drawing:
    """Decisions under which a whole batch ran. Left: its seconds as predicted and as they came; right: what changes gained.

    On the dashed line prediction and outcome agree.
    """
    drawing = Drawing(WIDTH, 400, "Decisions: predicted against realised, simulated")
    index_of = indices(list(result.policies))
    times: list[_Dot] = []
    changes: list[_Dot] = []
    for name, policy in result.policies.items():
        for each in policy.decided:
            if each.predicted_s is not None and each.realised_s is not None:
                tip = f"{name}, {each.at_s / 60:.1f} min, {each.cause}: {shape(each)}, predicted {each.predicted_s:.0f} s, realised {each.realised_s:.0f} s"
                times.append((index_of[name], each.predicted_s, each.realised_s, tip))
        for index, predicted, realised in gains(policy.decided):
            each = policy.decided[index]
            tip = f"{name}, {each.at_s / 60:.1f} min, {each.cause}: {shape(each)}, gain predicted {predicted:+.1%}, realised {realised:+.1%}"
            changes.append((index_of[name], 100 * predicted, 100 * realised, tip))
    half = WIDTH / 2
    _dots(drawing, times, LEFT, half - 20, "predicted batch time, s", "realised, s", zero=False)
    _dots(drawing, changes, half + LEFT, WIDTH - 16, "predicted gain of a change, %", "realised, %", zero=True)
    seen = {index for index, *_ in (*times, *changes)}
    entries = [(name, colour(index), "box") for name, index in index_of.items() if index in seen]
    drawing.legend(LEFT, 18, entries, WIDTH - 10)
    return drawing


def _dots(drawing: Drawing, dots: list[_Dot], left: float, right: float, across: str, up: str, zero: bool) -> None:
    """A panel with the same scale on both axes."""
    top, bottom = 44.0, 340.0
    shown = dots[:: -(-len(dots) // MOST_DOTS) or 1]
    low, high = _span([value for _, x, y, _ in shown for value in (x, y)], zero)
    x_scale, y_scale = Scale(low, high, left, right), Scale(low, high, bottom, top)
    drawing.y_axis(y_scale, left, right, up)
    drawing.x_axis(x_scale, bottom, top, across, 5)
    drawing.line(x_scale(low), y_scale(low), x_scale(high), y_scale(high), "ink", ' stroke-dasharray="5 4"')
    for index, x, y, tip in shown:
        at_x, at_y = x_scale(max(low, min(high, x))), y_scale(max(low, min(high, y)))
        drawing.dot(at_x, at_y, 4, colour(index), tip)
    if not shown:
        drawing.text((left + right) / 2, 190, "no such decision", "middle", "faint")


def shape(decided: Decided) -> str:
    """A configuration in short: 3P5D, 8C, paused."""
    match decided.mode:
        case "disaggregated":
            return f"{decided.prefill}P{decided.decode}D"
        case "colocated":
            return f"{decided.colocated}C"
        case _:
            return decided.mode


def _span(values: Sequence[float], zero: bool) -> tuple[float, float]:
    """Limits that hold 98 % of the values (and zero); what is beyond is drawn at the edge."""
    if not values:
        return -1.0, 1.0
    ordered = sorted(values)
    cut = len(ordered) // 100
    low, high = ordered[cut], ordered[-1 - cut]
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    room = max(1.0, 0.08 * (high - low))
    return low - room, high + room


def sensitivity(rows: Sequence[tuple[str, float, float]], base: float, label: str) -> Drawing:
    """A tornado: what `label` becomes with each constant a step lower and a step higher, the strongest first."""
    ordered = sorted(rows, key=lambda each: -max(abs(each[1] - base), abs(each[2] - base)))
    row, left, top = 24, 250, 46.0
    bottom = top + row * len(ordered)
    drawing = Drawing(WIDTH, int(bottom) + 50, f"Sensitivity of {label}, simulated")
    values = [value for _, low, high in ordered for value in (low, high)] + [base]
    room = max(0.02 * abs(base), 0.15 * (max(values) - min(values)), 1e-9)
    scale = Scale(min(values) - room, max(values) + room, left, WIDTH - 60)
    drawing.x_axis(scale, bottom, top, label)
    for index, (name, low, high) in enumerate(ordered):
        y = top + index * row
        drawing.text(left - 8, y + 16, name, "end")
        for value, fill in ((low, "s0"), (high, "s1")):
            begin, end = sorted((scale(base), scale(value)))
            drawing.rect(
                begin, y + 5 if fill == "s0" else y + 12, max(end - begin, 1.0), 6, fill, f"{name}: {value:.3f}"
            )
    drawing.line(scale(base), top - 4, scale(base), bottom, "ink")
    drawing.legend(left, 18, [("constant lower", "s0", "box"), ("constant higher", "s1", "box")], WIDTH - 10)
    return drawing


def grouped(
    title: str, groups: Sequence[tuple[str, Sequence[tuple[float, float] | None]]], names: Sequence[str], label: str
) -> Drawing:
    """Bars in groups: of each group (its name, and of each of `names` the value and half its interval, or None)."""
    left, top, bottom = LEFT, 52.0, 300.0
    drawing = Drawing(WIDTH, 350, title)
    values = [pair for _, pairs in groups for pair in pairs if pair is not None]
    low, high = (
        min([0.0, *(value - half for value, half in values)]),
        max([0.0, *(value + half for value, half in values)]),
    )
    room = 0.08 * (high - low) or 1.0
    scale = Scale(low - (room if low < 0 else 0.0), high + room, bottom, top)
    drawing.y_axis(scale, left, WIDTH - 16, label)
    wide = (WIDTH - 16 - left) / max(1, len(groups))
    thick = min(40.0, 0.8 * wide / max(1, len(names)))
    for position, (group, pairs) in enumerate(groups):
        begin = left + wide * position + (wide - thick * len(names)) / 2
        drawing.text(left + wide * (position + 0.5), bottom + 18, group, "middle")
        for index, pair in enumerate(pairs):
            if pair is None:
                continue
            value, half = pair
            x, ends = begin + index * thick, sorted((scale(0.0), scale(value)))
            tip = f"{group}, {names[index]}: {value:.3g}" + (f" ± {half:.2g}" if half else "")
            drawing.rect(x + 1, ends[0], thick - 2, max(ends[1] - ends[0], 0.5), colour(index), tip)
            if half:
                middle = x + thick / 2
                drawing.line(middle, scale(value - half), middle, scale(value + half), "ink", ' stroke-width="1.5"')
    drawing.line(left, scale(0.0), WIDTH - 16, scale(0.0), "ink")
    drawing.legend(left, 18, [(name, colour(index), "box") for index, name in enumerate(names)], WIDTH - 10)
    return drawing


def lines(
    title: str, series: Sequence[tuple[str, Sequence[tuple[float, float]]]], across: str, up: str, *, zero: bool = True
) -> Drawing:
    """Lines with dots through points (x, y)."""
    top, bottom = 52.0, 300.0
    drawing = Drawing(WIDTH, 350, title)
    points = [point for _, each in series for point in each]
    xs, ys = [x for x, _ in points] or [0.0, 1.0], [y for _, y in points] or [0.0, 1.0]
    room = 0.04 * (max(xs) - min(xs)) or 1.0
    x_scale = Scale(min(xs) - room, max(xs) + room, LEFT, WIDTH - 16)
    low = 0.0 if zero else min(ys) - 0.1 * (max(ys) - min(ys))
    y_scale = Scale(low, max(ys) + 0.08 * (max(ys) - low) or 1.0, bottom, top)
    drawing.y_axis(y_scale, LEFT, WIDTH - 16, up)
    drawing.x_axis(x_scale, bottom, top, across)
    for index, (name, each) in enumerate(series):
        data = "".join(f"{'L' if n else 'M'}{number(x_scale(x))} {number(y_scale(y))}" for n, (x, y) in enumerate(each))
        drawing.path(data, stroke=colour(index), tip=name, more=f' stroke-width="2" stroke-dasharray="{dash(index)}"')
        for x, y in each:
            drawing.dot(x_scale(x), y_scale(y), 3.5, colour(index), f"{name}: {amount(x)}, {y:.3g}")
    drawing.legend(LEFT, 18, [(name, colour(index), dash(index)) for index, (name, _) in enumerate(series)], WIDTH - 10)
    return drawing
