"""`pearl doctor` beside a running server: streams that are missing, another release, a user who is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.cell import job_in
from services.cli import doctor
from services.cli.doctor import look_at_server
from services.nats_server.keys import ensure_keys, seed_path
from services.nats_server.process import EmbeddedServer, keys_dir


async def test_findings_of_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = job_in(tmp_path, 1)
    assert await look_at_server(job) == []  # none runs
    server = EmbeddedServer(job)
    await server.start()
    try:
        (found,) = await look_at_server(job)
        assert found.check == "streams" and "bench_EV" in found.what and "KV_bench_roles" in found.what
        await server.prepare()
        assert await look_at_server(job) == []
        monkeypatch.setattr(doctor, "CLOCK_MS", -1)
        assert [each.check for each in await look_at_server(job)] == ["clock"]
        monkeypatch.setattr(doctor, "CLOCK_MS", 1000)
        monkeypatch.setattr(doctor, "NEWEST", (2, 12))
        assert [each.check for each in await look_at_server(job)] == ["nats-server"]
        monkeypatch.undo()
        seed_path(keys_dir(job), "cli").unlink()
        ensure_keys(keys_dir(job), ["cli"])  # one that the server does not know
        assert [each.check for each in await look_at_server(job)] == ["permissions"]
    finally:
        await server.stop()
