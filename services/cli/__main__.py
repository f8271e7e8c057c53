"""`pearl`, and `python -m services.cli`."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from services.cli.parser import build_parser
from services.jobfile import ConfigError
from services.runtime.log import told


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 the work failed, 2 the input is wrong."""
    command = "pearl"
    try:
        arguments = build_parser().parse_args(argv)
        command = f"pearl {arguments.command}"
        run = importlib.import_module(f"services.cli.{arguments.module}").run
        if arguments.command == "service":  # its log is for a file
            status = run(arguments)
        else:
            with told(_tell):
                status = run(arguments)
        sys.stdout.flush()  # here, where what fails of it can be said
        return status
    except ConfigError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        _drop_output()
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO) or error.filename is not None:
            raise
        print(f"{command}: the output cannot be written: {error.strerror}", file=sys.stderr)
        _drop_output()
        return 1
    except _failures() as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 1


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Else the interpreter would try to write the rest of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failures() -> tuple[type[Exception], ...]:
    """What a command may fail of although its input was right; imported late, when something failed."""
    from services.nats_server.process import ServerError
    from services.runtime.bus import BusError

    return (ServerError, BusError)


if __name__ == "__main__":
    sys.exit(main())
