"""Code that is not PEARL's (a user's environment, a library that raises plain `Exception`) fails as one known error."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class ForeignError(Exception):
    """Code that is not ours raised; the message is its type and text, the cause the exception itself."""


@contextmanager
def foreign_code() -> Generator[None]:
    """Within it, every `Exception` becomes a ForeignError. Cancellation and exits pass."""
    try:
        yield
    except Exception as error:
        raise ForeignError(f"{type(error).__name__}: {error}") from error


def call_foreign(function: Callable[[A], R], argument: A) -> R:
    """`function(argument)`, where a context manager would cost more than the call. Raises ForeignError."""
    try:
        return function(argument)
    except Exception as error:
        raise ForeignError(f"{type(error).__name__}: {error}") from error
