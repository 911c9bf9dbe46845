"""Command line of jobs that read one folder and write another: one line for what is wrong with the arguments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from cauc_ray.errors import CaucError, ConfigError, DataError, one_line


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see --help\n")


def convert(name: str, about: str, work: Callable[[Path, Path], None], arguments: Sequence[str] | None = None) -> int:
    """Read the folders of a command line, and convert the first into the second. Returns an exit code.

    Args:
        name: Name of the module.
        about: Its docstring.
        work: What converts a folder.
        arguments: Words of the command line; None for those of this process.
    """
    parser = _Parser(prog=f"python -m {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SOURCE", help="folder to read")
    parser.add_argument("output", metavar="OUTPUT", help="folder to write, new or of an earlier attempt")
    options = parser.parse_args(arguments)
    source, output = Path(options.source), Path(options.output)
    try:
        if not source.is_dir():
            raise DataError(f"{source} is not a folder")
        if output.resolve() == source.resolve():
            raise ConfigError(f"output {output} is the folder to read; write another one")
        work(source, output)
    except (CaucError, OSError) as error:
        print(f"{parser.prog}: error: {one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, CaucError) else DataError.exit_code
    return 0
