"""How a request ends without another token, and what its peer is told: the same for every engine. Pure."""

from __future__ import annotations

from messages.ids import PolicyVersion
from services.rollout_worker.engines.base import GenerateSpec, Tokens
from services.rollout_worker.engines.kv_protocol import Broken, Refused


def finish_of(spec: GenerateSpec) -> str:
    """How a reply of which the prefix is all has ended, "" if it goes on."""
    if spec.prefix and spec.prefix[-1] in spec.stop_ids:
        return "stop"
    return "length" if len(spec.prefix) >= spec.max_new_tokens else ""


def last_chunk(offset: int, version: PolicyVersion, finish: str, reason: str) -> Tokens:
    """The chunk that ends a stream, without tokens."""
    return Tokens(offset=offset, tokens=[], logprobs=[], version=version, finish=finish, reason=reason)


def end_of(chunk: Tokens | None) -> Refused | Broken:
    """What the receiver is told at the end of a prefill engine's request, unless it has been told. `chunk`: its last one."""
    if chunk is None or not chunk.finish:
        return Broken("cancelled")
    return Refused(chunk.reason) if chunk.finish == "refused" else Broken(chunk.reason or chunk.finish)
