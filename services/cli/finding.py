"""What `pearl doctor` finds."""

from __future__ import annotations

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem. `check` names what was looked at."""

    check: str
    what: str
    where: str
    do: str
