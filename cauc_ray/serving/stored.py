"""What all replicas of a service see: small values, logs that they append to, and what was counted once."""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

# A log keeps this many entries that have a successor: no writer is as far behind.
_KEPT_ENTRIES = 100
# The tries at an update, which others may overtake.
MOST_TRIES = 20
# Keys whose rows one replica remembers.
MOST_REMEMBERED = 10_000


class StoreError(Exception):
    """What keeps the values does not answer."""


class OvertakenError(StoreError):
    """Others have written again and again while an update was made."""


class Store(ABC):
    """Small values that all replicas of a service see. Every method may block for a moment, and raises StoreError."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return a value, None where there is none."""

    @abstractmethod
    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Set a value; without overwrite only where there is none: of several at once one does, and returns True."""

    @abstractmethod
    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Delete a value if it exists, or all whose keys have this prefix."""


class MemoryStore(Store):
    """Values in this process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return a value."""
        return self._values.get(key)

    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Set a value."""
        with self._lock:
            sets = overwrite or key not in self._values
            if sets:
                self._values[key] = value
            return sets

    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Delete a value, or all whose keys begin so."""
        with self._lock:
            for name in [name for name in self._values if name == key or (by_prefix and name.startswith(key))]:
                del self._values[name]


def _read(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise StoreError(f"a stored value is damaged: {error}") from error


class Log:
    """An append-only log that all replicas of a service read, version by version; its content is JSON.

    A version is written once and by one writer, so that a writer that has not read the newest one finds its position
    taken: no change is lost if a process dies. Of versions that have a successor an empty entry stays for a while.

    Args:
        store: What all replicas read and write.
        prefix: Prefix of its keys; a later life of the service has another one.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        # How many versions have been written, at least: where a replica that starts, or was away, begins to read.
        self._hint = f"{prefix}newest"
        self._last: tuple[int, Any] = 0, None

    def read(self) -> tuple[int, Any]:
        """Return the newest version and its content, (0, None) before the first. Blocks for calls to the store."""
        hint: int = _read(self._store.get(self._hint) or b"0")
        # The hint is of an entry that may itself be the newest.
        version = max(self._last[0], hint - 1)
        while (raw := self._store.get(f"{self._prefix}{version + 1}")) is not None:
            version += 1
            if raw:
                self._last = version, _read(raw)
        return self._last

    def append(self, version: int, content: Any) -> bool:
        """Write a version, the one after read()'s; return False where another writer has. Blocks like read()."""
        if not self._store.put(f"{self._prefix}{version}", json.dumps(content).encode(), overwrite=False):
            return False
        with suppress(StoreError):  # it is active now, even if the clean-up fails
            self._store.put(self._hint, str(version).encode())
            if version > 1:
                self._store.put(f"{self._prefix}{version - 1}", b"")
            self._store.delete(f"{self._prefix}{version - _KEPT_ENTRIES}")
        return True

    def update(self, change: Callable[[int, Any], Any]) -> Any:
        """Write what a change makes of the newest version, and return it.

        Args:
            change: Takes a version and its content, again where another writer was first; returns the next content,
                None to leave the version as it is.

        Raises:
            OvertakenError: Others were first again and again.
        """
        for _ in range(MOST_TRIES):
            version, content = self.read()
            following = change(version, content)
            if following is None:
                return content
            if self.append(version + 1, following):
                return following
        raise OvertakenError(f"others have written {MOST_TRIES} times meanwhile")

    def forget(self) -> None:
        """Delete the whole log: it has no more readers."""
        self._store.delete(self._prefix, by_prefix=True)


class SeenOnce:
    """Remembers rows, so that each counts once, in all replicas of a service together.

    Each replica has at most MOST_REMEMBERED entries in the store, and drops its oldest first.

    Args:
        store: What all replicas read and write.
        prefix: Prefix of its keys; a later life of the service has another one.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._entries: deque[tuple[str, str]] = deque()  # groups and keys
        self._lock = threading.Lock()

    def new(self, group: str, key: str, rows: Collection[int]) -> set[int]:
        """Return the rows of a key that are new, and remember them. Blocks for a few calls to the store."""
        left, n_before = sum(1 << row for row in rows), 0
        prefix = f"{self._prefix}{group}:{key}:"
        # An entry is written once: of two routers that take the same rows at once, one finds the other's.
        while left and not self._store.put(f"{prefix}{n_before}", f'"{left:x}"'.encode(), overwrite=False):
            left &= ~int(_read(self._store.get(f"{prefix}{n_before}") or b'"0"'), 16)
            n_before += 1
        if left:
            with self._lock:
                self._entries.append((group, f"{prefix}{n_before}"))
                oldest = self._entries.popleft()[1] if len(self._entries) > MOST_REMEMBERED else None
            if oldest is not None:
                self._store.delete(oldest)
        return {row for row in rows if left >> row & 1}

    def forget(self, group: str) -> None:
        """Forget all keys of a group."""
        self._store.delete(f"{self._prefix}{group}:", by_prefix=True)
        with self._lock:
            self._entries = deque(entry for entry in self._entries if entry[0] != group)
