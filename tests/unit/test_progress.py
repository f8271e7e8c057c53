"""Signs of life of what takes long, and none of what does not."""

from __future__ import annotations

import threading

import pytest

from services.cli.progress import progress


def test_what_takes_long_says_so_again_and_again() -> None:
    said: list[str] = []
    thrice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 3:
            thrice.set()

    with progress("reading", say=say, first_s=0.0, every_s=0.0):
        assert thrice.wait(30)
    assert said[0] == "reading ... 0 s"
    assert not [each for each in threading.enumerate() if each.name == "progress"], "and no more when it is done"


def test_what_is_quick_says_nothing_and_errors_pass() -> None:
    said: list[str] = []
    with pytest.raises(KeyError), progress("reading", say=said.append, first_s=1000.0):
        raise KeyError
    assert not said
