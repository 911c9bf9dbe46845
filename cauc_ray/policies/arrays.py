"""The arrays of a policy, which are too large for its JSON file: in a safetensors file next to it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import PolicyError

SUFFIX = ".safetensors"


class Arrays(dict[str, npt.NDArray[Any]]):
    """Arrays by name, which nobody changes. Two are equal if their files are."""

    @classmethod
    def of_file(cls, content: bytes, sha256: str, source: str) -> Arrays:
        """Read a file's content. Raises PolicyError, naming the source, unless its digest is the one given."""
        from safetensors import SafetensorError  # what other policies can do without, on an edge box
        from safetensors.numpy import load

        if hashlib.sha256(content).hexdigest() != sha256:
            raise PolicyError(f"{source} is not the file that the policy was saved with: its sha256 is not {sha256}")
        try:
            return cls(load(content))
        except SafetensorError as error:
            raise PolicyError(f"{source} is not a safetensors file: {error}") from error

    @property
    def content(self) -> bytes:
        """Return the content of their file: the same bytes for the same arrays."""
        from safetensors.numpy import save

        content: bytes = save({name: np.ascontiguousarray(array) for name, array in self.items()})
        return content

    @property
    def sha256(self) -> str:
        """Return the digest of their file."""
        return hashlib.sha256(self.content).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrays) and self.content == other.content

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.sha256)
