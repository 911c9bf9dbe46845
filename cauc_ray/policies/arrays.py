"""Policies with arrays, which are too large for a JSON file: in a safetensors file next to it."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, InstanceOf
from pydantic.json_schema import SkipJsonSchema

from cauc_ray.errors import PolicyError
from cauc_ray.files.documents import write_bytes
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.logits import VECTOR_KINDS
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy, Step

_Result = TypeVar("_Result")
SUFFIX = ".safetensors"
_PACKED, _DIGEST = "arrays", "arrays_sha256"


class Arrays(dict[str, npt.NDArray[Any]]):
    """Arrays by name, not to be changed. Two are equal if their files are."""

    @classmethod
    def of_file(cls, content: bytes, sha256: str, source: str) -> Arrays:
        """Read a file's content. Raises PolicyError, naming the source, if its digest is not sha256."""
        from safetensors import (
            SafetensorError,
        )  # policies without arrays need no safetensors, for instance on edge boxes
        from safetensors.numpy import load

        if hashlib.sha256(content).hexdigest() != sha256:
            raise PolicyError(f"{source} is not the file that the policy was saved with: its sha256 is not {sha256}")
        try:
            return cls(load(content))
        except SafetensorError as error:
            raise PolicyError(f"{source} is not a safetensors file: {error}") from error

    def once(self, name: str, work: Callable[[Any], _Result]) -> _Result:
        """Return what work makes of an array; of the same work on the same array, what it has made already."""
        made: dict[Any, Any] = self.__dict__.setdefault("made", {})
        if (name, work) not in made:
            made[name, work] = work(self[name])
        result: _Result = made[name, work]
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrays, (dict(self),)  # without what was made of them

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

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Arrays) and self.content == value.content

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.sha256)


class ArraysPolicy(Policy):
    """A policy that may have arrays, and an encoder as its first stage.

    Attributes:
        arrays_sha256: Digest of the .safetensors file with the arrays, which has the name of the policy's file and is
            in the same folder; null if the policy has no arrays.
    """

    # Its fields, next to every policy's, that enter its id.
    OWN: ClassVar[tuple[str, ...]] = ("arrays_sha256",)
    NEEDS_ARRAYS: ClassVar[bool] = False

    arrays_sha256: str | None = None
    arrays: SkipJsonSchema[InstanceOf[Arrays]] = Field(default_factory=Arrays, exclude=True, repr=False)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if any((stage.diagnostics is None) != (stage.logit_kind in VECTOR_KINDS) for stage in self.stages):
            yield "diagnostics are null for stages without logits, and for no other stage"

    def decides(self) -> dict[str, Any]:
        """Return what affects answers."""
        fields = self.model_dump(mode="json", include={*self.OWN})
        if self.arrays_sha256 is None:  # the ids of files from versions without arrays stay
            fields.pop(_DIGEST, None)
        return super().decides() | fields

    @classmethod
    def parsed(cls, content: Mapping[str, Any], source: str, file: AnyPath | None) -> Self:
        """Return a policy with its arrays. Raises PolicyError if they are missing or have another digest."""
        packed = content.get(_PACKED)
        policy = super().parsed({key: value for key, value in content.items() if key != _PACKED}, source, file)
        if policy.arrays_sha256 is None:
            if cls.NEEDS_ARRAYS or policy.encoder is not None:
                raise PolicyError(f"{source}: its arrays_sha256 is null, but method {policy.method} needs arrays")
            return policy
        if isinstance(packed, str):
            arrays = Arrays.of_file(base64.b64decode(packed), policy.arrays_sha256, f"{source}: {_PACKED}")
        elif file is None:
            raise PolicyError(f"{source} has arrays in a file next to it: give it by its path")
        else:
            place = _next_to(file)
            if not place.is_file():
                raise PolicyError(f"{source} has arrays in {place}, which does not exist: keep the two files together")
            arrays = Arrays.of_file(place.read_bytes(), policy.arrays_sha256, str(place))
        return policy.with_arrays(arrays)

    def with_arrays(self, arrays: Mapping[str, Floats]) -> Self:
        """Return the policy with other arrays."""
        copied = Arrays(arrays)
        return self.model_copy(update={"arrays": copied, "arrays_sha256": copied.sha256 if copied else None})

    def save(self, path: str | AnyPath) -> None:
        """Write the policy's file and, before it, that of its arrays. Raises ConfigError if that fails."""
        if self.arrays:
            write_bytes(_next_to(path_of(path)), self.arrays.content)
        super().save(path)

    def packed(self) -> dict[str, Any]:
        """Return the policy as JSON has it, with its arrays."""
        arrays = {_PACKED: base64.b64encode(self.arrays.content).decode()} if self.arrays else {}
        return super().packed() | arrays

    def no_answer(self, state: Floats, to: Ints | None = None) -> Step:
        """Return the step of an encoder.

        Args:
            state: State of the rows, float (n, S).
            to: Next stage of each row, int (n,); None for the next stage.
        """
        n = len(state)
        nothing, none = np.full(n, -np.inf), np.zeros((n, 0))
        return Step(np.full(n, -1, np.int32), np.full(n, np.nan), np.full(n, False), state, none, to, nothing)


def _next_to(path: AnyPath) -> AnyPath:
    return path.parent / f"{path.stem}{SUFFIX}"
