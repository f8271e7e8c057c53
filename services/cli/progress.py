"""A sign of life on standard error from whatever takes longer than two seconds. Standard output stays the result's."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Final

FIRST_S: Final = 2.0
EVERY_S: Final = 10.0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(
    doing: str, *, say: Callable[[str], None] = _say, first_s: float = FIRST_S, every_s: float = EVERY_S
) -> Generator[None]:
    """While the block runs: say what it is doing after `first_s`, and again, with the seconds so far, every `every_s`.

    From a thread of its own, so a block that holds the event loop, or waits for a process, may be told of as well.
    """
    done = threading.Event()
    begun = time.monotonic()

    def tell() -> None:
        pause_s = first_s
        while not done.wait(pause_s):
            say(f"{doing} ... {time.monotonic() - begun:.0f} s")
            pause_s = every_s

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
