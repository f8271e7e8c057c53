"""How a request ends without having run, and what its peer is told: the same for every engine. Pure."""

from __future__ import annotations

from services.rollout_worker.engines.base import GenerateSpec, Tokens
from services.rollout_worker.engines.kv_protocol import Broken, Refused


def finish_of(spec: GenerateSpec) -> str:
    """How a reply of which the prefix is all has ended, "" if it goes on."""
    if spec.prefix and spec.prefix[-1] in spec.stop_ids:
        return "stop"
    return "length" if len(spec.prefix) >= spec.max_new_tokens else ""


def end_of(last: Tokens | None) -> Refused | Broken:
    """What the receiver is told at the end of a prefill engine's request, unless it has been told."""
    if last is None or not last.finish:
        return Broken("cancelled")
    return Refused(last.reason) if last.finish == "refused" else Broken(last.reason or last.finish)
