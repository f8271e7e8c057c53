"""Code that is not PEARL's (a user's environment, a library that raises plain `Exception`) fails as one known error."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class ForeignError(Exception):
    """Code that is not ours raised; the message is its type and text, the cause the exception itself."""


@contextmanager
def foreign_code() -> Generator[None]:
    """Within it, every `Exception` becomes a ForeignError. Cancellation and exits pass."""
    try:
        yield
    except Exception as error:
        raise ForeignError(f"{type(error).__name__}: {error}") from error
