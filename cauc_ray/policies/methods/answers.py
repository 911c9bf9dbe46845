"""Cascades of models that answer in words: the likeliest answer so far, until it is likely enough.

After stage j a row holds one answer, that of the model itself or the one held before, whichever is likelier right:

    P(own right) by its confidences, whether it is the answer held, whether it is another one given before,
                 and how likely the answer held was right;
    P(held right), where the model says something else, by how likely either was by itself.

Each is a monotone logistic regression (numbers.correctness). What is compared with a threshold is the larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError, DataError, OptionError, PolicyError
from cauc_ray.numbers.answer_keys import NO_ANSWER, AnswerFormat, agreement_keys, confidences_in, joined_keys, said_keys
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.correctness import Correctness, fit_correctness
from cauc_ray.numbers.gains import Gains, fit_gains
from cauc_ray.numbers.logits import ANSWERS
from cauc_ray.numbers.metrics import calibration_error
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import TemperatureDiagnostics
from cauc_ray.policies.family import cascade_of
from cauc_ray.policies.fitting import Fitting, require_fit, split_entries
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy, Stage, Step
from cauc_ray.policies.pools import Pool, SubChain
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Examples

# The most models whose sub-chains are searched.
MOST_SEARCHED = 6
# Log odds that a row without an answer is right.
_NEVER = -40.0
# Folds on whose left-out rows gains are measured.
_N_FOLDS = 5
# Of a row's state: the answer held, as a vector with its log odds; then the keys of all answers, two numbers each.
_N_HELD = 5


class AnswersStage(Stage):
    """A stage of a model that answers in words.

    Attributes:
        rule: By which its answers are the same, as the table says; null if unknown.
        confidences: Names of its confidences, as the table says; null if unknown.
        alone: How probable it is that its answer is right, by its confidences alone.
        informed: The same with what the answers before it say; null for the first.
        held: How probable it is that the answer held is right where this model says something else; null for the first.
        abstains: Whether it never answers: rows that reach it have no answer, whatever those before have said.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"rule", "confidences", "alone", "informed", "held", "abstains"}

    rule: str | None = None
    confidences: tuple[str, ...] | None = None
    alone: Correctness
    informed: Correctness | None = None
    held: Correctness | None = None
    abstains: bool = False

    @property
    def has_answers(self) -> bool:
        """Return whether its model ever answers."""
        return not self.abstains

    @property
    def source(self) -> str:
        """Return what its confidence is based on: its name, and the names of the model's confidences."""
        return f"{self.name}: {', '.join(self.confidences or ())}" if self.confidences else self.name

    def require_format(self, answer_format: AnswerFormat | None) -> None:
        """Raise PolicyError where a model answers by another rule, or with other confidences, than was fitted on."""
        if answer_format is None:
            return
        for what, now, fitted in (
            ("the rule", answer_format.rule, self.rule),
            ("the confidences", answer_format.confidences, self.confidences),
        ):
            if fitted is not None and now != fitted:
                raise PolicyError(
                    f"stage {self.name!r} has {what} {now}; the policy was fitted on {fitted}: restore it in the pool, "
                    "or collect answers and fit again"
                )

    def by_itself(self, logits: Floats) -> tuple[Ints, Floats, Floats]:
        """Return the model's own answers, int32 (n,), and the confidences in them, calibrated and raw, float64 (n,).

        A raw confidence is the first that is a share; where there is none, the calibrated one.
        """
        keys, odds = said_keys(logits), self.odds_alone(logits)
        calibrated, signals = _probability(odds), confidences_in(logits)
        shares = (column for column, scale in zip(signals.T, self.alone.scales, strict=True) if scale.kind == "share")
        raw = next(shares, calibrated)
        return keys, calibrated, np.where(np.isnan(raw), calibrated, raw)

    def odds_alone(self, logits: Floats) -> Floats:
        """Return the log odds that the model's answer is right by its confidences alone, float64 (n,)."""
        signals, n_confidences = confidences_in(logits), len(self.alone.scales)
        if signals.shape[1] != n_confidences:
            raise DataError(f"stage {self.name!r}: answers have {n_confidences} confidences, got {signals.shape[1]}")
        for at, (values, scale) in enumerate(zip(signals.T, self.alone.scales, strict=True)):
            if (foreign_mask := scale.is_foreign(values)).any():
                name = self.confidences[at] if self.confidences else str(at)
                raise DataError(
                    f"stage {self.name!r}: confidence {name!r} is {values[foreign_mask.argmax()]:g}, where it was a "
                    f"{scale.kind} when the policy was fitted"
                )
        odds = self.alone.log_odds(signals, np.zeros((len(signals), 0), dtype=bool))
        return np.where(agreement_keys(logits) == NO_ANSWER, _NEVER, odds)


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a stage reads of n rows.

    Attributes:
        vectors: What its model has said, float (n, N_KEYS + C).
        held: Keys of the answer held, as vectors without confidences, float (n, N_KEYS).
        odds: Log odds of that answer, float64 (n,).
        agrees: Whether the model says the same, bool (n,).
        repeats: Whether it says what another answer before was, bool (n,); false at the second stage.
    """

    vectors: Floats
    held: Floats
    odds: Floats
    agrees: Bools
    repeats: Bools

    @classmethod
    def of(cls, stage: int, vectors: Floats, state: Floats) -> _Reading:
        """Return what a stage reads.   state: of its rows, float64 (n, S)."""
        keys, held = agreement_keys(vectors), state[:, : _N_HELD - 1]
        agrees, repeats = keys == agreement_keys(held), np.zeros(len(keys), dtype=bool)
        for earlier in range(stage):
            first = _N_HELD + 2 * earlier
            repeats |= (keys == joined_keys(state[:, first : first + 2])) & ~agrees
        return cls(vectors, held, state[:, _N_HELD - 1], agrees, repeats)

    def own_signals(self) -> tuple[Floats, Bools]:
        """Return the signals and flags of the model's own answer."""
        support = np.where(self.agrees, self.odds, -self.odds)
        return np.column_stack([confidences_in(self.vectors), support]), np.column_stack([self.agrees, self.repeats])

    def held_signals(self, alone: Floats) -> tuple[Floats, Bools]:
        """Return those of the answer held.   alone: log odds of the model's own answer by itself, float64 (n,)."""
        return np.column_stack([self.odds, -alone]), self.repeats[:, None]


class AnswersPolicy(Policy):
    """A cascade of models that answer in words; a prediction is the key of an answer (numbers.answer_keys).

    A row's state is the answer held with its log odds, then the keys of the answers so far: S = 5 + 2 j after stage j.
    """

    method: Literal["answers"] = "answers"
    fuses: ClassVar[bool] = True
    threshold: float | tuple[float, ...]
    stages: tuple[AnswersStage, ...] = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        for index, stage in enumerate(self.stages):
            if stage.logit_kind != ANSWERS:
                yield f"stage {stage.name!r} of method answers has logits of kind {stage.logit_kind}"
            if stage.abstains and stage is not self.stages[-1]:
                yield f"stage {stage.name!r} never answers, and others follow"
            if (index == 0) != (stage.informed is None) or (index == 0) != (stage.held is None):
                yield "informed and held must be null for the first stage and fitted for the others"

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Hold the likelier answer, and stop if it is likely enough."""
        after = state_after(self.stages[stage], stage, logits, state)
        odds = after[:, _N_HELD - 1]
        confidences = _probability(odds)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(odds), True) if last else confidences >= self.threshold_of(stage)
        scores = np.column_stack([odds, np.zeros(len(odds))])
        return Step(said_keys(after), confidences, accepted, state=after, scores=scores)


def state_after(numbers: AnswersStage, stage: int, vectors: Floats, state: Floats | None) -> Floats:
    """Return the state of rows after a stage, float64 (n, S).

    Args:
        numbers: The stage's.
        stage: Its index.
        vectors: What its model has said, float (n, N_KEYS + C).
        state: State before it, float64 (n, S); None at the first.
    """
    vectors = np.asarray(vectors, dtype=np.float64)
    newest, odds = vectors[:, : _N_HELD - 1], numbers.odds_alone(vectors)
    if state is None or numbers.informed is None or numbers.held is None:
        return np.column_stack([newest, odds, vectors[:, 2:4]])
    state = state[:, : _N_HELD + 2 * stage]  # rows of other policies in the call may be wider
    reading = _Reading.of(stage, vectors, state)
    own_odds = np.where(odds == _NEVER, _NEVER, numbers.informed.log_odds(*reading.own_signals()))
    held_odds = np.where(reading.odds == _NEVER, _NEVER, numbers.held.log_odds(*reading.held_signals(odds)))
    takes = reading.agrees | (own_odds >= held_odds) | numbers.abstains
    held = np.where(takes[:, None], newest, reading.held)
    return np.column_stack([held, np.where(takes, own_odds, held_odds), state[:, _N_HELD:], vectors[:, 2:4]])


def _probability(odds: Floats) -> Floats:
    from scipy.special import expit

    probabilities: Floats = expit(odds)
    return probabilities


def fit_stages(chain: ChainLogits) -> list[AnswersStage]:
    """Fit the stages of a chain, one after the other, to labelled answers."""
    stages, state = list[AnswersStage](), None
    for index, vectors in enumerate(chain.logits):
        vectors = np.asarray(vectors, dtype=np.float64)
        right, answered = said_keys(vectors) == chain.labels, agreement_keys(vectors) != NO_ANSWER
        none = np.zeros((len(right), 0), dtype=bool)
        alone = fit_correctness(confidences_in(vectors)[answered], none[answered], right[answered])
        entry: dict[str, Any] = _entry(chain, index) | {"alone": alone, "abstains": not answered.any()}
        stage = AnswersStage(**entry)
        if state is not None:
            reading = _Reading.of(index, vectors, state)
            signals, flags = reading.own_signals()
            entry["informed"] = fit_correctness(signals[answered], flags[answered], right[answered], plain=1)
            differs = ~reading.agrees & (reading.odds > _NEVER)
            signals, flags = reading.held_signals(stage.odds_alone(vectors))
            held_right = said_keys(reading.held) == chain.labels
            entry["held"] = fit_correctness(signals[differs], flags[differs], held_right[differs], plain=2)
            stage = AnswersStage(**entry)
        stages.append(stage)
        state = state_after(stage, index, vectors, state)
    return stages


def _entry(chain: ChainLogits, index: int) -> dict[str, Any]:
    return {
        "name": chain.models[index],
        "cost": float(chain.costs.means[index]),
        "logit_kind": chain.logit_kinds[index],
        "temperature": 1.0,
        "diagnostics": None,
    }


def _diagnosed(chain: ChainLogits, index: int, stage: AnswersStage) -> AnswersStage:
    """Return a stage with the diagnostics of its model's own confidences."""
    keys, calibrated, raw = stage.by_itself(chain.logits[index])
    right = keys == chain.labels
    losses = [float(np.mean(-np.log(np.clip(np.where(right, p, 1 - p), 1e-12, 1)))) for p in (raw, calibrated)]
    diagnostics = TemperatureDiagnostics(
        status=FitStatus.SEPARABLE if right.all() else FitStatus.CONVERGED,
        standard_error=None,
        nll_before=losses[0],
        nll_after=losses[1],
        calibration_error_before=calibration_error(raw, right),
        calibration_error_after=calibration_error(calibrated, right),
        accuracy=float(right.mean()),
        logits_fingerprint=chain.logits_fingerprint(index),
    )
    return stage.model_copy(update={"diagnostics": diagnostics})


def held_confidences(stages: Sequence[AnswersStage], chain: ChainLogits) -> Floats:
    """Return the confidence in the answer held after each stage, float64 (M, N)."""
    state, confidences = None, []
    for index, (stage, vectors) in enumerate(zip(stages, chain.logits, strict=True)):
        state = state_after(stage, index, vectors, state)
        confidences.append(_probability(state[:, _N_HELD - 1]))
    return np.stack(confidences)


def _gains(chain: ChainLogits) -> Gains:
    """Return the expected gains per cost, of confidences on folds that the numbers were not fitted on."""
    folds = np.random.default_rng(0).permutation(len(chain)) % _N_FOLDS
    confidences = np.empty((len(chain.models), len(chain)))
    for fold in np.unique(folds).tolist():
        seen, rest = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        confidences[:, rest] = held_confidences(fit_stages(chain.of_rows(seen)), chain.of_rows(rest))
    return fit_gains(confidences, chain.costs.means)


def fit_answers(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> AnswersPolicy:
    """Fit a cascade of models that answer in words. Arguments and errors are those of fit_rf."""
    if safe:
        raise OptionError("method answers holds the likelier answer already: leave {safe} out")
    policy = answers_of(calibration, validation, names, by_gain=rule.compare == "gain")
    return choose_threshold(policy.model_copy(update={"budget": rule.budget}), calibration, validation, rule)


def answers_of(calibration: Chain, validation: Chain | None, names: tuple[str, str], *, by_gain: bool) -> AnswersPolicy:
    """Return a cascade at a threshold that no row reaches, not measured."""
    require_fit(calibration)
    assert isinstance(calibration, ChainLogits)
    for name, vectors in zip(calibration.models[:-1], calibration.logits, strict=False):
        if (agreement_keys(vectors) == NO_ANSWER).all():
            raise OptionError(
                f"{calibration.source}: model {name!r} never answers, so it can only be the last of {{models}}"
            )
    fitted = fit_stages(calibration)
    stages = [_diagnosed(calibration, index, stage) for index, stage in enumerate(fitted)]
    entries = split_entries(calibration, validation, names, BY_DEFAULT)
    if by_gain:
        entries |= {"gains": _gains(calibration), "threshold": (STOP_NONE,) * (len(stages) - 1)}
    return AnswersPolicy(**entries, stages=tuple(stages))


def fit(fitting: Fitting) -> Sequence[AnswersPolicy]:
    """Fit a cascade whose stages compare expected gains."""
    return [answers_of(fitting.calibration.chain, fitting.validation.chain, fitting.names, by_gain=True)]


def _of_chains(calibration: Examples, validation: Examples | None) -> Iterator[tuple[tuple[int, ...], AnswersPolicy]]:
    """Fit a cascade to every sub-chain, the shortest first, and yield each with its models."""
    n_models = len(calibration.chain.models)
    for length in range(1, n_models + 1):
        for indices in combinations(range(n_models), length):
            chosen_on = None if validation is None else validation.chain.of_models(indices)
            chain = calibration.chain.of_models(indices)
            yield indices, answers_of(chain, chosen_on, ("calibration", "validation"), by_gain=True)


def sub_chains(pool: Pool) -> Iterator[SubChain]:
    """Fit a cascade to every sub-chain of a pool. Raises ConfigError for too many models."""
    if len(pool.calibration.chain.models) > MOST_SEARCHED:
        raise ConfigError(f"method answers searches the sub-chains of up to {MOST_SEARCHED} models")
    for indices, policy in _of_chains(pool.calibration, pool.validation):
        yield SubChain("answers", indices, cascade_of(policy)(pool.validation))


def fit_sub_chains(fitting: Fitting) -> Sequence[AnswersPolicy]:
    """Fit a cascade to every sub-chain, for a comparison."""
    return [policy for _, policy in _of_chains(fitting.calibration, fitting.validation)]


METHOD = Method("answers", "ours", fit, policy=fit_answers, sub_chains=sub_chains, calibrators=(), reads="answers")
AUTO = Method(
    "answers-auto",
    "ours",
    fit_sub_chains,
    note="the best sub-chain at each budget",
    unpublished="is answers with a search",
    calibrators=(),
    most_models=MOST_SEARCHED,
    reads="answers",
)
