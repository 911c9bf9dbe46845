"""Policies with arrays, which are too large for a JSON file: in a safetensors file next to it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, InstanceOf
from pydantic.json_schema import SkipJsonSchema

from cauc_ray.errors import PolicyError
from cauc_ray.files.documents import write_bytes
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy, Step

SUFFIX = ".safetensors"
_PACKED, _DIGEST = "arrays", "arrays_sha256"


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


class ArraysPolicy(Policy):
    """A policy that may have arrays, and an encoder as its first stage.

    arrays_sha256: digest of the file next to the policy's, named like it but for its ending .safetensors, that holds
    its arrays; null if it has none.
    """

    # Its fields, next to every policy's, that enter its id.
    OWN: ClassVar[tuple[str, ...]] = ("arrays_sha256",)
    NEEDS_ARRAYS: ClassVar[bool] = False

    arrays_sha256: str | None = None
    arrays: SkipJsonSchema[InstanceOf[Arrays]] = Field(default_factory=Arrays, exclude=True, repr=False)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if any((stage.diagnostics is None) != (stage.name == self.encoder) for stage in self.stages):
            yield "diagnostics are null for an encoder, and for no other stage"

    def decides(self) -> dict[str, Any]:
        """Return what affects answers."""
        own = self.model_dump(mode="json", include={*self.OWN})
        if self.arrays_sha256 is None:  # as before there were arrays: the ids of earlier files stay
            own.pop(_DIGEST, None)
        return super().decides() | own

    @classmethod
    def parsed(cls, content: Mapping[str, Any], source: str, file: AnyPath | None) -> Self:
        """Return a policy with its arrays. Raises PolicyError where they are missing or others."""
        packed = content.get(_PACKED)
        policy = super().parsed({key: value for key, value in content.items() if key != _PACKED}, source, file)
        if policy.arrays_sha256 is None:
            if cls.NEEDS_ARRAYS or policy.encoder is not None:
                raise PolicyError(f"{source}: its arrays_sha256 is null, but method {policy.method} needs arrays")
            return policy
        if isinstance(packed, str):
            held = Arrays.of_file(base64.b64decode(packed), policy.arrays_sha256, f"{source}: {_PACKED}")
        elif file is None:
            raise PolicyError(f"{source} has arrays in a file next to it: give it by its path")
        else:
            place = _next_to(file)
            if not place.is_file():
                raise PolicyError(f"{source} has arrays in {place}, which does not exist: keep the two files together")
            held = Arrays.of_file(place.read_bytes(), policy.arrays_sha256, str(place))
        return policy.with_arrays(held)

    def with_arrays(self, arrays: Mapping[str, Floats]) -> Self:
        """Return the policy with other arrays."""
        held = Arrays(arrays)
        return self.model_copy(update={"arrays": held, "arrays_sha256": held.sha256 if held else None})

    def save(self, path: str | AnyPath) -> None:
        """Write the policy's file and, before it, that of its arrays. Raises ConfigError if that fails."""
        if self.arrays:
            write_bytes(_next_to(path_of(path)), self.arrays.content)
        super().save(path)

    def packed(self) -> dict[str, Any]:
        """Return the policy as JSON has it, with its arrays."""
        held = {_PACKED: base64.b64encode(self.arrays.content).decode()} if self.arrays else {}
        return super().packed() | held

    def no_answer(self, state: Floats, to: Ints | None = None) -> Step:
        """Return the step of an encoder.   state: (n, S), that rows carry.   to: where they go."""
        n = len(state)
        nothing, none = np.full(n, -np.inf), np.zeros((n, 0))
        return Step(np.full(n, -1, np.int32), np.full(n, np.nan), np.full(n, False), state, none, to, nothing)


def _next_to(path: AnyPath) -> AnyPath:
    return path.parent / f"{path.stem}{SUFFIX}"
