"""Calibrators: from a model's logits to calibrated scores and confidences."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.logits import bounded_below, top_option
from cauc_ray.numbers.types import Bools, Floats, Ints

CalibratorKind: TypeAlias = Literal["temperature", "offsets", "isotonic"]
KINDS: tuple[CalibratorKind, ...] = ("temperature", "offsets", "isotonic")

# Confidences of 0 and 1 have no finite log odds; this is the float64 closest to 1.
_NEAREST_ONE = 1 - 2.0**-53


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A map of confidences that is linear between its breakpoints.

    Both numbers rise strictly, so the order of confidences stays, and with it the number of operating points; others
    raise ValueError.

    Attributes:
        confidences: B numbers, rising from 0 to 1.
        accuracies: Their values, B rising numbers in [0, 1].
    """

    # Stored in files as it is.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    confidences: tuple[float, ...]
    accuracies: tuple[float, ...]

    def __post_init__(self) -> None:
        x, y = self.confidences, self.accuracies
        if len(x) != len(y) or len(x) < 2 or (x[0], x[-1]) != (0.0, 1.0) or not 0 <= y[0] < y[-1] <= 1:
            raise ValueError("breakpoints must map confidences from 0 to 1 to as many accuracies in [0, 1]")
        if any(one >= following for values in (x, y) for one, following in pairwise(values)):
            raise ValueError("confidences and accuracies must rise from each breakpoint to the next")

    def of(self, confidences: Floats) -> Floats:
        """Return the calibrated values of confidences in [0, 1], float (n,), as float64 (n,)."""
        return np.interp(confidences, self.confidences, self.accuracies)


@dataclass(frozen=True, slots=True)
class Calibrator:
    """A model's calibration.

    Attributes:
        temperature: Divides the logits.
        offsets: Added to the scaled logits, one for each of K options; None for none.
        isotonic: Map of confidences; None for the identity.
        floor: Probability that lower values count as, where logits are logarithms of probabilities; None for none.
    """

    temperature: float
    offsets: tuple[float, ...] | None = None
    isotonic: Isotonic | None = None
    floor: float | None = None

    @property
    def kind(self) -> CalibratorKind:
        """Return the kind of calibration that is applied with the temperature."""
        if self.isotonic is not None:
            return "isotonic"
        return "temperature" if self.offsets is None else "offsets"

    def scores(self, logits: Floats, name: str = "") -> Floats:
        """Return calibrated logits z / T + b, float64 (n, K) (paper, eq. 3, where b is 0).

        Args:
            logits: Logits z, float (n, K), raised to the floor; -inf where a row has no such option, which stays.
            name: Name of the model, for messages.

        Raises:
            DataError: A row has an option without an offset.
        """
        scores: Floats = np.divide(bounded_below(logits, self.floor), self.temperature, dtype=np.float64)
        if self.offsets is None:
            return scores
        k, n_known = scores.shape[1], len(self.offsets)
        if k > n_known:
            unknown = np.flatnonzero(np.isfinite(scores[:, n_known:]).any(axis=1))
            if len(unknown):
                raise DataError(
                    f"row {unknown[0]} of the batch has more options than the {n_known} for which the policy has "
                    f"offsets of {name!r}; fit with --calibrator temperature if options differ from row to row"
                )
        scores[:, :n_known] += self.offsets[:k]
        return scores

    def answers(self, scores: Floats) -> tuple[Ints, Floats]:
        """Return each row's best option, int32 (n,), and the confidence in it, float64 (n,).

        scores: float64 (n, K), calibrated logits. Raises DataError as top_option does.
        """
        predictions, confidences = top_option(scores)
        return predictions, confidences if self.isotonic is None else self.isotonic.of(confidences)

    def rescaled(self, scores: Floats, predictions: Ints) -> Floats:
        """Return scores whose softmax gives each answer its confidence and keeps the proportions of the other options.

        predictions: int (n,), the best options of the scores, float64 (n, K). Without an isotonic map, the scores are
        returned unchanged.
        """
        if self.isotonic is None:
            return scores
        before = top_option(scores)[1]
        rise = _log_odds(self.isotonic.of(before)) - _log_odds(before)
        rescaled = scores.copy()
        rescaled[np.arange(len(scores)), predictions] += rise
        return rescaled


UNCALIBRATED = Calibrator(1.0)


def _log_odds(probabilities: Floats) -> Floats:
    inner = np.clip(probabilities, 1 - _NEAREST_ONE, _NEAREST_ONE)
    odds: Floats = np.log(inner) - np.log1p(-inner)
    return odds


def fit_isotonic(confidences: Floats, correct: Bools) -> Isotonic:
    """Fit the rising map that is nearest in squares to being right (Ayer et al. 1955; Zadrozny and Elkan, KDD 2002).

    confidences: float (N,) in [0, 1], at least one.   correct: bool (N,). Equal confidences count as one.
    The regression is constant on blocks of confidences; between two blocks the map is linear. It is then shifted
    towards the identity by 1 / N of the distance, far less than N rows can resolve, so that it rises within blocks too.

    >>> fit_isotonic(np.array([0.6, 0.7, 0.8, 0.9]), np.array([True, False, True, True])).of(np.array([0.6, 0.9]))
    array([0.525, 0.975])
    """
    from scipy.optimize import isotonic_regression

    values, index = np.unique(confidences.astype(np.float64), return_inverse=True)
    counts, hits = np.bincount(index), np.bincount(index[correct], minlength=len(values))
    blocks = isotonic_regression(hits / counts, weights=counts).blocks
    starts, ends = blocks[:-1], blocks[1:]
    # From counts: pooling means step by step would round at every step.
    means = np.add.reduceat(hits, starts) / np.add.reduceat(counts, starts)
    edges = np.stack([values[starts], values[ends - 1]], axis=1).ravel()
    # Beyond the outermost confidences the map is constant.
    knots = np.concatenate([[0.0], edges, [1.0]])
    heights = np.concatenate([means[:1], np.repeat(means, 2), means[-1:]])
    tilted = heights + (knots - heights) / len(correct)
    # Blocks of one confidence have one edge, and edges may be too close for the shift to separate them.
    distinct = np.append((np.diff(knots) > 0) & (np.diff(tilted) > 0), True)
    knots, tilted = knots[distinct], tilted[distinct]
    knots[0] = 0.0
    return Isotonic(tuple(knots.tolist()), tuple(tilted.tolist()))
