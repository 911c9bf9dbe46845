"""Entry points of installed packages by name, by which packages add models' kinds and methods."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from cauc_ray.errors import ConfigError, one_line

_PACKAGE = "cauc_ray."


def registered(group: str) -> dict[str, EntryPoint]:
    """Return a group's entry points by name, ours first; another package cannot replace one of ours."""
    return _registered_on(group, tuple(sys.path))


@cache
def _registered_on(group: str, search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    entries = entry_points(group=group)
    ours = {entry.name: entry for entry in entries if is_ours(entry)}
    return ours | {entry.name: entry for entry in entries if entry.name not in ours}


def is_ours(entry: EntryPoint) -> bool:
    """Return whether an entry point is of this package."""
    return entry.value.startswith(_PACKAGE)


def loaded(entry: EntryPoint, kind: str) -> object:
    """Return what an entry point names.

    Args:
        entry: The entry point.
        kind: What it registers, for the message.

    Raises:
        ConfigError: It cannot be imported.
    """
    try:
        return entry.load()
    except Exception as error:  # another package's module may raise anything while it is imported
        raise ConfigError(f"{kind} {entry.name!r} ({entry.value}) cannot be imported: {one_line(error)}") from error
