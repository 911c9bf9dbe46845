"""The arrays of a policy, which are too large for its JSON file: in a safetensors file next to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cauc_ray.errors import PolicyError

SUFFIX = ".safetensors"


class Arrays(Mapping[str, npt.NDArray[Any]]):
    """Arrays by name, which nobody changes. Two are equal if their files are."""

    def __init__(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        self._arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}

    @classmethod
    def of_file(cls, content: bytes, sha256: str, source: str) -> Arrays:
        """Read a file's content. Raises PolicyError, naming the source, unless its digest is the one given."""
        if hashlib.sha256(content).hexdigest() != sha256:
            raise PolicyError(f"{source} is not the file that the policy was saved with: its sha256 is not {sha256}")
        try:
            return cls(load(content))
        except SafetensorError as error:
            raise PolicyError(f"{source} is not a safetensors file: {error}") from error

    @cached_property
    def content(self) -> bytes:
        """Return the content of their file: the same bytes for the same arrays."""
        content: bytes = save(self._arrays)
        return content

    @cached_property
    def sha256(self) -> str:
        """Return the digest of their file."""
        return hashlib.sha256(self.content).hexdigest()

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Arrays) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrays, (self._arrays,)  # without the file's content


NO_ARRAYS = Arrays({})
