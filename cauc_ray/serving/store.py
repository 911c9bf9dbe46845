"""Small values that outlive every replica and that all of them see: Ray's own key-value store, in its head."""

from __future__ import annotations

NAMESPACE = b"cauc_ray"


class Store:
    """Values under one prefix. Each call blocks for a call to Ray's head, which does one after another."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def get(self, name: str) -> bytes | None:
        """Return a value, None where there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        value: bytes | None = _internal_kv_get(self._key(name), namespace=NAMESPACE)
        return value

    def put(self, name: str, value: bytes) -> None:
        """Set a value, whatever was there."""
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._key(name), value, overwrite=True, namespace=NAMESPACE)

    def add(self, name: str, value: bytes) -> bool:
        """Set a value where there is none; return whether this call did. Of several at once exactly one does."""
        from ray.experimental.internal_kv import _internal_kv_put

        return not _internal_kv_put(self._key(name), value, overwrite=False, namespace=NAMESPACE)

    def delete(self, name: str) -> None:
        """Delete a value if it is there."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._key(name), namespace=NAMESPACE)

    def clear(self) -> None:
        """Delete all values under this prefix."""
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)

    def _key(self, name: str) -> bytes:
        return f"{self._prefix}:{name}".encode()
