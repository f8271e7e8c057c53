"""One rank as a process: `python -m services.trainer.rank_main JOB_FILE`, with RANK and its like in the environment."""

from __future__ import annotations

import os
import sys
from functools import partial

from services import jobfile
from services.runtime.lifecycle import run_service
from services.trainer.launch import end_by_order_only, end_with_service


def main() -> int:
    """Rank 0 serves the bus, the others follow it."""
    end_with_service()
    job = jobfile.load(sys.argv[1])
    if os.environ["RANK"] == "0":
        from services.trainer.service import serve_ranks

        return run_service(partial(serve_ranks, job), name="trainer")
    end_by_order_only()
    from services.trainer.ranks import follow

    follow(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
