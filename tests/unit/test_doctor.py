"""`pearl doctor`: each finding says what, where and what to do; a machine in order has none."""

from __future__ import annotations

import importlib.util
import json
import resource
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.cli import doctor
from services.cli.__main__ import main
from services.cli.doctor import Finding, look_at_files, look_at_job, look_at_machine, look_at_server, skew
from services.jobfile import JobFile, JobSection, ModelSection, NatsSection
from services.models import initial_model
from services.nats_server.keys import ensure_keys
from services.nats_server.permissions import users
from services.nats_server.process import keys_dir


def job_in(folder: Path, **sections: Any) -> JobFile:
    return JobFile(job=JobSection(name="ill", data_dir=str(folder)), **sections)


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = findings
    assert found.check == check and found.what and found.where and found.do
    return found


def test_a_machine_in_order_has_no_findings(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    assert [*look_at_machine(job), *look_at_files(job)] == []


def test_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = only(list(look_at_machine(job_in(tmp_path, nats=NatsSection(port=port)))), "port")
    assert str(port) in found.what


@pytest.mark.parametrize("version", ["v2.9.1", "v3.0.0"])
def test_a_server_of_another_release(tmp_path: Path, version: str) -> None:
    binary = tmp_path / "nats-server"
    binary.write_text(f"#!/bin/sh\necho nats-server: {version}\n")
    binary.chmod(0o755)
    found = only(list(look_at_machine(job_in(tmp_path, nats=NatsSection(server=str(binary))))), "nats-server")
    assert version in found.what


def test_no_server_binary(tmp_path: Path) -> None:
    only(list(look_at_machine(job_in(tmp_path, nats=NatsSection(server=str(tmp_path / "none"))))), "nats-server")


def test_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert "emulated" in only(list(look_at_machine(job_in(tmp_path))), "torch").do


def test_limits_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 62)
    assert [each.check for each in look_at_machine(job_in(tmp_path))] == ["files", "disk"]


def test_an_incomplete_model(tmp_path: Path) -> None:
    whole = initial_model(job_in(tmp_path), 40)
    job = job_in(tmp_path, model=ModelSection(path=str(whole)))
    assert list(look_at_files(job)) == []
    file = whole / "model.safetensors"
    data = file.read_bytes()
    for content in (data[:1000], data[: len(data) // 2], data[:4], b"\xff" * 100):
        file.write_bytes(content)
        assert str(file) in only(list(look_at_files(job)), "model").what
    file.unlink()
    only(list(look_at_files(job)), "model")
    (whole / "config.json").unlink()
    only(list(look_at_files(job)), "model")


def test_keys(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    folder = keys_dir(job)
    ensure_keys(folder, [user.name for user in users(job)])
    assert list(look_at_files(job)) == []
    (folder / "agent.nk").chmod(0o644)
    assert "chmod" in only(list(look_at_files(job)), "keys").do
    (folder / "agent.nk").unlink()
    assert "agent" in only(list(look_at_files(job)), "keys").what


async def test_a_server_of_ones_own_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"nats://127.0.0.1:{probe.getsockname()[1]}"
    job = job_in(tmp_path, nats=NatsSection(embedded=False, url=url))
    assert url in only(await look_at_server(job), "nats").where


def test_a_job_that_services_would_refuse(tmp_path: Path) -> None:
    assert "nodes" in only(list(look_at_job(job_in(tmp_path), tmp_path / "job.toml")), "job").what


def test_skew_is_in_milliseconds() -> None:
    assert skew("1970-01-01T00:00:10.5Z", 10.0) == pytest.approx(500)
    assert skew("1970-01-01T02:00:10.123456789+02:00", 10.0) == pytest.approx(123.456)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f'[job]\ndata_dir = {msgspec.json.encode(str(tmp_path)).decode()}\n[nats]\nserver = "nowhere"\n')
    assert main(["doctor", "-c", str(path), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and {"check", "what", "where", "do"} == set(said["findings"][0])
    assert main(["doctor", "-c", str(tmp_path / "none.toml")]) == 2
