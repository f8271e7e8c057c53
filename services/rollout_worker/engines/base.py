"""The engine interface: what a rollout worker needs of whatever generates tokens (DESIGN 9).

Names and meanings mirror SGLang's, so that one contract suite runs against every engine. All methods are
coroutines of the worker's event loop; an engine runs its arithmetic elsewhere (a thread, a server process).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from messages.ids import PolicyVersion, Role


class GenerateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a reply: continue `prompt + prefix`.

    `max_new_tokens` counts from the end of the prompt. With `temperature` 0 decoding is greedy; otherwise token i
    of the reply is sampled with a generator seeded by (seed, i), so that a resumed reply draws what an
    uninterrupted one would have drawn. The bootstrap triple names the prefill side's room: a prefill and a decode
    engine need it, a colocated one has no use for it.
    """

    request: str
    attempt: int
    prompt: list[int]
    prefix: list[int]
    max_new_tokens: int
    temperature: float
    seed: int
    stop_ids: list[int]
    bootstrap_host: str = ""
    bootstrap_port: int = 0
    bootstrap_room: int = -1


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a reply at `offset` (from the end of the prompt). `finish` as in `token.chunk/1`.

    A prefill engine makes one chunk, without tokens: "refused" and "interrupted" are the client's to know; "handed_over"
    and "abandoned" (the decode side is gone) are not, since the decode side, or its end, says what there is to say.
    """

    offset: int
    tokens: list[int]
    logprobs: list[float]
    version: PolicyVersion
    finish: str = ""
    reason: str = ""
    cached_tokens: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Load and cumulative sums since the engine started (see `worker.heartbeat/1`)."""

    running: int = 0
    queued: int = 0
    decode_iterations: int = 0
    decode_tokens: int = 0
    decode_s: float = 0.0
    decode_batch_sum: int = 0
    prefill_tokens: int = 0
    prefill_s: float = 0.0


class EngineError(Exception):
    """The engine cannot do what was asked; the message says why. The engine is as it was before."""


class Engine(Protocol):
    """One engine instance. `pause` modes as in SGLang: "abort", "retract" (recompute KV), "in_place" (keep KV)."""

    @property
    def version(self) -> PolicyVersion:
        """Version of the loaded weights; -1 before the first load."""
        ...

    async def start(self) -> None:
        """Initialise without weights being required; returns when commands are answered."""
        ...

    async def set_role(self, role: Role) -> None:
        """Take a role. Only when no request runs."""
        ...

    def generate(self, spec: GenerateSpec) -> AsyncIterator[Tokens]:
        """Stream a reply. The last chunk has `finish` set. Closing the iterator cancels and frees the request."""
        ...

    async def abort(self, request: str | None = None) -> int:
        """End one or all running requests as "interrupted", each with the tokens it has; returns how many."""
        ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def load_snapshot(self, directory: str, version: PolicyVersion) -> None:
        """Swap weights in place from a verified local snapshot directory. Raises EngineError; old weights stay."""
        ...

    async def release(self) -> int:
        """Give device memory back (weights, KV cache); returns bytes freed as the OS or driver sees it."""
        ...

    async def restore(self) -> None:
        """Take device memory again; weights must be loaded afterwards."""
        ...

    def occupied(self) -> int:
        """Bytes of memory this engine's process, or device, uses as the operating system, or the driver, sees it."""
        ...

    def load(self) -> Load: ...

    async def failed(self) -> str:
        """Wait until the engine can do no more (never, for a healthy one); returns why. The worker then ends itself."""
        ...

    @property
    def endpoint(self) -> str:
        """Where peers reach this engine's KV transport, "" if it has none."""
        ...

    async def stop(self) -> None: ...
