"""Run a folder's tests on a working copy and say how many passed, in a process of its own: `python -I judge.py WORK TESTS`.

Standard library only. The verdict is a line that begins with a word read from standard input before anything of the working copy
is imported: that the process ended well, or printed something, proves nothing. (Code under test that goes looking for the word in
this process can still forge it.)
"""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Iterator


def main(work: str, tests: str) -> int:
    """0 if all tests passed, of at least one."""
    word = sys.stdin.readline().strip()
    sys.path.insert(
        0, work
    )  # before what is installed; unittest is loaded already, and `discover` puts the tests in front
    suite = unittest.TestLoader().discover(tests, pattern="test*.py", top_level_dir=tests)
    total = sum(1 for _ in _cases(suite))
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=1).run(suite)
    failed = len({id(test) for test, _ in [*result.failures, *result.errors]}) + len(result.unexpectedSuccesses)
    passed = max(0, result.testsRun - failed - len(result.skipped))
    sys.stdout.flush()
    os.write(1, f"\n{word} {passed} {total}\n".encode())
    return 0 if total and passed == total else 1


def _cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for each in suite:
        if isinstance(each, unittest.TestSuite):
            yield from _cases(each)
        else:
            yield each


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
