"""One rank under torchrun: `python -m torch.distributed.run ... -m services.trainer.rank_main JOB_FILE`."""

from __future__ import annotations

import os
import sys
from functools import partial

from services import jobfile
from services.runtime.lifecycle import run_service
from services.trainer.ranks import follow
from services.trainer.service import serve_ranks


def main() -> int:
    """Rank 0 serves the bus, the others follow it."""
    job = jobfile.load(sys.argv[1])
    if os.environ["RANK"] == "0":
        return run_service(partial(serve_ranks, job), name="trainer")
    follow(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
