"""Stacked cascades: CAUC-RF's recursion with biases that recalibrate each model. Ours, beyond the paper.

With l_j = log softmax z_j of a stage's logits and f_j = max(l_j, -20), a row's scores after the stage are, up to a
constant of the row,

    r_j = a_j r_{j-1} + c_j l_j + b_j + f_j W_j,

where r_0 is what a classifier of an embedding says, if an encoder is the first stage. With a_j and c_j alone it is
CAUC-RF (paper, eq. 8): a_j = 1 / (2 alpha_j), c_j = 1 / (2 beta_j T_j).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from cauc_ray.errors import CaucWarning, ConfigError, DataError, OptionError, PolicyError
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import LARGEST, Chain, ChainLogits
from cauc_ray.numbers.logits import LOG_FLOOR, floored_logs, plain_scores, same_width, top_option
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.arrays import ArraysPolicy
from cauc_ray.policies.family import Family, cascade_of
from cauc_ray.policies.fitting import Fitting, entries_of_models, require_fit, split_entries
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods import rf
from cauc_ray.policies.policy import Policy, Stage, Step
from cauc_ray.policies.pools import MOST_MODELS, N_STACKED, Pool, SubChain
from cauc_ray.policies.stacking import PENALTIES, PLAIN, Stacking
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Examples


class StackedStage(Stage):
    """A stage of a stacked policy.

    Attributes:
        state_weight: a, of the scores before it; null for the first without an encoder.
        logit_weight: c, of its log probabilities.
        penalty: Of biases and matrix in their fit, chosen by cross-validation; null for a stage without them.
        biases: b, one for each option; null for none.
        matrix: W, a row for each option whose log probability it weighs; null for none.
    """

    DECIDES: ClassVar[frozenset[str]] = Stage.DECIDES | {"state_weight", "logit_weight", "biases", "matrix"}

    state_weight: float | None = Field(default=None, gt=0, le=LARGEST)
    logit_weight: float = Field(gt=0, le=LARGEST)
    penalty: float | None = Field(default=None, gt=0)
    biases: tuple[float, ...] | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None

    @model_validator(mode="after")
    def _is_square(self) -> StackedStage:
        if self.matrix is not None and {len(self.biases or ()), *map(len, self.matrix)} != {len(self.matrix)}:
            raise ValueError("the matrix must have as many rows and columns as there are biases")
        return self

    def scores_after(self, logits: Floats, state: Floats | None) -> Floats:
        """Return r after the stage, float64 (n, K).

        Args:
            logits: Of its model, float (n, K).
            state: r before it, float64 (n, K).
        """
        logits = self.bounded(logits)
        logs = plain_scores(logits) if self.biases is None else floored_logs(logits)
        if state is not None:
            logs, state = same_width(logs, state, (self.name, "the stages before"))
        scores: Floats = self.logit_weight * logs
        if state is not None and self.state_weight is not None:
            scores += self.state_weight * state
        if self.biases is not None:
            self._add_biases(scores, logs, np.array(self.biases))
        scores -= scores.max(axis=1, keepdims=True)
        return scores

    def _add_biases(self, scores: Floats, logs: Floats, biases: Floats) -> None:
        n_known, width = len(biases), scores.shape[1]
        unknown = np.flatnonzero(np.isfinite(logs[:, n_known:]).any(axis=1))
        if len(unknown):
            raise DataError(
                f"row {unknown[0]} of the batch has more options than the {n_known} that the policy was fitted on for "
                f"{self.name!r}"
            )
        scores[:, :n_known] += biases[:width]
        # Row by row of W: a matrix product may round a row differently with other neighbours.
        for option, weights in enumerate(self.matrix or ()):
            values = logs[:, option] if option < width else np.full(len(logs), -np.inf)
            values = np.where(np.isfinite(values), values, LOG_FLOOR)
            scores[:, :n_known] += values[:, None] * np.array(weights)[:width]


class StackedPolicy(ArraysPolicy):
    """A stacked cascade. A row's state is the score vector r over the K options: S = K.

    Arrays with an encoder: weights, (K, d), and offsets, (K,), of the classifier of its embeddings.
    """

    method: Literal["stacked"] = "stacked"
    threshold: tuple[float, ...]
    stages: tuple[StackedStage, ...] = Field(min_length=1)

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if any((stage.state_weight is None) != (index == 0) for index, stage in enumerate(self.stages)):
            yield "state_weight must be null for the first stage and a number for the others"

    @classmethod
    def parsed(cls, content: Mapping[str, Any], source: str, file: AnyPath | None) -> Self:
        """Return a policy. Raises PolicyError for one of an earlier edition of the method."""
        if "variant" in content:
            raise PolicyError(
                f"{source}: a stacked policy of an earlier version, which decided otherwise; fit it again"
            )
        return super().parsed(content, source, file)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Add the stage's terms to the scores, and stop if their confidence reaches the stage's threshold."""
        if stage == 0 and self.encoder is not None:
            scores = products(np.asarray(logits, dtype=np.float64), self.arrays["weights"]) + self.arrays["offsets"]
            return self.no_answer(scores - scores.max(axis=1, keepdims=True))
        if stage == 1 and self.encoder is not None and state is not None:
            state = state[:, : logits.shape[1]]  # rows may have fewer options than the classifier
        r = self.stages[stage].scores_after(logits, state)
        predictions, confidences = top_option(r)
        last = stage == len(self.stages) - 1
        accepted = np.full(len(r), True) if last else confidences >= self.threshold_of(stage)
        return Step(predictions, confidences, accepted, state=r, scores=r)


class StackedFits:
    """Fits of stacked cascades to chains of some models, which share the fits of common prefixes.

    Args:
        calibration: Split to fit on; if its embeddings explain the labels, cascades begin with their encoder.
        validation: Split to measure operating points on; None without one.
        names: Names of the two splits.
    """

    def __init__(
        self, calibration: Examples, validation: Examples | None, names: tuple[str, str] = ("calibration", "validation")
    ) -> None:
        """Calibrate the models, and fit the classifier of embeddings."""
        self._splits, self._names = (calibration, validation), names
        chain, embeddings = calibration.chain, calibration.embeddings
        self._entries = entries_of_models(chain, warns=True)
        logits = [Stage(**entry).bounded(logits) for entry, logits in zip(self._entries, chain.logits, strict=True)]
        self._plain = self._ridged = Stacking(logits, chain.labels)
        self._classifier = None
        if embeddings is not None:
            n_options = max(model_logits.shape[1] for model_logits in logits)
            classifier = fit_classifier(np.asarray(embeddings, dtype=np.float64), chain.labels, n_options)
            if classifier.explains:
                self._classifier = classifier
                self._ridged = Stacking(logits, chain.labels, classifier.held_out)

    def candidates(self, models: Sequence[int] | None = None) -> list[StackedPolicy]:
        """Fit a chain at thresholds that no row reaches: the cross-validated cascade, and CAUC-RF if it differs.

        Args:
            models: Indices of the chain's models; None for all.
        """
        models = range(len(self._entries)) if models is None else models
        ridged = self._candidate(self._ridged, models, PENALTIES)
        policies = [ridged]
        if ridged.encoder is not None or any(stage.penalty is not None for stage in ridged.stages):
            policies.append(self._candidate(self._plain, models, PLAIN))
        return policies

    def _candidate(self, stacking: Stacking, models: Sequence[int], penalties: Sequence[float]) -> StackedPolicy:
        names = [self._splits[0].chain.models[model] for model in models]
        fits = stacking.chain(models, penalties)
        stages = [StackedStage(**self._entries[model], **fit.numbers) for model, fit in zip(models, fits, strict=True)]
        classifier = self._classifier if stacking is not self._plain else None
        chain, chosen_on = (
            None if split is None else split.own_chain(names, encoded=classifier is not None) for split in self._splits
        )
        assert chain is not None
        gains = stacking.gains(fits, chain.costs.means[-len(models) :])
        if classifier is not None:
            (encoder,) = entries_of_models(chain.of_models([0]))
            stages.insert(0, StackedStage(**encoder, logit_weight=1.0))
        common = split_entries(chain, chosen_on, self._names, BY_DEFAULT)
        common["threshold"] = (STOP_NONE,) * (len(models) - 1)
        policy = StackedPolicy(**common, stages=tuple(stages), gains=gains)
        if classifier is not None:
            policy = policy.with_arrays({"weights": classifier.weights.T, "offsets": classifier.offsets})
        return policy


def fit_stacked(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> Policy:
    """Fit a stacked cascade on a chain of any length.

    Arguments and errors are those of fit_rf, but the rule may set a threshold for two models at most, and calibrator
    and safe must have their defaults: cross-validation chooses the penalties, and CAUC-RF is among the candidates.
    """
    if safe:
        raise OptionError("method stacked has CAUC-RF among its candidates: leave {safe} out")
    if not isinstance(calibration, ChainLogits):
        raise OptionError("method stacked needs all logits in one process; leave {shards} out")
    assert validation is None or isinstance(validation, ChainLogits)
    require_fit(calibration)
    chosen_on = None if validation is None else Examples(validation)
    policies = StackedFits(Examples(calibration), chosen_on, names).candidates()
    if validation is None or chosen_on is None or not validation.labelled.all():
        policy = policies[0].model_copy(update={"budget": rule.budget})
        return choose_threshold(policy, calibration, validation, rule)
    return Family(policies, chosen_on).choose(Examples(calibration), rule)


def _stacked(pool: Pool, chains: Sequence[tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], StackedPolicy]]:
    """Fit stacked cascades to some sub-chains, by index, and yield each with its models."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)  # the final fit of the chosen chain issues the warnings
        fits = StackedFits(pool.calibration, pool.validation)
    for indices in sorted(chains):  # those that begin alike follow each other, and share fits
        for policy in fits.candidates(indices):
            yield indices, policy


def sub_chains(pool: Pool) -> Iterator[SubChain]:
    """Fit stacked cascades, which take longer, to the sub-chains that are best as CAUC-RF."""
    if pool.rule.threshold is not None:
        raise ConfigError("stacked cascades have a threshold for each stage: search them by a budget, not a threshold")
    for indices, policy in _stacked(pool, pool.shortlist(rf.sub_chains(pool))):
        yield SubChain("stacked", indices, cascade_of(policy)(pool.validation))


def sub_chains_at_budget(pool: Pool) -> Iterator[SubChain]:
    """Fit stacked cascades as sub_chains() does. Raises ConfigError without a budget."""
    if pool.rule.budget is None:
        raise ConfigError("method auto chooses a chain at a budget; give one")
    return sub_chains(pool)


def fit_sub_chains(fitting: Fitting) -> Sequence[StackedPolicy]:
    """Fit stacked cascades to the sub-chains that are best as CAUC-RF, for a comparison.

    Raises ConfigError for too many models.
    """
    pool = Pool.of(fitting.calibration, fitting.validation, ThresholdRule(objective=fitting.objective))
    costs = pool.validation.chain.costs.means
    budgets = np.linspace(costs.min(), costs.max(), N_STACKED).tolist()
    fits = list(_stacked(pool, pool.shortlist(rf.sub_chains(pool), budgets)))
    fits.sort(key=lambda fit: (len(fit[0]), fit[0]))  # among equals the shortest
    return [policy for _, policy in fits]


def fit(fitting: Fitting) -> Sequence[StackedPolicy]:
    """Fit a stacked cascade, and CAUC-RF if cross-validation chooses another one."""
    return StackedFits(fitting.calibration, fitting.validation, fitting.names).candidates()


def _note(fitting: Fitting) -> str:
    return "" if fitting.calibration.embeddings is None else fitting.calibration.embedding_note


METHOD = Method("stacked", "ours", fit, note=_note, policy=fit_stacked, sub_chains=sub_chains, calibrators=())
AUTO = Method(
    "auto",
    "ours",
    fit_sub_chains,
    note=_note,
    sub_chains=sub_chains_at_budget,
    calibrators=(),
    most_models=MOST_MODELS,
)
