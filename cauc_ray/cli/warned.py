"""Warnings, and what models print, on standard error at the moment when they arise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cauc_ray.errors import own_warnings


@contextmanager
def warnings_on_stderr(program: str) -> Iterator[None]:
    """Write each CaucWarning of a block to standard error as it arises, as one line, equal ones once.

    What models print on their replicas is written there, too.   program: what each line of a warning begins with.
    """
    written: set[str] = set()

    def write(message: str) -> None:
        text = " ".join(message.split())
        if text not in written:  # every method that is fitted may give the same
            written.add(text)
            _write(f"{program}: warning: {text}")

    output, handler = logging.getLogger("cauc_ray.output"), _Handler()
    output.addHandler(handler)
    output.setLevel(logging.INFO)
    try:
        with own_warnings(write):
            yield
    finally:
        output.removeHandler(handler)


class _Handler(logging.Handler):
    """Writes log records to whatever stands for standard error when they arise."""

    def emit(self, record: logging.LogRecord) -> None:
        _write(self.format(record))


def _write(line: str) -> None:
    # In one piece, through whatever stands for standard error now: a progress bar moves out of its way.
    # Where nobody reads it any more, the line is lost and the work goes on, as with Python's own warnings.
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
