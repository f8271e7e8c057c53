"""The engine of a simulated worker: it takes time, makes the tokens that a request's seed stands for, and can be broken.

The worker around it is the real one. Disaggregated, a decode engine meets the prefill engine at the endpoint that the request
names; the context's KV takes its time from one to the other, and the death of either ends the attempt of both.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Final, Protocol

import msgspec

from messages.agent import AttemptLogged
from messages.ids import Incarnation, PolicyVersion, Role, WorkerId
from services.rollout_worker.core import NO_WEIGHTS
from services.rollout_worker.engines.base import EngineError, GenerateSpec, Load, Tokens
from services.simulator.faults.loop import VirtualLoop
from services.simulator.faults.workload import mixed, reply_length, token_of
from services.snapshot import SnapshotError

TOOK_S: Final = {
    "start": (0.15, 0.4),
    "load": (0.03, 0.1),
    "role": (0.001, 0.005),
    "release": (0.02, 0.06),
    "restore": (0.02, 0.06),
}
"""Shortest and longest time of each operation."""
PREFILL_S: Final = 0.002
"""Of each context token."""
TOKEN_S: Final = 0.03
"""Between two tokens of a reply, and as much more for each quarter of its slots that is taken."""
CHUNK: Final = 4
"""Tokens that are handed out together."""
JOIN_S: Final = 0.5
"""How long one side of a hand-over waits for the other."""
WEIGHTS_BYTES: Final = 1_000_000
STUCK_S: Final = 0.05
"""How often a hanging operation looks whether it may go on."""


class Surroundings(Protocol):
    """What an engine knows of the simulated world."""

    loop: VirtualLoop
    engines: dict[str, Engine]  # living ones by endpoint

    def took_s(self, shortest: float, longest: float) -> float:
        """A time drawn between the two."""
        ...

    def memory(self, engine: Engine, held: bool) -> None:
        """The engine may hold device memory from now on, or does not any more."""
        ...

    def began(self, engine: Engine, spec: GenerateSpec) -> None:
        """An attempt was taken in."""
        ...

    def generated(self, engine: Engine, spec: GenerateSpec, start: int, count: int) -> None:
        """Tokens were made."""
        ...


class _Running:
    def __init__(self, spec: GenerateSpec) -> None:
        self.spec = spec
        self.ended = ""  # why it is to end early
        self.news = asyncio.Event()
        self.met = False  # prefill side: a decode engine took over


class Engine:
    """One process's engine: `services.rollout_worker.engines.base.Engine`.

    `stuck`: operations that do not end while they are in it, of `TOOK_S` and "drain"; `slow`: how many times longer everything takes; `torn`: snapshots
    cannot be read.
    """

    def __init__(
        self, world: Surroundings, worker: WorkerId, incarnation: Incarnation, gpus: tuple[int, ...], *, released: bool
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.gpus = gpus
        self.stuck: set[str] = set()
        self.slow = 1.0
        self.torn = False
        self.fails = asyncio.Event()
        self.role = Role.COLOCATED
        self._version = NO_WEIGHTS
        self._world = world
        self._held = not released
        self._running: dict[tuple[str, int], _Running] = {}
        self._paused = asyncio.Event()
        self._paused.set()  # set: it runs
        self._sums = Load()
        self._endpoint = f"{worker}.{incarnation}:1"

    # -- life

    @property
    def version(self) -> PolicyVersion:
        return self._version

    @property
    def endpoint(self) -> str:
        return self._endpoint

    async def start(self) -> None:
        self._world.memory(self, self._held)
        await self._operation("start")
        self._world.engines[self._endpoint] = self

    async def stop(self) -> None:
        self._world.engines.pop(self._endpoint, None)

    async def failed(self) -> str:
        await self.fails.wait()
        return "the device fell off the bus"

    async def _operation(self, name: str) -> None:
        await asyncio.sleep(self._world.took_s(*TOOK_S[name]) * self.slow)
        await self._unstuck(name)

    async def _unstuck(self, name: str) -> None:
        while name in self.stuck:  # noqa: ASYNC110 - a fault sets and clears it, without a word
            await asyncio.sleep(STUCK_S)

    async def set_role(self, role: Role) -> None:
        assert not self._running, "requests run: a role is only taken when none does"
        await self._operation("role")
        self.role = role

    # -- weights and memory

    def fetch(self, uri: str, cache: str, checksum: str) -> Path:
        """What the worker gets a snapshot with. Raises SnapshotError for one that is torn."""
        if self.torn:
            raise SnapshotError(f"{uri}: a shard's checksum is not the manifest's")
        if checksum != checksum_of(uri):
            raise SnapshotError(f"{uri}: the manifest's checksum is not {checksum}")
        return Path(uri.removeprefix("sim:"))

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        if not self._held:
            raise EngineError("the device memory is released: restore it first")
        if Path(directory).name != f"v{version}":
            raise EngineError(f"{directory}: does not hold version {version}")
        await self._operation("load")
        self._version = version
        for running in self._running.values():
            if self.role is not Role.COLOCATED and not running.met:
                running.ended = "interrupted"  # its KV would be of two versions
                running.news.set()

    async def release(self) -> int:
        assert not self._running, "requests run: they are aborted before the memory is released"
        if not self._held:
            return 0
        await self._operation("release")
        self._held, self._version = False, NO_WEIGHTS
        self._world.memory(self, False)
        return WEIGHTS_BYTES

    async def restore(self) -> None:
        self._world.memory(self, True)
        await self._operation("restore")
        self._held = True

    def occupied(self) -> int:
        return WEIGHTS_BYTES if self._held else 0

    async def pause(self, mode: str) -> None:
        self._paused.clear()

    async def resume(self) -> None:
        self._paused.set()

    # -- requests

    async def abort(self, request: str | None = None) -> int:
        await self._unstuck("drain")
        count = 0
        for running in self._running.values():
            if request in (None, running.spec.request) and not running.ended:
                running.ended = "interrupted"
                running.news.set()
                count += 1
        return count

    async def generate(self, spec: GenerateSpec) -> AsyncGenerator[Tokens, None]:
        if self._version == NO_WEIGHTS:
            yield self._last(spec, len(spec.prefix), "refused", "no weights loaded")
            return
        key = (spec.request, spec.attempt)
        running = self._running[key] = _Running(spec)
        try:
            if self.role is Role.PREFILL:
                yield await self._prefill_side(running)
                return
            self._world.began(self, spec)
            problem = await self._context(running)
            if problem:
                yield self._last(spec, len(spec.prefix), *problem)
                return
            made = len(spec.prefix)
            end = min(reply_length(spec.seed), spec.max_new_tokens)
            if made >= end:
                yield self._last(spec, made, "stop", "")
                return
            while not running.ended:
                count = min(CHUNK, end - made)
                await self._work(running, count * TOKEN_S * (1 + 0.25 * len(self._running)))
                if running.ended:
                    break
                tokens = [token_of(spec.seed, index) for index in range(made, made + count)]
                self._made(spec, made, count)
                made += count
                finish = ("stop" if tokens[-1] in spec.stop_ids else "length") if made == end else ""
                yield Tokens(
                    offset=made - count, tokens=tokens, logprobs=[-1.0] * count, version=self._version, finish=finish
                )
                if finish:
                    return
            yield self._last(spec, made, running.ended, "aborted")
        finally:
            del self._running[key]

    def _last(self, spec: GenerateSpec, offset: int, finish: str, reason: str) -> Tokens:
        return Tokens(offset=offset, tokens=[], logprobs=[], version=self._version, finish=finish, reason=reason)

    def _made(self, spec: GenerateSpec, start: int, count: int) -> None:
        sums, batch = self._sums, len(self._running)
        self._sums = msgspec.structs.replace(
            sums,
            decode_iterations=sums.decode_iterations + count,
            decode_tokens=sums.decode_tokens + count * batch,
            decode_s=sums.decode_s + count * TOKEN_S * (1 + 0.25 * batch),
            decode_batch_sum=sums.decode_batch_sum + count * batch,
        )
        self._world.generated(self, spec, start, count)

    async def _work(self, running: _Running, span_s: float) -> None:
        """Let so much engine time pass, or until the request is ended."""
        try:
            async with asyncio.timeout(span_s * self.slow):
                await running.news.wait()
        except TimeoutError:
            await self._paused.wait()

    async def _context(self, running: _Running) -> tuple[str, str] | None:
        """Compute the context, or have it computed; what went wrong, as (finish, reason)."""
        spec = running.spec
        tokens = len(spec.prompt) + len(spec.prefix)
        if self.role is Role.COLOCATED:
            await self._work(running, PREFILL_S * tokens)
            sums = self._sums
            self._sums = msgspec.structs.replace(
                sums, prefill_tokens=sums.prefill_tokens + tokens, prefill_s=sums.prefill_s + PREFILL_S * tokens
            )
            return None
        other = await self._met(f"{spec.bootstrap_host}:{spec.bootstrap_port}", running)
        if other is None:
            return running.ended or "refused", "no prefill engine at the endpoint expects the request"
        if other._version != self._version:
            other.let_go(spec, "refused")
            return "refused", f"the prefill side has version {other._version}, this one {self._version}"
        await other.compute(tokens)
        await self._work(running, PREFILL_S * tokens)
        if self._world.engines.get(other.endpoint) is not other or (spec.request, spec.attempt) not in other._running:
            return "interrupted", "the prefill side went away"
        other.let_go(spec, "handed_over")
        return None

    async def _met(self, endpoint: str, running: _Running) -> Engine | None:
        spec = running.spec
        for _ in range(10):
            other = self._world.engines.get(endpoint)
            if other is not None and (spec.request, spec.attempt) in other._running:
                return other
            await self._work(running, JOIN_S / 10 / self.slow)
            if running.ended:
                return None
        return None

    async def compute(self, tokens: int) -> None:
        """The prefill side's sums; its time is waited by the decode side."""
        sums = self._sums
        self._sums = msgspec.structs.replace(
            sums, prefill_tokens=sums.prefill_tokens + tokens, prefill_s=sums.prefill_s + PREFILL_S * tokens
        )

    def let_go(self, spec: GenerateSpec, finish: str) -> None:
        """The decode side needs no more of this request."""
        running = self._running.get((spec.request, spec.attempt))
        if running is not None and not running.ended:
            running.ended = finish
            running.met = True
            running.news.set()

    async def _prefill_side(self, running: _Running) -> Tokens:
        try:
            async with asyncio.timeout(2 * JOIN_S):
                await running.news.wait()
        except TimeoutError:
            running.ended = "interrupted"
        return self._last(running.spec, len(running.spec.prefix), running.ended, "")

    def runs(self, request: str, attempt: int) -> bool:
        """Whether it has this attempt, and its reply has not ended."""
        return (request, attempt) in self._running

    def load(self) -> Load:
        return msgspec.structs.replace(self._sums, running=len(self._running))


def checksum_of(uri: str) -> str:
    """Of the manifest of a snapshot."""
    return f"{mixed('manifest', uri):012x}"


class Silence:
    """An attempt log that nobody reads: the simulation sees attempts themselves."""

    def write(self, entry: AttemptLogged) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


Fetch = Callable[[str, str, str], Path]
