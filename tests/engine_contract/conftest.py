"""The engines under contract, each behind a kit that makes and looks at it. A new engine joins by a kit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
import pytest

from messages.ids import PolicyVersion, Role
from services.jobfile import JobFile, JobSection, RolloutSection, SglangSection
from services.rollout_worker.engines.base import Engine
from services.rollout_worker.engines.emulated import EmulatedEngine, ScaledClock
from services.rollout_worker.engines.kv_transfer import Limits
from services.rollout_worker.engines.sglang.engine import SglangEngine
from services.rollout_worker.engines.sglang.server import MODES
from services.snapshot import write_folder
from services.timing import hardware
from services.timing.hardware import Value
from tests.engine_contract import streams
from tests.sglang import real
from tests.sglang.real import RealServer
from tests.sglang_stand_in import StandIn

VOCAB = 40


class Kit(Protocol):
    """`make`: a started engine in a role; `slow`: several milliseconds a token; other options are those of [rollout]."""

    name: str
    paced: bool
    """Whether `slow` holds for prefills, too: a transfer that is under way stays so for a while."""

    async def make(
        self,
        role: Role = Role.COLOCATED,
        *,
        version: int | None = 0,
        slow: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> Any: ...

    def snapshot(self, version: int) -> str: ...

    def bad_snapshot(self) -> str: ...

    def idle(self, engine: Any) -> bool:
        """No request, connection or memory of one is left."""
        ...

    def under_way(self, prefill: Any, decode: Any) -> bool:
        """A context is on its way from one to the other."""
        ...

    def sever(self, prefill: Any) -> None:
        """Its connections to decode engines end, as those of a process that dies."""
        ...

    async def stop(self) -> None: ...


class _Made:
    paced = True

    def __init__(self) -> None:
        self._engines: list[Engine] = []

    async def begin(self, engine: Any, kit: Kit, role: Role, version: int | None) -> Any:
        self._engines.append(engine)
        await engine.start()
        if version is not None:
            await engine.load_snapshot(kit.snapshot(version), PolicyVersion(version))
        await engine.set_role(role)
        return engine

    async def stop(self) -> None:
        for engine in self._engines:
            await engine.stop()

    def under_way(self, prefill: Any, decode: Any) -> bool:
        return bool(decode._receiving and prefill._senders)

    def sever(self, prefill: Any) -> None:
        for connection in tuple(prefill._prefill_side._connections):
            connection.cancel()


class EmulatedKit(_Made):
    """Costs of the life cycle are zero here: their times are in tests/unit/test_emulated_engine.py."""

    name = "emulated"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        nothing = Value(0.0, "test")
        costs = ("prepare_s", "finalize_s", "activate_s", "deactivate_s", "set_role_s")
        described = msgspec.structs.replace(hardware.load("h800-qwen3-8b"), **dict.fromkeys(costs, nothing))
        self._hardware = msgspec.structs.replace(described, load_bytes_per_s=Value(1e18, "test"))

    async def make(
        self,
        role: Role = Role.COLOCATED,
        *,
        version: int | None = 0,
        slow: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> EmulatedEngine:
        described = self._hardware
        if slow:  # as the torch kit: prefill of 1 ms a token
            described = msgspec.structs.replace(described, host_s=Value(4e-3, "test"))
            curve = msgspec.structs.replace(described.linear, tokens=(1.0, 2.0), seconds=(1e-3, 2e-3))
            described = msgspec.structs.replace(described, linear=curve)
        engine = EmulatedEngine(
            described, RolloutSection(**options), ScaledClock(1.0 if slow else 500.0), limits=limits or Limits()
        )
        return await self.begin(engine, self, role, version)

    def snapshot(self, version: int) -> str:
        return write_folder(lambda draft: _touch(draft), self._folder, version, keep=100).uri

    def bad_snapshot(self) -> str:
        return self.snapshot(7)

    def idle(self, engine: Any) -> bool:
        model, side = engine._model, engine._prefill_side
        rooms = side.waiting or side._rooms.receivers or side._senders or side.connections
        return not (
            engine._replies or engine._receiving or engine._senders or model.requests() or model.cache.held or rooms
        )


def _touch(draft: Path) -> None:
    (draft / "config.json").write_text("{}")


class TorchKit(_Made):
    """A tiny model with predictions sharp enough to tell tokens apart."""

    name = "torch"

    def __init__(self, folders: list[str], empty: Path) -> None:
        super().__init__()
        self._folders = folders
        self._empty = empty

    async def make(
        self,
        role: Role = Role.COLOCATED,
        *,
        version: int | None = 0,
        slow: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> Any:
        from services.rollout_worker.engines.torch_engine import TorchEngine

        if slow:
            options = {"pace_decode_ms": 4.0, "pace_prefill_us_per_token": 1000.0, **options}
        engine = TorchEngine(RolloutSection(**options), "cpu", limits=limits or Limits())
        return await self.begin(engine, self, role, version)

    def snapshot(self, version: int) -> str:
        return self._folders[version]

    def bad_snapshot(self) -> str:
        return str(self._empty)

    def under_way(self, prefill: Any, decode: Any) -> bool:
        return bool(decode._receiving and prefill._thread.senders)

    def idle(self, engine: Any) -> bool:
        side, pool = engine._prefill_side, engine._thread.batcher.pool
        rooms = side.waiting or side._rooms.receivers or side._senders or side.connections
        requests = engine._streams or engine._receiving or engine._thread.replies or engine._thread.senders
        return not (requests or rooms) and pool.available == pool.capacity


class _OfSglang(_Made):
    """What is seen of an engine `sglang`, whatever its servers are."""

    def idle(self, engine: Any) -> bool:
        return not (engine._streams.replies or engine._rooms.open)

    def under_way(self, prefill: Any, decode: Any) -> bool:
        return any(room.joined.done() for room in prefill._rooms._rooms.values())

    def sever(self, prefill: Any) -> None:
        for connection in tuple(prefill._rooms._connections):
            connection.cancel()


class StandInKit(_OfSglang):
    """The engine `sglang` on stand-ins for its servers, which it adopts."""

    name = "sglang-stand-in"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._servers: list[StandIn] = []

    async def make(
        self,
        role: Role = Role.COLOCATED,
        *,
        version: int | None = 0,
        slow: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> SglangEngine:
        wanted = RolloutSection(
            engine="sglang", sglang=SglangSection(args=("--enable-deterministic-inference",)), **options
        )
        server = StandIn(
            slow_s=0.004 if slow else 0.0,
            limit=wanted.kv_cache_tokens,
            running=wanted.max_running,
            mode=MODES[role],
        )
        self._servers.append(server)
        room_s = (limits or Limits()).room_s
        adopt = await server.start()
        engine = SglangEngine(wanted, "cpu", "", self._folder / "log", adopt=adopt, room_s=room_s)

        async def relaunch(role: Role) -> None:
            """What a launched server's end and new beginning come to; a real one does it by a relaunch."""
            server.mode, server.version = MODES[role], "default"

        engine._server.relaunch = relaunch  # type: ignore[method-assign]
        return await self.begin(engine, self, role, version)

    def snapshot(self, version: int) -> str:
        return write_folder(lambda draft: _touch(draft), self._folder, version, keep=100).uri

    def bad_snapshot(self) -> str:
        empty = self._folder / "empty"
        empty.mkdir(parents=True)
        return str(empty)

    async def stop(self) -> None:
        await super().stop()
        for server in self._servers:
            await server.stop()
        assert not [sin for server in self._servers for sin in server.sins]


class SglangKit(_OfSglang):
    """The engine `sglang` on real servers (docs/sglang.md). A server takes half a minute to start, so they are kept and adopted."""

    name = "sglang"
    paced = False
    servers: ClassVar[list[RealServer]] = []
    """Idle ones, the longest idle first."""
    MOST: ClassVar[int] = 4
    """Servers at a time: each has 0.7 GB resident, or 2 GB disaggregated."""

    def __init__(self, python: str, folders: list[str], folder: Path, logs: Path) -> None:
        super().__init__()
        self._python = python
        self._folders = folders
        self._folder = folder
        self._logs = logs
        self._lent: list[tuple[RealServer, SglangEngine]] = []

    async def make(
        self,
        role: Role = Role.COLOCATED,
        *,
        version: int | None = 0,
        slow: bool = False,
        limits: Limits | None = None,
        **options: Any,
    ) -> SglangEngine:
        wanted = RolloutSection(engine="sglang", sglang=real.settings(self._python), **options)
        server = await self._server(role, wanted)
        room_s = (limits or Limits()).room_s
        engine = SglangEngine(wanted, "cpu", "", self._logs / "adopted.log", adopt=server.url, room_s=room_s)
        engine._server.relaunch = server.relaunch  # type: ignore[method-assign] # it is the kit's, so adopted
        self._lent.append((server, engine))
        await asyncio.to_thread(server.pace, 0.004 if slow else None)
        return await self.begin(engine, self, role, version)

    async def _server(self, role: Role, wanted: RolloutSection) -> RealServer:
        """An idle one, or a new one in an idle one's place. What bounds one context is the engine's own, so roomy servers do."""
        running = 0 if wanted.max_running == RolloutSection().max_running else wanted.max_running
        fitting = [each for each in self.servers if (each.role, each.running) == (role, running)]
        if fitting:
            self.servers.remove(fitting[-1])
            return fitting[-1]
        while self.servers and len(self.servers) + len(self._lent) >= self.MOST:
            self.servers.pop(0).kill()
        self.started.append(role)
        log = self._logs / f"{len(self.started)}-{role}.log"
        server = RealServer(self._python, self._folders[0], role, log, running)
        await server.relaunch(role)
        return server

    started: ClassVar[list[Role]] = []

    def snapshot(self, version: int) -> str:
        return self._folders[version]

    def bad_snapshot(self) -> str:
        return str(self._folder)

    async def stop(self) -> None:
        await super().stop()
        for server, engine in self._lent:
            server.role = engine.role
            await asyncio.to_thread(server.until_idle)
            self.servers.append(server)


@pytest.fixture(scope="session")
def torch_snapshots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    torch = pytest.importorskip("torch")
    from services.models import Decoder, ModelConfig, initial_model, load_weights, save_weights

    torch.set_num_threads(1)
    folders: list[str] = []
    for seed in (1, 2):
        job = JobFile(job=JobSection(data_dir=str(tmp_path_factory.mktemp("model")), seed=seed))
        folder = initial_model(job, VOCAB)
        model = Decoder(ModelConfig.load(folder))
        load_weights(model, folder)
        state = model.state_dict()
        state["lm_head.weight"] *= 10
        save_weights(state, folder)
        folders.append(str(folder))
    return folders


@pytest.fixture(params=["torch", "emulated", "sglang-stand-in", *(["sglang"] if real.PYTHON else [])])
async def kit(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Any]:
    made: Any
    if request.param == "torch":
        made = TorchKit(request.getfixturevalue("torch_snapshots"), tmp_path)
    elif request.param == "emulated":
        made = EmulatedKit(tmp_path / "snapshots")
    elif request.param == "sglang":
        folders = request.getfixturevalue("torch_snapshots")
        logs = request.getfixturevalue("sglang_logs")
        made = SglangKit(real.PYTHON, folders, tmp_path, logs)
    else:
        made = StandInKit(tmp_path / "snapshots")
    streams.DEFAULTS["temperature"] = 0.0 if request.param == "sglang" else 1.0  # no seeded sampling on CPUs there
    yield made
    async with asyncio.timeout(300 if request.param == "sglang" else 10):
        await made.stop()


@pytest.fixture(scope="session")
def sglang_logs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("sglang")
    for server in SglangKit.servers:
        server.kill()
