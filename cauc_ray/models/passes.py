"""Models that compute here: rows are read into the inputs of passes, and each pass gives the logits of its rows."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from cauc_ray.models.answers import Answers, Batch, PreparingModel, answered, batch_size
from cauc_ray.numbers.types import Floats

if TYPE_CHECKING:
    from cauc_ray.models.torch_device import DeviceTime

# The rows of a pass with its inputs.
Passes: TypeAlias = Sequence[tuple[Sequence[int], Any]]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A batch of n rows as a model computes it.   faults: why rows that are in no pass have no logits."""

    n: int
    passes: Passes
    faults: Mapping[int, str]


class LocalModel(PreparingModel):
    """A model that reads rows on the host, then computes their logits in passes, all launched before any is taken."""

    _device_time: DeviceTime | None = None

    @abstractmethod
    def read(self, batch: Batch) -> tuple[Passes, Mapping[int, str]]:
        """Return a batch's passes, and why the other rows are in none. Raises DataError when a column is missing."""

    @abstractmethod
    def launch(self, inputs: Any) -> Any:
        """Start a pass, and return what take takes; a GPU computes on meanwhile."""

    def take(self, inputs: Any, launched: Any, counts: Counter[str]) -> Iterable[Floats]:
        """Return the logits of each row of a pass.   counts: gains what happened, as Answers has it."""
        logits: Iterable[Floats] = launched.float().cpu().numpy() if hasattr(launched, "cpu") else launched
        return logits

    def prepare(self, batch: Batch) -> Inputs:
        """Read a batch. Raises DataError when a column is missing."""
        return Inputs(batch_size(batch), *self.read(batch))

    def answer(self, prepared: Inputs) -> Answers:
        """Compute a batch; rows that cannot be read, or whose logits are no numbers, are failures."""
        found: dict[int, Floats] = {}
        counts: Counter[str] = Counter()
        if self._device_time is not None:
            self._device_time.start()
        launched = [self.launch(inputs) for _, inputs in prepared.passes]
        for (rows, inputs), one in zip(prepared.passes, launched, strict=True):
            found |= zip(rows, self.take(inputs, one, counts), strict=True)
        seconds = None if self._device_time is None else self._device_time.seconds()
        return answered(prepared.n, found, prepared.faults, counts, self.facts.dtype, device_s=seconds)
