"""Logistic stacking: a multinomial logistic regression of the label on the log probabilities of all models so far.

The plainest way to recalibrate and to fuse at once, as a control of what structure adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.logits import LOG_FLOOR, floored_logs, top_option, widened
from cauc_ray.numbers.multinomial import nll_of
from cauc_ray.numbers.products import products
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.features import Scaler
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Stage, Step
from cauc_ray.policies.scored import MethodPolicy

# A stage has K x K numbers for every model so far.
MOST_OPTIONS = 20
# Inverse regularisations tried, as scikit-learn counts them.
INVERSE_PENALTIES = (3e-4, 3e-3, 0.03, 0.3, 3.0)
_MOST_ITERATIONS = 2000
# Of an option that no calibration row has as its label.
_UNSEEN = -20.0


class LogisticPolicy(MethodPolicy):
    """Logistic stacking. A row's state is the log probabilities of all models so far, S = K for each.

    Arrays of each model: means and scales of the log probabilities so far, (S,), weights, (K, S), and offsets, (K,).
    """

    NEEDS_ARRAYS: ClassVar[bool] = True
    fuses: ClassVar[bool] = True
    method: Literal["logistic"] = "logistic"
    stages: tuple[Stage, ...] = Field(min_length=1)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Answer by all log probabilities so far, and stop if the confidence reaches the threshold."""
        numbers = self.stages[stage]
        means, scales, weights, offsets = (
            self.arrays[f"{numbers.name}/{name}"] for name in ("means", "scales", "weights", "offsets")
        )
        options = _of_width(numbers.bounded(logits), len(offsets), numbers.name)
        logs = _logs_so_far(options, state)
        scores = products(Scaler(means, scales)(logs), weights) + offsets
        scores[np.isneginf(options)] = -np.inf
        predictions, confidences = top_option(scores)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(scores), True) if last else confidences >= self.threshold
        return Step(predictions, confidences, accepted, logs, scores, worth=confidences)


def _logs_so_far(options: Floats, state: Floats | None) -> Floats:
    logs = np.maximum(floored_logs(options), LOG_FLOOR)  # also of options that a row lacks
    return logs if state is None else np.column_stack([state, logs])


def _of_width(logits: Floats, k: int, name: str) -> Floats:
    """Return logits of K options. Raises DataError where a row has more."""
    more = np.flatnonzero(np.isfinite(logits[:, k:]).any(axis=1))
    if len(more):
        raise DataError(
            f"row {more[0]} of the batch has more options than the {k} that the policy was fitted on for {name!r}"
        )
    return widened(logits[:, :k], k)


def fit(fitting: Fitting) -> Sequence[LogisticPolicy]:
    """Fit a regression for every stage on calibration; the penalty is that of the highest validation likelihood.

    Raises ConfigError for more options than MOST_OPTIONS.
    """
    chain = fitting.calibration.chain
    n_options = chain.logits[0].shape[1]
    if n_options > MOST_OPTIONS:
        raise ConfigError(f"method logistic is for up to {MOST_OPTIONS} options, got {n_options}")
    policy = fitting.policy(LogisticPolicy)
    splits = fitting.calibration.chain, fitting.validation.chain
    arrays = dict[str, Floats]()
    logs: list[Floats] = [np.zeros((len(split), 0)) for split in splits]
    for index, stage in enumerate(policy.stages):
        options = [_of_width(stage.bounded(split.logits[index]), n_options, stage.name) for split in splits]
        logs = [_logs_so_far(*pair) for pair in zip(options, logs, strict=True)]
        numbers = _stage(logs, [split.labels for split in splits], np.isneginf(options[1]), n_options)
        arrays |= {f"{stage.name}/{name}": array for name, array in numbers.items()}
    return [policy.with_arrays(arrays)]


def _stage(logs: Sequence[Floats], labels: Sequence[Ints], absent: Bools, n_options: int) -> dict[str, Floats]:
    """Return the arrays of a stage.

    Args:
        logs: Log probabilities so far on calibration and validation, float64 (N, S) each.
        labels: Of both, int (N,) each.
        absent: Options that validation rows do not have, bool (N, K).
        n_options: K.
    """
    scaler = Scaler.of(logs[0].astype(np.float32))
    inputs, unseen = (scaler(features).astype(np.float64) for features in logs)

    def loss(regression: tuple[Floats, Floats]) -> float:
        weights, offsets = regression
        return nll_of(np.where(absent, -np.inf, unseen @ weights.T + offsets), labels[1])

    regressions = [_regression(inputs, labels[0], n_options, penalty) for penalty in INVERSE_PENALTIES]
    weights, offsets = min(regressions, key=loss)
    return {"means": scaler.means, "scales": scaler.scales, "weights": weights, "offsets": offsets}


def _regression(inputs: Floats, labels: Ints, n_options: int, inverse_penalty: float) -> tuple[Floats, Floats]:
    """Return weights, float64 (K, S), and offsets, (K,), low where no row has the option as its label."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    weights, offsets = np.zeros((n_options, inputs.shape[1])), np.full(n_options, _UNSEEN)
    classes = np.unique(labels)
    offsets[classes] = 0.0
    if len(classes) == 1:
        return weights, offsets
    with threadpool_limits(1):  # on fits so small several threads only wait for each other
        fit = LogisticRegression(C=inverse_penalty, max_iter=_MOST_ITERATIONS).fit(inputs, labels)
    # Of two classes the regression has the weights of the second alone.
    fitted = classes if len(classes) > 2 else classes[1:]
    weights[fitted], offsets[fitted] = fit.coef_, fit.intercept_
    return weights, offsets


METHOD = Method(
    "logistic",
    "control",
    fit,
    packages=("sklearn",),
    extra="baselines",
    note="penalties chosen on validation; options that a row lacks are never answered",
)
