"""`cauc paper`, as `python -m jobs.paper --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["paper", *sys.argv[1:]])
