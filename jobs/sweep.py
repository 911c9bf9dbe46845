"""`cauc sweep`, as `python -m jobs.sweep --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]])
