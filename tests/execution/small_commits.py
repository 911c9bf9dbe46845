"""The command line with blocks of few rows, each committed at once: arguments as of `cauc`."""

import sys

from cauc_ray.cli.command import main
from cauc_ray.execution import manifest, runner

if __name__ == "__main__":
    runner.BLOCK_ROWS, manifest.COMMIT_S = 64, 0.0
    main(sys.argv[1:])
