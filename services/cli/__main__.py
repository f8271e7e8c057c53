"""`pearl`, and `python -m services.cli`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from services.cli.parser import build_parser
from services.jobfile import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0 done, 1 the work failed, 2 the input is wrong."""
    arguments = build_parser().parse_args(argv)
    try:
        return importlib.import_module(f"services.cli.{arguments.module}").run(arguments)
    except ConfigError as error:
        print(f"pearl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
