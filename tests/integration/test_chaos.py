"""A minute of faults on real processes; the long run is `make soak` (docs/chaos.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.chaos.report import to_text
from tests.integration.chaos.run import chaos


@pytest.mark.slow
async def test_a_minute_of_faults(tmp_path: Path) -> None:
    report = await chaos(tmp_path, seed=5, minutes=1.0, count=10, time_scale=4.0)
    print(to_text(report))
    assert report.problems == [], to_text(report)
    assert len(report.injected) >= 8 and report.trained > 0
