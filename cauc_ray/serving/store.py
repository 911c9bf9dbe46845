"""Small values that all replicas of a service see."""

from __future__ import annotations

from abc import ABC, abstractmethod


class StoreError(Exception):
    """What keeps the values does not answer."""


class Store(ABC):
    """Values under one prefix. Every method may block for a moment, and raises StoreError."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""
        return self._get(self._key(name))

    def put(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there."""
        self._put(self._key(name), value, overwrite=True)

    def add(self, name: str, value: bytes) -> bool:
        """Set a value where there is none; return whether this call did. Of several at once exactly one does."""
        return self._put(self._key(name), value, overwrite=False)

    def delete(self, name: str) -> None:
        """Delete a value if it is there."""
        self._delete(self._key(name), by_prefix=False)

    def clear(self) -> None:
        """Delete all values under the prefix."""
        self._delete(self._key(""), by_prefix=True)

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    @abstractmethod
    def _get(self, key: str) -> bytes | None:
        """Return a key's value."""

    @abstractmethod
    def _put(self, key: str, value: bytes, *, overwrite: bool) -> bool:
        """Set a key's value, unless there is one that is not to be overwritten; return whether it was set."""

    @abstractmethod
    def _delete(self, key: str, *, by_prefix: bool) -> None:
        """Delete a key, or all that begin with it."""
