"""Asymmetric Duo (Zhou et al., 2025): all models answer, and their logits are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.chain import LARGEST
from cauc_ray.numbers.logits import same_width, top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Stage, Step
from cauc_ray.policies.scored import MethodPolicy


class DuoStage(Stage):
    """A stage of Asymmetric Duo.

    Attributes:
        weight: Weight of its logits in the sum.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"weight"}

    weight: float = Field(gt=0, le=LARGEST)


class DuoPolicy(MethodPolicy):
    """Asymmetric Duo: all models answer, and their logits are summed. A row's state is the sum so far: S = K."""

    fuses: ClassVar[bool] = True
    method: Literal["duo"] = "duo"
    stages: tuple[DuoStage, ...] = Field(min_length=1)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Add the stage's logits to the sum; the last stage's answers are taken."""
        numbers, last = self.stages[stage], stage == len(self.stages) - 1
        total: Floats = numbers.weight * numbers.bounded(logits).astype(np.float64)
        if state is not None:
            total, before = same_width(total, state, (numbers.name, "the stages before"))
            total = total + before
        predictions, confidences = top_option(total)
        worth = np.full(len(total), np.inf if last else -np.inf)
        return Step(predictions, confidences, np.full(len(total), last), total, total, worth=worth)


def fit(fitting: Fitting) -> Sequence[DuoPolicy]:
    """Fit the temperatures jointly, to the lowest NLL on the calibration split.

    The logits are summed by weights 1 / (M T_m).
    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    unweighted = fitting.policy(DuoPolicy, of_stages=[{"weight": 1.0}] * len(chain.models))
    logits = [stage.bounded(logits) for stage, logits in zip(unweighted.stages, chain.logits, strict=True)]
    weights = fit_temperatures(logits, chain.labels).weights
    stages = zip(unweighted.stages, weights, strict=True)
    weighted = tuple(stage.model_copy(update={"weight": float(weight)}) for stage, weight in stages)
    return [unweighted.model_copy(update={"stages": weighted})]


def _note(fitting: Fitting) -> str:
    n_models = len(fitting.calibration.chain.models)
    return "" if n_models == 2 else f"extended to {n_models} models"


METHOD = Method("duo", "ensemble", fit, note=_note)
