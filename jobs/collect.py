"""`cauc collect`, as `python -m jobs.collect --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["collect", *sys.argv[1:]])
