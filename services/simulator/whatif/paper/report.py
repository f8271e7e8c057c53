"""Everything that was regenerated: a table for a terminal, JSON, a folder with the plots and one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.jobfile import ConfigError
from services.simulator.whatif.paper import figure2a, figure2c, figure5, figure6, figure7, figure8, table2, table3
from services.simulator.whatif.paper.base import AGREES, DISAGREES, NOT_SIMULATED, SAME_SIDE, Figure, tally
from services.simulator.whatif.paper.options import Options
from services.simulator.whatif.paper.runs import Runner
from services.simulator.whatif.report import html

ALL: Final[dict[str, Callable[[Runner, Options], Figure]]] = {
    module.NAME: module.figure for module in (figure2a, figure2c, figure5, figure6, figure7, figure8, table2, table3)
}
RULE: Final = (
    "agrees: within the tolerance given beside each claim; same direction: the gain has the right sign, not the right size; "
    "disagrees: neither."
)
_KINDS: Final = {AGREES: "good", SAME_SIDE: "", DISAGREES: "bad", NOT_SIMULATED: ""}


def chosen(names: str) -> list[str]:
    """Of `--only`: names with commas; all by default. Raises ConfigError."""
    found = [name.strip() for name in names.split(",") if name.strip()]
    for name in found:
        if name not in ALL:
            raise ConfigError(f"--only {name}: one of {', '.join(ALL)} is expected")
    return list(dict.fromkeys(found)) or list(ALL)


def as_json(figures: Sequence[Figure], wall_s: float) -> dict[str, object]:
    """The whole, as plain data."""
    return {
        "figures": {figure.name: figure.as_json() for figure in figures},
        "verdicts": dict(tally(figures)),
        "wall_s": round(wall_s, 1),
    }


def print_figures(figures: Sequence[Figure], console: Console | None = None) -> None:
    """Claims of each figure, then why they differ."""
    out = console or Console(width=max(Console().width, 118))
    for figure in figures:
        table = Table(title=Text(figure.title), title_justify="left", title_style="bold", caption=Text(figure.setting))
        table.add_column("claim", overflow="fold")
        for column in ("paper", "simulated"):
            table.add_column(column, justify="right")
        table.add_column("")
        for each in figure.claims:
            style = {AGREES: "green", DISAGREES: "red"}.get(each.verdict)
            table.add_row(Text(f"{each.text} ({each.section})"), each.paper, each.ours, Text(each.verdict, style or ""))
        out.print(table)
        for line in figure.differences:
            out.print(Text(f"  {line}"))
        out.print()
    out.print(Text(", ".join(f"{count} {name}" for name, count in tally(figures).items()) + "."))


def write_report(figures: Sequence[Figure], folder: Path, told: str, wall_s: float) -> None:
    """`index.html`, `paper.md`, `paper.json` and a plot a file into `folder`, which is made. Raises ConfigError."""
    files = {f"{name}.svg": drawing.svg() for figure in figures for name, drawing, _ in figure.drawings}
    files["paper.json"] = json.dumps(as_json(figures, wall_s), indent=1) + "\n"
    files["paper.md"] = as_markdown(figures, told)
    files["index.html"] = page(figures, told)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report {folder}: cannot be written ({error})") from error


def as_markdown(figures: Sequence[Figure], told: str) -> str:
    """Claims and reasons, for documents."""
    counts = ", ".join(f"{count} {name}" for name, count in tally(figures).items() if count)
    lines = [f"Simulated, nothing measured on GPUs: {told}", "", f"{counts}. {RULE}", ""]
    for figure in figures:
        lines += [f"## {figure.title}", "", f"Paper {figure.section}. {figure.setting}", ""]
        lines += ["| claim | paper | simulated | verdict | tolerance |", "|---|---|---|---|---|"]
        lines += [
            f"| {_cell(each.text)} | {each.paper} | {each.ours} | {each.verdict} | ± {each.within:g} |"
            for each in figure.claims
        ]
        lines.append("")
        if any(each.verdict in (SAME_SIDE, DISAGREES) for each in figure.claims):
            lines += ["Why the simulation differs:", "", *(f"- {line}" for line in figure.differences), ""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(figures: Sequence[Figure], told: str) -> str:
    """The page: a summary, then a section a figure."""
    counts = ", ".join(f"{count} {name}" for name, count in tally(figures).items() if count)
    parts = [
        html.paragraph(f"Simulated, nothing measured on GPUs: {told}", "note"),
        html.paragraph(f"{counts}. {RULE}", "verdict"),
    ]
    for figure in figures:
        parts += [html.heading(figure.title), html.paragraph(f"Paper {figure.section}. {figure.setting}", "note")]
        rows = [
            [
                each.text,
                each.paper,
                each.ours,
                html.Cell(each.verdict, kind=_KINDS[each.verdict]),
                f"± {each.within:g}",
                each.section,
                each.note,
            ]
            for each in figure.claims
        ]
        columns = ["claim", "paper", "simulated", "verdict", "tolerance", "section", "note"]
        parts.append(html.table(columns, rows, texts=(0, 3, 6)))
        parts += [html.figure(drawing, caption) for _, drawing, caption in figure.drawings]
        if any(each.verdict in (SAME_SIDE, DISAGREES) for each in figure.claims):
            parts += [html.paragraph("Why the simulation differs:"), html.bullets(figure.differences)]
        parts += [html.table(sheet.columns, sheet.rows, sheet.title, sheet.texts) for sheet in figure.sheets]
    return html.page("The paper's evaluation, simulated", parts)
