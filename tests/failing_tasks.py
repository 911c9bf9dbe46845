"""What tasks of tests do: they count their attempts in a file, and some of them fail."""

import os
import signal
import time
from pathlib import Path

from cauc_ray.errors import DataError


def attempts(path):
    """Note an attempt, and return how many there have been."""
    with Path(path).open("a") as file:
        file.write("x")
    return Path(path).stat().st_size


def killed_until(n, path):
    if attempts(path) < n:
        os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def out_of_reach_until(n, path):
    """Raise what a reader makes of a file that cannot be reached for the moment."""
    if attempts(path) < n:
        try:
            raise OSError(5, "Input/output error")
        except OSError as error:
            raise DataError("the file cannot be read") from error
    return "done"


def bad_input(path):
    attempts(path)
    raise DataError("example 'a' has no label")


def missing_file(path):
    attempts(path)
    return Path("/nowhere").read_text()


def slow(seconds, path):
    attempts(path)
    time.sleep(seconds)
    return os.getpid()
