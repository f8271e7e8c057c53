"""The gateway's section of the job file: what is refused, and keys and TLS as they are used."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest

from messages.ids import Activity, PolicyVersion, Role, Zone
from messages.router import AssignRequest
from pearl_state.model import RoleTable, Row
from services import jobfile
from services.jobfile import ConfigError, GatewaySection, JobFile, ModelSection
from services.router.config import Config as RouterConfig
from services.router.core import RouterCore
from services.router.gateway.config import Config, digest_of, tls_context
from services.supervisor.roster import roster
from tests.gateway_world import World, chat


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[gateway]\nbind = "8000"', "gateway.bind"),
        ('[gateway]\nbind = "127.0.0.1:99999"', "gateway.bind"),
        ('[gateway]\nbind = "127.0.0.1:65536"', "gateway.bind"),
        ('[gateway]\nbind = "0.0.0.0:8000"', "gateway.api_keys_file"),
        ('[gateway]\nbind = "128.0.0.1:8000"', "gateway.api_keys_file"),
        ('[gateway]\nbind = "[::]:8000"', "gateway.api_keys_file"),
        ('[gateway]\nbind = "127.0.0.1:65535"\ninstances = 2', "gateway.instances"),
        ('[gateway]\nbind = "127.0.0.1:65535"\ninstances = 9', "gateway.instances"),
        ('[gateway]\nbind = "127.0.0.1:0"\ntls_key = "k"', "gateway.tls_certificate"),
        ('[gateway]\nbind = "127.0.0.1:0"\nmax_body = 1', "did you mean max_body_bytes?"),
        ("[agent]\nprocesses = 0", "gateway.bind"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        jobfile.load(path)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "gateway",
    ['bind = "127.0.0.1:65535"', 'bind = "127.9.0.1:65534"\ninstances = 2', 'bind = "[::1]:0"\ninstances = 9'],
)
def test_the_last_port_and_every_loopback_address_will_do(tmp_path: Path, gateway: str) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"[gateway]\n{gateway}\n")
    assert jobfile.load(path).gateway.bind


def test_names_ports_and_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# two\nsk-a\n\n  sk-b \n")
    job = JobFile(
        model=ModelSection(path="/models/Qwen3-8B/"),
        gateway=GatewaySection(bind="[::1]:8000", api_keys_file=str(keys), instances=3),
    )
    config = Config.of(job, 2)
    assert (config.address, config.port, config.model) == ("::1", 8002, "Qwen3-8B")
    assert config.keys == {digest_of("sk-a"), digest_of("sk-b")}
    assert Config.of(JobFile(gateway=GatewaySection(bind="127.0.0.1:0"))).model == "tiny"
    assert [each.name for each in roster(job) if each.service == "router"] == ["router", "router-1", "router-2"]
    keys.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        Config.of(job)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
async def test_tls(tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    async with World(tls=(str(certificate), str(key))) as world:
        assert world.gateway.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        async with world.http.post("/v1/chat/completions", json=chat("Hi"), ssl=trusting) as response:
            assert response.status == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await world.http.get("/health")
    key.write_text("no key")
    with pytest.raises(ConfigError, match=r"gateway\.tls_certificate"):
        tls_context(world.config)


def test_a_router_keeps_to_the_newest_version_asked_for() -> None:
    rows = tuple(
        Row(
            worker=f"n-w{version}",
            gpus=(),
            zone=Zone.RESERVED,
            role=Role.COLOCATED,
            activity=Activity.ACTIVE,
            incarnation=1,
            role_generation=1,
            version=PolicyVersion(version),
        )
        for version in (3, 4)
    )
    core = RouterCore(RouterConfig(max_running=8, admission_pause_ms=1000))
    core.on_table(RoleTable(job="j", epoch=1, rows=rows), 0)
    ask = AssignRequest(request="r", trajectory="t", attempt=1, min_version=0, context_tokens=1, max_version=3)
    assert {core.assign(ask, 0).worker for _ in range(4)} == {"n-w3"}
    none = core.assign(
        AssignRequest(request="r", trajectory="t", attempt=1, min_version=2, context_tokens=1, max_version=2), 0
    )
    assert none.reason == "no worker at version 2 to 2"
