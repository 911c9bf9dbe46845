"""What a service logs: its settings, and the rows and labels that are written together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cauc_ray.models.pool import LogSpec, StageSpec
from cauc_ray.numbers.types import Floats

# Of a flush, in the names of its files.
TIME = "%Y%m%dT%H%M%SZ"

# Of one row: by stage the model's logits, float32 (K,), and what it reported that the call cost, if it did.
RowLogits: TypeAlias = Mapping[int, tuple[Floats, float | None]]


@dataclass(frozen=True, slots=True)
class Logged:
    """Settings of a log.

    Attributes:
        spec: The pool's settings.
        share: Share of rows in the sample.
        stages: The stages of the chain.
        costs: Costs of the stages' calls, in cost_unit.
        cost_unit: Unit of the costs.
        per_call: Whether costs are reported per call.
    """

    spec: LogSpec
    share: float
    stages: Sequence[StageSpec]
    costs: Sequence[float]
    cost_unit: str
    per_call: bool


@dataclass(frozen=True, slots=True)
class Flush:
    """Rows and labels that are written together.

    Attributes:
        name: Name of its files, the same at every attempt.
        rows: Example ids and logits.
        labels: Example ids and labels.
    """

    name: str
    rows: Sequence[tuple[str, RowLogits]]
    labels: Sequence[tuple[str, int]]
