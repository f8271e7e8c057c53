"""One HTML page that needs nothing else: no script, style, font or picture from anywhere. Pure but for its own two files.

Readable on light and dark ground, by keyboard, on paper and without scripts; a small script sorts tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from services.simulator.whatif.report.svg import TEXT, THEME, Drawing

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
"""The browser holds the page to it: whatever a trace's name contains, nothing is fetched."""


class Cell(msgspec.Struct, frozen=True):
    """Text, and the number to sort by if there is one."""

    text: str
    value: float | None = None
    kind: str = ""  # "good", "bad"


Row = Sequence[Cell | str]


def num(value: float | None, form: str = ",.0f", after: str = "") -> Cell:
    """A number; a dash for none, sorted last."""
    return Cell("-", -1e308) if value is None else Cell(format(value, form) + after, value)


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    named = f' class="{kind}"' if kind else ""
    return f"<p{named}>{escape(text)}</p>\n"


def heading(text: str) -> str:
    """A section's heading."""
    anchor = "-".join("".join(each if each.isalnum() else " " for each in text.lower()).split())
    return f'<h2 id="{escape(anchor)}">{escape(text)}</h2>\n'


def bullets(items: Sequence[str]) -> str:
    """A list of plain texts."""
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>\n"


def table(columns: Sequence[str], rows: Sequence[Row], caption: str = "", texts: Sequence[int] = (0,)) -> str:
    """A table; `texts`: the columns that hold text, and stand to the left."""
    if not rows:
        return paragraph("None.", "note")
    left = set(texts)

    def cell(index: int, content: Cell | str) -> str:
        found = Cell(content) if isinstance(content, str) else content
        kinds = " ".join(each for each in ("t" if index in left else "", found.kind) if each)
        named = f' class="{kinds}"' if kinds else ""
        value = "" if found.value is None else f' data-v="{found.value:.6g}"'
        return f"<td{named}{value}>{escape(found.text)}</td>"

    heads = "".join(
        f'<th scope="col"{" class=t" if index in left else ""}>{escape(name)}</th>'
        for index, name in enumerate(columns)
    )
    body = "\n".join("<tr>" + "".join(cell(index, each) for index, each in enumerate(row)) + "</tr>" for row in rows)
    told = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll" tabindex="0"><table data-sort>{told}<thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n'


def figure(drawing: Drawing, caption: str) -> str:
    """A drawing in the page's colours."""
    return f"<figure>{drawing.svg(alone=False)}<figcaption>{escape(caption)}</figcaption></figure>\n"


def folded(summary: str, content: str) -> str:
    """What opens when asked for. `content` is HTML."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>\n"


def page(title: str, parts: Sequence[str]) -> str:
    """The document. `parts` are HTML."""
    style = THEME + TEXT + _own("page.css")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>\n"
        + "".join(parts)
        + f"</main>\n<script>{_own('page.js')}</script></body></html>\n"
    )


@cache
def _own(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
