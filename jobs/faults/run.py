"""`cauc` in a process that may be killed, with blocks so small that a run of some seconds commits many."""

import sys

from cauc_ray.cli.command import main
from cauc_ray.execution import collection, commits, runner
from jobs.faults.cascade import BLOCK_ROWS

if __name__ == "__main__":
    runner.BLOCK_ROWS = collection.BLOCK_ROWS = BLOCK_ROWS
    commits.COMMIT_S = 0.0
    main(sys.argv[1:])
