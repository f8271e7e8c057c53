"""Makes the pictures and the quoted conclusion of docs/try-your-trace.md by the command that the page names: `python docs/make_try_your_trace.py`."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from services.simulator.whatif.report.summary import reference_of, summarise
from services.simulator.whatif.report.write import verdict
from services.simulator.whatif.result import Result

DOCS = Path(__file__).parent
PAGE = DOCS / "try-your-trace.md"
PICTURES = ("policies", "throughput", "gpu-hours", "roles-pearl")


def command(page: str) -> list[str]:
    """The first `pearl simulate run` of the page, as arguments."""
    found = re.search(r"^    pearl (simulate run (?:.*\\\n)*.*)$", page, re.MULTILINE)
    assert found, "the page names no command"
    return shlex.split(found[1].replace("\\\n", " "))


def main() -> int:
    """Run it, copy the pictures, quote the conclusion."""
    page = PAGE.read_text(encoding="utf-8")
    arguments = command(page)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        arguments[arguments.index("--report") + 1] = str(report)
        subprocess.run([sys.executable, "-m", "services.cli", *arguments], check=True)
        for name in PICTURES:
            shutil.copy(report / f"{name}.svg", DOCS / "try-your-trace" / f"{name}.svg")
        results = msgspec.json.decode((report / "result.json").read_bytes(), type=list[Result])
    reference = reference_of(results[0])
    quoted = "\n".join(f"> {line}\n>" for line in verdict(summarise(results, reference), reference)).removesuffix("\n>")
    text = re.sub(
        r"<!-- verdict -->.*?<!-- /verdict -->",
        lambda _: f"<!-- verdict -->\n{quoted}\n<!-- /verdict -->",
        page,
        flags=re.DOTALL,
    )
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
