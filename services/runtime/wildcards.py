"""Subject matching as NATS does it: `*` is one token, a last `>` is one or more."""

from __future__ import annotations

import functools


@functools.lru_cache(1 << 14)
def matches(pattern: str, subject: str) -> bool:
    """Whether `subject` (no wildcards) is one that `pattern` names."""
    if pattern == subject or pattern == ">":
        return True
    wanted = pattern.split(".")
    given = subject.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or token not in ("*", given[index]):
            return False
    return len(given) == len(wanted)
