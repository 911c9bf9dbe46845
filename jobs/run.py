"""`cauc run`, as `python -m jobs.run --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["run", *sys.argv[1:]])
