"""Fits on the parts of a chain: a stage's calibrator, and RF's pair of temperatures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.calibration import (
    MOST_OPTIONS,
    Parts,
    TemperatureFit,
    solve_bias_corrected,
    solve_temperatures,
)
from cauc_ray.numbers.calibrators import KINDS, Calibrator, CalibratorKind, Isotonic, fit_isotonic
from cauc_ray.numbers.chain import Chain, ChainPart, Rows
from cauc_ray.numbers.likelihood import first_lacking
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.trace import of_rows

T = TypeVar("T")

# Isotonic maps are supported for a small and a large model only: with three, the choice among models would depend on
# three maps, each of which only knows how often its own model is right.
MOST_ISOTONIC = 2


def require_calibrator(kind: CalibratorKind, method: str, n_models: int) -> None:
    """Raise ConfigError unless a method supports the calibrator with this number of models."""
    if kind not in KINDS:
        raise ConfigError(unknown_name("calibrator", kind, KINDS))
    if kind == "isotonic" and (method != "base" or n_models > MOST_ISOTONIC):
        raise ConfigError(
            f"the calibrator isotonic is for method base with one or two models, got {method} with {n_models}; "
            "use temperature or offsets"
        )


def calibrator_of(chain: Chain, stage: int, kind: CalibratorKind) -> tuple[Calibrator, TemperatureFit]:
    """Fit a stage's calibrator.   The fit's nll_after is that of the calibrator's probabilities.

    Raises DataError as fit_temperature does, and for offsets if an example lacks an option or a model has too many.
    """
    parts = _parts(chain, lambda part: part.of_models([stage]))
    fit = solve_temperatures(parts)
    if kind == "offsets":
        fit = _bias_corrected(chain, stage, parts, fit)
    calibrator = Calibrator(fit.temperature, fit.biases)
    if kind != "isotonic":
        return calibrator, fit
    confidences, correct = of_rows(chain, partial(_answers, stage, calibrator))
    isotonic = fit_isotonic(confidences, correct)
    saved = _nll_saved(isotonic, confidences, correct)
    return replace(calibrator, isotonic=isotonic), replace(fit, nll_after=fit.nll_after - saved)


def _answers(stage: int, calibrator: Calibrator, part: ChainPart, rows: slice) -> tuple[Floats, Bools]:
    """Return each row's confidence and whether its answer is right."""
    predictions, confidences = calibrator.answers(calibrator.scores(part.logits[stage][rows]))
    return confidences, predictions == part.labels[rows]


def _nll_saved(isotonic: Isotonic, confidences: Floats, correct: Bools) -> float:
    """Return the decrease of the mean NLL when each answer gets its new confidence and the others share the rest."""
    after = isotonic.of(confidences)
    tiny = np.finfo(np.float64).tiny
    right = np.log(np.maximum(after, tiny)) - np.log(confidences)
    wrong = np.log(np.maximum(1 - after, 2.0**-53)) - np.log(np.maximum(1 - confidences, 2.0**-53))
    return float(np.where(correct, right, wrong).mean())


def _bias_corrected(chain: Chain, stage: int, parts: Parts, alone: TemperatureFit) -> TemperatureFit:
    n_options, model = parts.n_options, chain.models[stage]
    lacking = [rank for rank in parts.each(first_lacking) if rank is not None]
    if lacking:
        raise DataError(
            f"{chain.source}: example {chain.example_ids[min(lacking)]!r} lacks some of the {n_options} options of "
            f"model {model!r}; offsets need the same options for all examples, use --calibrator temperature"
        )
    if n_options > MOST_OPTIONS:
        raise DataError(
            f"{chain.source}: offsets support up to {MOST_OPTIONS:,} options, model {model!r} has "
            f"{n_options:,}; use --calibrator temperature"
        )
    return solve_bias_corrected(parts, alone)


def pair_of(chain: Chain, before: tuple[RFStage, ...], calibrator: Calibrator) -> TemperatureFit:
    """Fit alpha and beta of the stage after some others (paper, eq. 8-9).   calibrator: the stage's own."""
    return solve_temperatures(_parts(chain, partial(_with_pair, before, calibrator)))


@dataclass(frozen=True, slots=True)
class _Computed:
    """Rows, float64 (n, K), that are computed from some models' logits as they are read."""

    logits: tuple[Rows, ...]
    compute: Callable[[list[Floats]], Floats]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.logits[0].shape

    @property
    def dtype(self) -> np.dtype[np.float64]:
        return np.dtype(np.float64)

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        return self.compute([own[rows] for own in self.logits])


def _with_pair(before: tuple[RFStage, ...], calibrator: Calibrator, part: ChainPart) -> ChainPart:
    """Return a part with r of the stages before, and the next one's calibrated logits, in place of the logits."""

    def r(logits: list[Floats]) -> Floats:
        found: Floats | None = None
        for own, stage in zip(logits, before, strict=True):
            found = stage.fold(stage.calibrator.scores(own), found)
        assert found is not None
        return found

    n = len(before)
    scores = _Computed(part.logits[n : n + 1], lambda logits: calibrator.scores(logits[0]))
    return replace(part, logits=(_Computed(part.logits[:n], r), scores))


def _parts(chain: Chain, sources: Callable[[ChainPart], ChainPart]) -> Parts:
    """Return a chain's parts for a fit.   sources: replaces a part's logits by the arrays to fit."""

    def each(ask: Callable[[ChainPart], T], /) -> list[T]:
        return chain.each(lambda part: ask(sources(part)))

    return Parts(each, len(chain))
