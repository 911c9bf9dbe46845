"""Warnings on standard error, at the moment when they arise."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, suppress

from cauc_ray.errors import own_warnings


def warnings_on_stderr(program: str) -> AbstractContextManager[None]:
    """Write each CaucWarning of a block to standard error as it arises, as one line, equal ones once.

    program: what each line begins with.
    """
    written: set[str] = set()

    def write(message: str) -> None:
        text = " ".join(message.split())
        if text not in written:  # every method that is fitted may give the same
            written.add(text)
            # In one piece, through whatever stands for standard error now: a progress bar moves out of its way.
            # Where nobody reads it any more, the warning is lost and the work goes on, as with Python's own.
            with suppress(OSError):
                sys.stderr.write(f"{program}: warning: {text}\n")
                sys.stderr.flush()

    return own_warnings(write)
