"""What turns a model's logits into scores whose softmax can be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.isotonic import Isotonic
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Floats, Ints

CalibratorKind: TypeAlias = Literal["temperature", "offsets", "isotonic"]
KINDS: tuple[CalibratorKind, ...] = ("temperature", "offsets", "isotonic")

# Confidences of 0 and 1 have no log odds; no float64 between is nearer to 1.
_NEAREST_ONE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A model's calibration.   offsets: of each of K options, None for none.   isotonic: None for the identity."""

    temperature: float
    offsets: tuple[float, ...] | None = None
    isotonic: Isotonic | None = None

    @property
    def kind(self) -> CalibratorKind:
        """Return what calibrates beside the temperature."""
        if self.isotonic is not None:
            return "isotonic"
        return "temperature" if self.offsets is None else "offsets"

    def scores(self, logits: Floats, name: str = "") -> Floats:
        """Return calibrated logits z / T + b, float64 (n, K) (paper, eq. 3, where b is 0).

        logits: float (n, K); -inf where a row has no such option, which stays so.   name: of the model, for the message
        of the DataError that is raised where a row has an option without an offset.
        """
        scores = np.asarray(logits, dtype=np.float64) / self.temperature
        if self.offsets is None:
            return scores
        k, n_known = scores.shape[1], len(self.offsets)
        if k > n_known:
            unknown = np.flatnonzero(np.isfinite(scores[:, n_known:]).any(axis=1))
            if len(unknown):
                raise DataError(
                    f"row {unknown[0]} of the batch has more options than the {n_known} whose offsets the policy has "
                    f"for {name!r}; fit with --calibrator temperature where options differ from row to row"
                )
        scores[:, :n_known] += self.offsets[:k]
        return scores

    def answers(self, scores: Floats) -> tuple[Ints, Floats]:
        """Return each row's best option, int32 (n,), and the confidence in it, float64 (n,).

        scores: float64 (n, K), calibrated logits. Raises DataError as top_option does.
        """
        predictions, confidences = top_option(scores)
        return predictions, confidences if self.isotonic is None else self.isotonic.of(confidences)

    def believed(self, scores: Floats, predictions: Ints) -> Floats:
        """Return scores whose softmax gives the answers their confidence, and shares the rest as these scores do.

        predictions: int (n,), the best options of the scores, float64 (n, K). These themselves where nothing but
        temperature and offsets calibrates.
        """
        if self.isotonic is None:
            return scores
        before = top_option(scores)[1]
        rise = _log_odds(self.isotonic.of(before)) - _log_odds(before)
        believed = scores.copy()
        believed[np.arange(len(scores)), predictions] += rise
        return believed


UNCALIBRATED = Calibrator(1.0)


def _log_odds(probabilities: Floats) -> Floats:
    inner = np.clip(probabilities, 1 - _NEAREST_ONE, _NEAREST_ONE)
    odds: Floats = np.log(inner) - np.log1p(-inner)
    return odds
