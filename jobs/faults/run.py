"""`cauc` in a process that may be killed, with blocks and pieces so small that a short run has many of both."""

import sys

from cauc_ray.cli.command import main
from cauc_ray.data import pieces
from cauc_ray.execution import collection, commits, runner
from jobs.faults.cascade import BLOCK_ROWS

if __name__ == "__main__":
    runner.BLOCK_ROWS = collection.BLOCK_ROWS = BLOCK_ROWS
    pieces.PIECE_ROWS = 8 * BLOCK_ROWS  # each node gets some to read, not the head alone, which no fault kills
    commits.COMMIT_S = 0.0
    main(sys.argv[1:])
