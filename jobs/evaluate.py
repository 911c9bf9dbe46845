"""`cauc evaluate`, as `python -m jobs.evaluate --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
