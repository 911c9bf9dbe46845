"""UCCI (Kotte, arXiv 2605.18796): a cascade by the margin's isotonic probability that an answer is right.

Of two models, the large one is called where the calibrated probability of an error is above a threshold, whose mean
cost on validation is within the budget. Here every stage but the last has a map of its own, and one threshold holds for
all: they are probabilities of the same event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.numbers.calibrators import Isotonic, fit_isotonic
from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.scored import ScoredPolicy, ScoredStage, margins


class UCCIStage(ScoredStage):
    """A stage of UCCI.

    Attributes:
        reliability: Map from the margin to the probability that the answer is right; null for the last stage.
    """

    DECIDES: ClassVar[frozenset[str]] = ScoredStage.DECIDES | {"reliability"}

    reliability: Isotonic | None = None


class UCCIPolicy(ScoredPolicy):
    """UCCI: the first answer is taken whose probability of being right reaches the threshold."""

    method: Literal["ucci"] = "ucci"
    stages: tuple[UCCIStage, ...] = Field(min_length=1)

    def score(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return the probability that the stage's answer is right."""
        reliability = self.stages[stage].reliability
        assert reliability is not None
        return reliability.of(_margins(logits))


def _margins(logits: Floats) -> Floats:
    return np.minimum(margins(real_options(logits)), 1.0)


def fit(fitting: Fitting) -> Sequence[UCCIPolicy]:
    """Fit each stage's map on calibration.

    The published map is constant between its knots. This one rises there by a hair, so that a budget can be met.
    """
    pairs = zip(fitting.calibration.chain.logits[:-1], fitting.calibration.correct().T, strict=False)
    stages = [{"reliability": fit_isotonic(_margins(logits), correct)} for logits, correct in pairs]
    return [fitting.policy(UCCIPolicy, of_stages=[*stages, {}])]


def _note(fitting: Fitting) -> str:
    notes = ["margin over options in place of tokens"]
    return "; ".join(notes + ["a map for each stage"] * (len(fitting.calibration.chain.models) > 2))


METHOD = Method("ucci", "cascade", fit, note=_note)
