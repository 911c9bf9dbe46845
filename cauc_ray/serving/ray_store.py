"""A store that outlives every replica: Ray's own key-value store, in its head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cauc_ray.serving.store import StoreError

NAMESPACE = b"cauc_ray"

T = TypeVar("T")


class RayStore:
    """Values under one prefix. Each call blocks for a call to Ray's head, which does one after another."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""
        value: bytes | None = _done(_internal_kv_get, self._key(name))
        return value

    def put(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there."""
        _done(_internal_kv_put, self._key(name), value, overwrite=True)

    def add(self, name: str, value: bytes) -> bool:
        """Set a value where there is none; return whether this call did. Of several at once exactly one does."""
        return not _done(_internal_kv_put, self._key(name), value, overwrite=False)

    def delete(self, name: str) -> None:
        """Delete a value if it is there."""
        _done(_internal_kv_del, self._key(name))

    def clear(self) -> None:
        """Delete all values under this prefix."""
        _done(_internal_kv_del, self._key(""), del_by_prefix=True)

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}:{name}".encode()


def _done(call: Callable[..., T], *args: Any, **options: Any) -> T:
    try:
        return call(*args, **options, namespace=NAMESPACE)
    except (RayError, RuntimeError, ConnectionError) as error:
        raise StoreError(f"{type(error).__name__}: {error}") from error
