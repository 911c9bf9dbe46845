"""The decision of a policy: one step from a stage's logits to an answer, at its threshold."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from cauc_ray.errors import CaucWarning, ConfigError, DataError, PolicyError
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.softmax import likeliest
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import N_GROUPS, N_LIKELIEST, ThresholdChoice
from cauc_ray.policies.notebook import Shown, SmallTable, share_text
from cauc_ray.policies.policy_file import PolicyFile

if TYPE_CHECKING:
    from cauc_ray.policies.predictions import Predictions


@dataclass(frozen=True, slots=True)
class Step:
    """A policy's decision after a stage, for n rows.

    predictions: int32 (n,), the answer if the row stops here.   confidences: float64 (n,), in that answer.
    accepted: bool (n,), which rows stop.   state: float64 (n, S), carried by rows that go on.
    scores: float64 (n, K), calibrated logits of that answer: their softmax gives the options' probabilities; the
    answer's is the confidence, and the largest unless an isotonic calibrator has lowered it below another's. May be
    the same array as the state. In both, -inf pads rows with fewer options.
    next: int8 (n,), the stage that each row goes to if it does not stop, any that it has not visited; None for the
    next one. After a stage without answers, such as an encoder, a row that goes on has the prediction -1.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    state: Floats
    scores: Floats
    next: Ints | None = None

    def likeliest(self) -> Ints:
        """Return each answer's likeliest options in order, encoded as one number: int16 (n,).

        The N_LIKELIEST options, modulo N_GROUPS, are the number's digits to that base; see softmax.likeliest.
        """
        digits = likeliest(self.scores, N_LIKELIEST) % N_GROUPS
        codes: Ints = (digits @ (N_GROUPS ** np.arange(N_LIKELIEST)[::-1])).astype(np.int16)
        return codes


class Policy(Shown, PolicyFile):
    """A decision rule for a chain of models: the numbers of its file, and the step that uses them.

    in_turn: whether every row starts at the first stage and goes from each stage to the next until it stops.
    """

    in_turn: ClassVar[bool] = True

    @property
    def calibrator_kind(self) -> CalibratorKind:
        """Return the calibrator of its models."""
        return self.stages[0].calibrator.kind

    @property
    def id(self) -> str:
        """Return a short digest of everything that affects answers, and of nothing else.

        That is the method, the threshold, and for each stage in order its model and the numbers that a step uses. Two
        policies with one id give every input the same answer, regardless of costs, budgets, fits and measurements.
        """
        decides = {
            "method": self.method,
            "threshold": self.threshold,
            "stages": [stage.model_dump(mode="json", include=set(stage.DECIDES)) for stage in self.stages],
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:12]

    def first(self, n: int) -> Ints | None:
        """Decide before any call: return the first stage of each of n rows, int8 (n,); None for stage 0."""
        return None

    def start(self, logits: Floats) -> Step:
        """Decide after the first stage.   logits: float (n, K), from the model."""
        return self.step(0, logits, None)

    @abstractmethod
    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Decide after a stage, given the state (n, S) that its rows carry; None if no row carries any.

        -inf pads rows with a narrower state, and fills rows without state.
        logits: float (n, K), from the stage's model, with probabilities converted to logarithms
        (numbers.logits.as_logits); -inf, or a mask, where a row has no such option.
        Raises DataError if a row's options differ from those at earlier stages.
        """

    def check_chain(self, chain: Chain) -> None:
        """Raise PolicyError unless the chain is this policy's; warn if its logits are of another kind."""
        if chain.models != self.models:
            raise PolicyError(f"the policy is for {', '.join(self.models)}, not for {', '.join(chain.models)}")
        for model, held, fitted in zip(self.models, chain.logit_kinds, self.logit_kinds, strict=True):
            if fitted not in (None, held):
                warnings.warn(
                    f"{chain.source} has logits of kind {held!r} for model {model!r}; the policy was fitted on "
                    f"{fitted!r}",
                    CaucWarning,
                    stacklevel=2,
                )

    def with_threshold(self, threshold: float) -> Self:
        """Return the policy at the given threshold. Raises ConfigError unless it is at least 0."""
        check_threshold(threshold)
        objective = self.threshold_choice.objective
        still_said = None if objective == "accuracy" else objective
        choice = ThresholdChoice(rule="given", objective=still_said, split=None)
        return self._at(threshold, budget=None, choice=choice)

    def with_budget(self, budget: float) -> Self:
        """Return the policy at the best threshold of its curve within a budget, the mean cost per example.

        Raises BudgetError if no point is within the budget, PolicyError if the policy has no curve.
        """
        check_budget(budget)
        if not self.curve or self.validation is None:
            raise PolicyError(
                "the policy has no accuracy-cost curve to choose a threshold from; "
                "fit it again with a labelled validation split, or give a threshold"
            )
        thresholds, costs, quality = np.array([(at.threshold, at.cost, at.quality) for at in self.curve]).T
        best = OperatingPoints(thresholds, costs, quality, self.cost_unit).index_of_best(budget)
        objective = self.threshold_choice.objective or "accuracy"
        choice = ThresholdChoice(rule="budget", objective=objective, split=self.validation.split)
        return self._at(self.curve[best].threshold, budget=budget, choice=choice)

    def _at(self, threshold: float, budget: float | None, choice: ThresholdChoice) -> Self:
        """Return the policy at a threshold, without measurements of another threshold."""
        changes: dict[str, Any] = {
            "threshold": float(threshold),
            "budget": None if budget is None else float(budget),
            "threshold_choice": choice,
        }
        if threshold != self.threshold:
            changes |= {"expected": None, "safe": None, "guards": (), "reference": None}
        return self.model_copy(update=changes)

    def predict(self, logits: Mapping[str, Any], *, example_ids: Any = None) -> Predictions:
        """Answer examples from all models' logits, exactly as a run and a service do.

        logits: by model, (N, K): numpy arrays, lists or frames with a column for each option; of the kind that the
        policy was fitted on. Row i of each is example i. Costs are the models' own.   example_ids: (N,), unique;
        without them row numbers as str.
        Raises ConfigError if a model is missing, DataError naming the example for invalid logits.
        """
        from cauc_ray.policies.predictions import predict

        return predict(self, logits, example_ids)

    def small_table(self) -> SmallTable:
        """Return a display of the chain, the threshold and the expected results."""
        budget = "" if self.budget is None else f", budget {self.budget:g} {self.cost_unit}"
        expected, outlook = self.expected, ""
        if expected is not None:
            accuracy = share_text(None if expected.accuracy is None else expected.accuracy.value)
            outlook = f"; {accuracy} accuracy at {expected.cost:.4g} {self.cost_unit} expected ({expected.split})"
        rows = []
        for index, stage in enumerate(self.stages):
            answered = None if expected is None else expected.stages[index].answered / max(1, expected.n)
            rows.append([stage.name, f"{stage.cost:g}", f"{stage.temperature:.3f}", share_text(answered)])
        caption = f"Policy {self.id}: {self.method}, threshold {self.threshold:.4f}{budget}{outlook}"
        return SmallTable(caption, ["stage", f"cost ({self.cost_unit})", "temperature", "answers"], rows)


def check_threshold(threshold: float) -> None:
    """Raise ConfigError unless a threshold is a number of at least 0."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise ConfigError(f"a threshold must be a number of at least 0, got {threshold}")


def check_budget(budget: float) -> None:
    """Raise ConfigError unless a budget is a finite number."""
    if not math.isfinite(budget):
        raise ConfigError(f"a budget must be a finite number, got {budget}")


def stacked(arrays: Sequence[Floats]) -> Floats:
    """Concatenate arrays (n, K), padded with -inf to the widest."""
    width = max(own.shape[1] for own in arrays)
    if any(own.shape[1] < width for own in arrays):
        arrays = [np.pad(own, ((0, 0), (0, width - own.shape[1])), constant_values=-np.inf) for own in arrays]
    return np.concatenate(arrays)


def joined_states(states: Sequence[tuple[int, Floats | None]]) -> Floats | None:
    """Return the states of several sets of rows as one array (n, S); None if no row has one.   states: rows, state."""
    if all(state is None for _, state in states):
        return None
    return stacked([np.zeros((n, 0)) if state is None else state for n, state in states])


def by_stage(stages: Ints) -> list[tuple[int, Ints]]:
    """Return for each stage the rows that go there, int (m,).   stages: int (n,), below 0 for nowhere."""
    return [(stage, np.flatnonzero(stages == stage)) for stage in np.unique(stages).tolist() if stage >= 0]


def same_width(scores: Floats, state: Floats, names: tuple[str, str]) -> tuple[Floats, Floats]:
    """Pad the narrower of two (n, K) arrays with -inf; what the wider has beyond must be padding too.

    names: of their stages, for the message of the DataError that is raised otherwise.
    """
    width = scores.shape[1] - state.shape[1]
    if width == 0:
        return scores, state
    wide, narrow = (scores, state) if width > 0 else (state, scores)
    k = narrow.shape[1]
    more = np.flatnonzero(np.isfinite(wide[:, k:]).any(axis=1))
    if len(more):
        raise DataError(
            f"row {more[0]} of the batch has {k} options or fewer at one stage and up to {wide.shape[1]} at "
            f"another ({names[0]!r} and {names[1]!r}); all models of a chain must have the same options"
        )
    padded = np.pad(narrow, ((0, 0), (0, abs(width))), constant_values=-np.inf)
    return (scores, padded) if width > 0 else (padded, state)
