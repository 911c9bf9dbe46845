"""What every model of a chain said about the same examples: the input of fits, sweeps and replays."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.types import Bools, Floats, Ints

UNKNOWN_LABEL = -1


@dataclass(frozen=True)
class ChainLogits:
    """Logits of M models, cheapest first, on N examples.

    models: names.   logits: M arrays, float (N, K); -inf where an example has no such option.
    example_ids: str (N,).   labels: int32 (N,), UNKNOWN_LABEL where there is none.
    costs: of the models' calls.   per_call_costs: whether these are the calls' own, not the models'.
    source: where they come from, for messages.   logit_kind: "raw", "log-probabilities", ...
    """

    models: tuple[str, ...]
    logits: tuple[Floats, ...]
    example_ids: tuple[str, ...]
    labels: Ints
    costs: Costs
    per_call_costs: bool
    source: str
    logit_kind: str

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def labelled(self) -> Bools:
        """Return which examples have a label, bool (N,)."""
        labelled: Bools = self.labels != UNKNOWN_LABEL
        return labelled

    def require_labels(self, purpose: str) -> None:
        """Raise DataError naming an example without a label, as the purpose needs all of them."""
        if not self.labelled.all():
            example = self.example_ids[int(np.flatnonzero(~self.labelled)[0])]
            raise DataError(f"{self.source}: example {example!r} has no label; {purpose} needs labels")

    def examples_fingerprint(self) -> str:
        """Return a digest of the example ids and labels, the same for any order in which they were stored."""
        digest = hashlib.sha256("\n".join(self.example_ids).encode())
        digest.update(np.ascontiguousarray(self.labels, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]

    def logits_fingerprint(self, stage: int) -> str:
        """Return a digest of one model's logits on these examples."""
        logits = np.ascontiguousarray(self.logits[stage], dtype="<f4")
        return hashlib.sha256(f"{logits.shape}".encode() + logits.tobytes()).hexdigest()[:16]
