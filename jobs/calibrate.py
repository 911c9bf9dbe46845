"""`cauc fit`, as `python -m jobs.calibrate --config FILE`."""

import sys

from cauc_ray.cli.command import main

if __name__ == "__main__":
    main(["fit", *sys.argv[1:]])
