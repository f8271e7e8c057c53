"""`pearl doctor` and SGLang: what is installed is read without being started, what runs is asked; each difference is told."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from messages.ids import Zone
from services.cli.doctor_sglang import look_at_sglang
from services.cli.finding import Finding
from services.jobfile import DecisionSection, JobFile, NodeSection, RolloutSection, SglangSection
from services.rollout_worker.engines.sglang.api import NEEDED, OPTIONAL, TESTED, UPDATES
from tests.sglang_stand_in import StandIn

FLAGS = (
    "model_path host port tp_size device max_running_requests max_total_tokens chunked_prefill_size skip_server_warmup "
    "incremental_streaming_output skip_tokenizer_init enable_memory_saver disaggregation_mode enable_pd_role_switch "
    "disaggregation_transfer_backend disaggregation_bootstrap_port"
)
CALLS = (*NEEDED, *OPTIONAL, *UPDATES["disk"])
PACKAGES = ("torch_memory_saver", "mooncake")


def interpreter(
    folder: Path, *, version: str = TESTED, calls: tuple[str, ...] = CALLS, flags: str = FLAGS, packages: Any = PACKAGES
) -> str:
    """One that has an SGLang with this surface."""
    site = folder / "site"
    served = site / "sglang" / "srt" / "entrypoints"
    served.mkdir(parents=True)
    (site / "sglang" / "__init__.py").write_text("raise RuntimeError('it is not to be imported')")
    (served / "http_server.py").write_text("".join(f'@app.post(\n    "{path}"\n)\n' for path in calls))
    (site / "sglang" / "srt" / "server_args.py").write_text("".join(f"{flag}: int\n" for flag in flags.split()))
    (site / f"sglang-{version}.dist-info").mkdir()
    (site / f"sglang-{version}.dist-info" / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    for package in packages:
        (site / package).mkdir()
        (site / package / "__init__.py").touch()
    return script(folder, f'PYTHONPATH="{site}" exec "{sys.executable}" "$@"')


def script(folder: Path, line: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def job(section: SglangSection, **decision: Any) -> JobFile:
    return JobFile(
        nodes=(NodeSection(name="n", zone=Zone.RESERVED, gpus=1),),
        rollout=RolloutSection(engine="sglang", sglang=section),
        decision=DecisionSection(**{"disaggregation": True, **decision}),
    )


def looked(python: str, **decision: Any) -> list[Finding]:
    return look_at_sglang(job(SglangSection(python=python), **decision))


def test_one_that_fits_has_no_findings(tmp_path: Path) -> None:
    assert looked(interpreter(tmp_path)) == [] == look_at_sglang(JobFile())


@pytest.mark.parametrize(
    ("differs", "what"),
    [
        ({"version": "0.4.1"}, f"SGLang 0.4.1 was not tried with PEARL; {TESTED} was"),
        ({"calls": tuple(each for each in CALLS if each != "/abort_request")}, "has no /abort_request, without which"),
        ({"calls": tuple(each for each in CALLS if each != "/pd_role_switch")}, "/pd_role_switch: prefill and decode"),
        ({"flags": FLAGS.replace("skip_tokenizer_init", "")}, "does not know --skip-tokenizer-init, with which"),
        ({"packages": ("mooncake",)}, "torch-memory-saver is missing"),
        ({"packages": ("torch_memory_saver",)}, "Mooncake is missing"),
    ],
)
def test_each_difference_is_told(tmp_path: Path, differs: dict[str, Any], what: str) -> None:
    (found,) = looked(interpreter(tmp_path, **differs))
    assert what in found.what and "rollout.sglang.python" in found.where and found.do


@pytest.mark.parametrize(
    ("line", "what"), [("exit 1", "does not say which"), ("echo null", "has no SGLang"), ("echo no", "does not say")]
)
def test_an_interpreter_that_is_none(tmp_path: Path, line: str, what: str) -> None:
    (found,) = looked(script(tmp_path, line))
    assert what in found.what and f"sglang=={TESTED}" in found.do
    (found,) = looked(str(tmp_path / "none"))
    assert "cannot be run" in found.what


def test_lent_gpus_need_the_memory_saver(tmp_path: Path) -> None:
    section = SglangSection(python=interpreter(tmp_path, packages=("mooncake",)), memory_saver=False)
    (found,) = look_at_sglang(job(section, lending=True))
    assert "keep its memory" in found.what
    assert look_at_sglang(job(section)) == []


async def test_servers_that_run_are_asked() -> None:
    server = StandIn()
    section = SglangSection(adopt={"n-w0": await server.start()})
    try:
        assert await asyncio.to_thread(look_at_sglang, job(section)) == []
        server.paths.remove("/weights_checker")
        (found,) = await asyncio.to_thread(look_at_sglang, job(section))
        assert "updates of weights are believed" in found.what and "n-w0" in found.where
        server.paths.remove("/pause_generation")
        server.release = "0.6.0"
        found = [each.what for each in await asyncio.to_thread(look_at_sglang, job(section))]
        assert [each.split()[1] for each in found] == ["0.6.0"] * 3 and "/pause_generation" in found[1]
    finally:
        await server.stop()
    (found,) = await asyncio.to_thread(look_at_sglang, job(section))
    assert "no SGLang server answers there" in found.what
