"""`cauc compare`, as `python -m jobs.compare --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
