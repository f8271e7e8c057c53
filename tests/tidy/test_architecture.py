"""Pages that list the parts of the system list all of them, and none that there is not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"


def packages(folder: Path) -> set[str]:
    """Packages directly in a folder."""
    return {path.parent.name for path in folder.glob("*/__init__.py")}


def listed(page: str) -> set[str]:
    """What the page says is in services/: first cells of its table of processes, and paths `services/<name>/`."""
    rows = re.findall(r"(?m)^\| (`\w+`(?:, `\w+`)*) \|", page)
    return {name for row in rows for name in re.findall(r"\w+", row)} | set(re.findall(r"`services/(\w+)/`", page))


def test_the_architecture_page_names_every_package_of_services() -> None:
    there, said = packages(ROOT / "services"), listed(PAGE.read_text(encoding="utf-8"))
    assert not there - said, f"docs/architecture.md does not say what these of services/ are: {sorted(there - said)}"
    assert not said - there, f"docs/architecture.md names what is not in services/: {sorted(said - there)}"


def test_a_missing_and_an_invented_package_are_found() -> None:
    page = "| `agent`, `router` | x |\n| 3 | the services |\nand `services/edge/` is a library, `services/snapshot.py` a file"
    assert listed(page) == {"agent", "router", "edge"}
