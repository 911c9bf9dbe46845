"""Small values that all replicas of a service see."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol


class StoreError(Exception):
    """What keeps the values does not answer."""


class Store(Protocol):
    """Values under one prefix. Every method may block for a moment, and raises StoreError."""

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""

    def put(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there."""

    def add(self, name: str, value: bytes) -> bool:
        """Set a value where there is none; return whether this call did. Of several at once exactly one does."""

    def delete(self, name: str) -> None:
        """Delete a value if it is there."""

    def clear(self) -> None:
        """Delete all values under the prefix."""


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """A store in this process, for a service of one process; `replace(store, prefix=…)` is another prefix's."""

    prefix: str = ""
    values: dict[str, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""
        return self.values.get(self._key(name))

    def put(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there."""
        with self.lock:
            self.values[self._key(name)] = value

    def add(self, name: str, value: bytes) -> bool:
        """Set a value where there is none; return whether this call did."""
        with self.lock:
            if self._key(name) in self.values:
                return False
            self.values[self._key(name)] = value
            return True

    def delete(self, name: str) -> None:
        """Delete a value if it is there."""
        with self.lock:
            self.values.pop(self._key(name), None)

    def clear(self) -> None:
        """Delete all values under the prefix."""
        with self.lock:
            for key in [key for key in self.values if key.startswith(self._key(""))]:
                del self.values[key]

    def _key(self, name: str) -> str:
        return f"{self.prefix}:{name}"
