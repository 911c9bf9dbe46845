"""The cascade behind HTTP, on Ray Serve: `cauc_ray.serving:build_app`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cauc_ray.serving.app import ServingArgs, build_app

__all__ = ["ServingArgs", "build_app"]

# When this process began to import what serves, which takes longer than to load a small model.
IMPORTED_AT = time.monotonic()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cauc_ray.serving' has no attribute {name!r}")
    from cauc_ray.serving import app  # Serve takes long to import, and tests of the rest need none of it

    return getattr(app, name)
