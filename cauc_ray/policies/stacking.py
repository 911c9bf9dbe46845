"""Fits of stacked cascades: which terms a chain has, by cross-validation, and their weights, stage by stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.calibration import LinearFit, Parts, fit_linear, solve_bias_corrected, solve_temperatures
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits, ChainPart
from cauc_ray.numbers.logits import log_softmax, real_options, softmax, top_option
from cauc_ray.numbers.sweep import STOP_NONE, Objective
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.cauc import RFStage
from cauc_ray.policies.experts import Experts, Told, fit_experts
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import Fitting, Thresholded, cascade_of
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.stacked import (
    Gain,
    OwnAnswer,
    StackedPolicy,
    StackedStage,
    answer_of,
    competent,
    features_of,
    log_probabilities,
)
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Examples
from cauc_ray.policies.variants import Variants

SPLITS = ("calibration", "validation")
# What a policy of another method says of its splits and models, too.
_KEPT = Policy.model_fields.keys() - {"method", "stages", "expected", "guards", "reference", "curve"}
N_FOLDS = 5
# Tried in turn, until one is worse than the one before.
ANSWERS: tuple[OwnAnswer, ...] = ("vote", "probability")
BIAS_PRECISIONS = (100.0, 10.0, 1.0)
MATRIX_PRECISIONS = (100.0, 10.0, 1.0, 0.1)
# A matrix of K x K numbers is fitted for so many options at most, on this many rows for each of its numbers at least.
MOST_MATRIX_OPTIONS, ROWS_PER_NUMBER = 20, 5
GAIN_PENALTIES = (1e1, 1e2, 1e3, 1e4, 1e5)


@dataclass(frozen=True, slots=True)
class Terms:
    """Which terms beyond CAUC-RF's all stages have; a precision of infinity is none."""

    answer: OwnAnswer = "none"
    bias_precision: float = math.inf
    matrix_precision: float = math.inf

    @property
    def none(self) -> bool:
        """Return whether there is no such term."""
        return self == Terms()


class _Model:
    """What a fit needs of one model's logits, float (n, K), each computed once.

    competence: what an embedding tells of the model, float64 (n,); None for nothing.   prior: what it tells of the
    labels, float64 (n, K), for the first model only.
    """

    def __init__(self, logits: Floats, competence: Floats | None = None, prior: Floats | None = None) -> None:
        self.logits = real_options(logits)
        self.competence, self.prior = competence, prior
        self._answers: dict[OwnAnswer, Floats] = {}

    @cached_property
    def logs(self) -> Floats:
        return log_probabilities(self.logits, floored=False)

    @cached_property
    def floored(self) -> Floats:
        return log_probabilities(self.logits, floored=True)

    def answer(self, answer: OwnAnswer) -> Floats:
        if answer not in self._answers:
            self._answers[answer] = answer_of(self.logits, answer)
        return self._answers[answer]


def calibrator_for(logits: Floats, labels: Ints) -> Calibrator:
    """Fit T and, for few options, biases with a normal prior of precision 1: what pi is the softmax of."""
    parts = Parts.of(ChainPart((logits,), labels, np.arange(len(labels))))
    fit = solve_temperatures(parts)
    if logits.shape[1] <= MOST_MATRIX_OPTIONS:
        fit = solve_bias_corrected(parts, fit)
    return Calibrator(fit.temperature, fit.biases)


@dataclass(frozen=True, slots=True)
class _StageFit:
    """A stage's weights, by the names of StackedStage, and biases.   calibrator: of pi, None without a matrix."""

    names: tuple[str, ...]
    linear: LinearFit
    calibrator: Calibrator | None


def _sources(model: _Model, terms: Terms, state: Floats | None, rows: Ints) -> dict[str, Floats]:
    """Return what a stage weighs, by the names of StackedStage's weights."""
    plain = terms.none and model.competence is None and model.prior is None
    found = {"logit_weight": (model.logs if plain else model.floored)[rows]}
    if state is not None:
        found["state_weight"] = state
    if terms.answer != "none":
        found["answer_weight"] = model.answer(terms.answer)[rows]
    if model.competence is not None:
        found["competence_weight"] = competent(found["logit_weight"], model.competence[rows])
    if model.prior is not None:
        found["prior_weight"] = model.prior[rows]
    return found


def _features(model: _Model, terms: Terms, calibrator: Calibrator | None, rows: Ints) -> Floats | None:
    """Return what biases are linear in: a constant, pi, or both; None for a constant alone."""
    if calibrator is None:
        return None
    probabilities = softmax(calibrator.scores(model.logits[rows]))
    if not math.isfinite(terms.bias_precision):
        return probabilities
    return np.column_stack([np.ones(len(rows)), probabilities])


def _fitted(
    model: _Model,
    terms: Terms,
    state: Floats | None,
    labels: Ints,
    rows: Ints,
    pi: Calibrator | None,
    near: LinearFit | None,
) -> _StageFit:
    """Fit a stage on some rows.   near: a fit of the same stage to begin at, None where there is none of that shape."""
    sources, k = _sources(model, terms, state, rows), model.logits.shape[1]
    calibrator = pi if math.isfinite(terms.matrix_precision) else None
    precisions = [terms.bias_precision] if math.isfinite(terms.bias_precision) else []
    precisions += [terms.matrix_precision] * (0 if calibrator is None else k)
    shape = (len(sources), len(precisions))
    if near is not None and (len(near.weights), len(near.biases)) != shape:
        near = None
    free, features = [name == "competence_weight" for name in sources], _features(model, terms, calibrator, rows)
    linear = fit_linear([*sources.values()], labels[rows], features, precisions, free=free, start=near)
    return _StageFit(tuple(sources), linear, calibrator)


def _applied(model: _Model, terms: Terms, state: Floats | None, rows: Ints, fit: _StageFit) -> Floats:
    """Return r of some rows after a stage."""
    weighted = zip(fit.linear.weights, _sources(model, terms, state, rows).values(), strict=True)
    r: Floats = np.sum([weight * source for weight, source in weighted], axis=0)
    features = _features(model, terms, fit.calibrator, rows)
    if len(fit.linear.biases):
        r += fit.linear.biases[0] if features is None else features @ fit.linear.biases
    r -= r.max(axis=1, keepdims=True)
    return r


@dataclass(frozen=True, slots=True)
class _Validated:
    """Terms, and what cross-validation says of them.

    nll: mean over rows and stages, in nats.   fits: by fold and stage.   held_out: r of every row by fits on the other
    folds, float64 (M, N, K).
    """

    terms: Terms
    nll: float
    fits: list[list[_StageFit]]
    held_out: Floats


class Stacking:
    """The fit of a chain's stages on labelled rows.

    logits: M arrays, float (N, K).   labels: int (N,).   told: what experts tell of the rows.
    """

    def __init__(self, logits: Sequence[Floats], labels: Ints, told: Told | None = None, seed: int = 0) -> None:
        competences = (None,) * len(logits) if told is None else told.competences
        priors = (None if told is None else told.prior, *(None,) * (len(logits) - 1))
        self._models = [_Model(*own) for own in zip(logits, competences, priors, strict=True)]
        self._labels = labels
        n, k = logits[0].shape
        order = np.random.default_rng(seed).permutation(n)
        self._folds = [np.sort(fold) for fold in np.array_split(order, min(N_FOLDS, n))]
        self._matrix = k <= MOST_MATRIX_OPTIONS and n >= ROWS_PER_NUMBER * k * k
        self._others = [np.setdiff1d(np.arange(n), fold) for fold in self._folds]

    @cached_property
    def _pis(self) -> list[list[Calibrator]]:
        """Return pi's calibrators by fold and stage, fitted on the other folds."""
        return [
            [calibrator_for(model.logits[rows], self._labels[rows]) for model in self._models] for rows in self._others
        ]

    def chosen(self) -> _Validated:
        """Choose terms greedily by cross-validated likelihood."""
        best = self._validated(Terms(), None)
        lists: list[tuple[str, Sequence[Any]]] = [("answer", ANSWERS), ("bias_precision", BIAS_PRECISIONS)]
        if self._matrix:
            lists.append(("matrix_precision", MATRIX_PRECISIONS))
        for name, values in lists:
            last = best
            for value in values:
                tried = self._validated(replace(best.terms, **{name: value}), last)
                if tried.nll >= last.nll:
                    break
                last = tried
            best = last
        return best

    def whole(self, terms: Terms) -> list[_StageFit]:
        """Fit all stages on all rows."""
        return self._chain(terms, np.arange(len(self._labels)), None, None)

    def _chain(
        self, terms: Terms, rows: Ints, pis: Sequence[Calibrator] | None, near: Sequence[_StageFit] | None
    ) -> list[_StageFit]:
        state, fits = None, []
        for stage, model in enumerate(self._models):
            pi = None
            if math.isfinite(terms.matrix_precision):
                pi = calibrator_for(model.logits[rows], self._labels[rows]) if pis is None else pis[stage]
            start = None if near is None else near[stage].linear
            fits.append(_fitted(model, terms, state, self._labels, rows, pi, start))
            state = _applied(model, terms, state, rows, fits[-1])
        return fits

    def _validated(self, terms: Terms, near: _Validated | None) -> _Validated:
        pis = self._pis if math.isfinite(terms.matrix_precision) else [None] * len(self._folds)
        starts = [None] * len(self._folds) if near is None else near.fits
        shape = (len(self._models), len(self._labels), self._models[0].logits.shape[1])
        held_out, total, all_fits = np.empty(shape), 0.0, []
        for fold, rows, own, start in zip(self._folds, self._others, pis, starts, strict=True):
            fits, state = self._chain(terms, rows, own, start), None
            for stage, (model, fit) in enumerate(zip(self._models, fits, strict=True)):
                state = _applied(model, terms, state, fold, fit)
                held_out[stage, fold] = state
                total -= float(log_softmax(state)[np.arange(len(fold)), self._labels[fold]].sum())
            all_fits.append(fits)
        return _Validated(terms, total / (len(self._models) * len(self._labels)), all_fits, held_out)


def gains_of(held_out: Floats, costs: Floats, seed: int = 0) -> list[Gain | None]:
    """Fit what going on from each stage gains in confidence, by ridge regressions on rows that fits have not seen.

    held_out: r, float64 (M, N, K).   costs: of the models' calls, float64 (M,).
    """
    confidences = np.stack([top_option(r)[1] for r in held_out])
    m, n = confidences.shape
    whole = float(costs.sum())
    found: list[Gain | None] = []
    for stage in range(m - 1):
        features = features_of(confidences[stage])
        centres, scales = features.mean(axis=0), features.std(axis=0)
        scales = np.where(scales > 1e-12, scales, 1.0)
        x = np.clip((features - centres) / scales, -6, 6)
        targets = (confidences[stage + 1 :] - confidences[stage]).T
        weights, intercepts = _ridge(x, targets, np.random.default_rng(seed).permutation(n))
        to_come = np.cumsum(costs[stage + 1 :])
        if whole <= 0 or to_come.min() <= 0:
            return [None] * m
        found.append(
            Gain(
                centres=tuple(centres.tolist()),
                scales=tuple(scales.tolist()),
                weights=tuple(tuple(own) for own in weights.T.tolist()),
                intercepts=tuple(intercepts.tolist()),
                costs=tuple((to_come / whole).tolist()),
            )
        )
    return [*found, None]


def _ridge(x: Floats, targets: Floats, order: Ints) -> tuple[Floats, Floats]:
    """Return ridge weights (F, T) and intercepts (T,) at the penalty of least cross-validated squared error.

    x: float64 (n, F).   targets: float64 (n, T).   order: of the rows, for the folds.
    """

    def solved(rows: Ints, penalty: float) -> tuple[Floats, Floats]:
        own, of = x[rows], targets[rows]
        centre, level = own.mean(axis=0), of.mean(axis=0)
        centred = own - centre
        weights = np.linalg.solve(centred.T @ centred + penalty * np.eye(x.shape[1]), centred.T @ (of - level))
        return weights, level - centre @ weights

    def error(penalty: float) -> float:
        total = 0.0
        for fold in np.array_split(order, min(N_FOLDS, len(order))):
            weights, intercepts = solved(np.setdiff1d(order, fold), penalty)
            total += float(((x[fold] @ weights + intercepts - targets[fold]) ** 2).sum())
        return total

    best = min(GAIN_PENALTIES, key=error)
    return solved(order, best)


def variants_of(
    calibration: Chain, validation: Chain | None, names: tuple[str, str] = SPLITS, encoded: Encoded | None = None
) -> list[StackedPolicy]:
    """Return the policies among which validation chooses, at a threshold that no row reaches.

    First CAUC-RF's own numbers; then, where cross-validation chooses terms beyond them, these; and with the same terms
    the one in which expected gains decide. The first has no encoder, the others begin with the encoded one if given.
    Raises ConfigError where logits are not in this process, DataError if labels are missing.
    """
    if not isinstance(calibration, ChainLogits):
        raise ConfigError("method stacked needs all logits in one process; leave shards out")
    rf = fit_rf(calibration, validation, ThresholdRule(threshold=STOP_NONE), names=names)
    common = {name: getattr(rf, name) for name in _KEPT} | {"expected": None, "offline": None}
    of_models = [{name: getattr(stage, name) for name in Stage.model_fields} for stage in rf.stages]
    stages = tuple(_of_rf(own, stage) for own, stage in zip(of_models, rf.stages, strict=True))
    found = [StackedPolicy(**common, variant="rf", stages=stages)]
    logits = [stage.bounded(logits) for stage, logits in zip(rf.stages, calibration.logits, strict=True)]
    stacking = Stacking(logits, calibration.labels, None if encoded is None else encoded.told)
    chosen = stacking.chosen()
    last = found[0]
    if encoded is not None or not chosen.terms.none:
        fits = zip(of_models, stacking.whole(chosen.terms), strict=True)
        stages = tuple(_stage(own, chosen.terms, fit) for own, fit in fits)
        first = () if encoded is None else (encoded.stage,)
        last = StackedPolicy(**common, variant="stacked", stages=(*first, *stages))
        last = last if encoded is None else last.with_arrays(encoded.experts.arrays)
        found.append(last)
    gains = gains_of(chosen.held_out, calibration.costs.means)
    if len(stages) > 1 and all(gain is not None for gain in gains[:-1]):
        deciding = tuple(stage.model_copy(update={"gain": gain}) for stage, gain in zip(stages, gains, strict=True))
        others = last.stages[: -len(stages)]
        found.append(last.model_copy(update={"variant": "stacked-gain", "stages": (*others, *deciding)}))
    return found


def _of_rf(of_model: dict[str, Any], stage: RFStage) -> StackedStage:
    alpha, beta = stage.alpha, stage.beta
    if alpha is None or beta is None:
        return StackedStage(**of_model, state_weight=None, logit_weight=1 / stage.temperature)
    return StackedStage(**of_model, state_weight=1 / (2 * alpha), logit_weight=1 / (2 * beta * stage.temperature))


def _stage(of_model: dict[str, Any], terms: Terms, fit: _StageFit) -> StackedStage:
    biases = fit.linear.biases.tolist()
    own = tuple(biases.pop(0)) if math.isfinite(terms.bias_precision) else None
    if fit.calibrator is not None:
        of_model = {**of_model, "temperature": fit.calibrator.temperature, "offsets": fit.calibrator.offsets}
    return StackedStage(
        **of_model,
        **dict(zip(fit.names, fit.linear.weights.tolist(), strict=True)),
        answer=terms.answer,
        biases=own,
        matrix=tuple(map(tuple, biases)) if fit.calibrator is not None else None,
    )


@dataclass(frozen=True, slots=True)
class Encoded:
    """What an encoder adds to a cascade: its stage, the experts on its embeddings, and what these tell of the rows."""

    stage: StackedStage
    experts: Experts
    told: Told


class StackedVariants(Variants):
    """A stacked cascade whose variant and threshold are not chosen."""

    def __init__(
        self, policies: Sequence[StackedPolicy], validation: Examples, objective: Objective = "accuracy", note: str = ""
    ) -> None:
        """Measure all variants.   note: for tables."""
        self._policies = policies
        traces = (cascade_of(policy)(validation) for policy in policies)
        points = [trace.frontier(validation.chain, objective) for trace in traces]
        super().__init__(policies.__getitem__, points, note)

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return the variant and threshold that a rule chooses as a policy. Raises ConfigError and BudgetError."""
        if chooses(rule):
            policy = StackedVariants(self._policies, fitting.validation, rule.objective).chosen(rule.budget)
        else:
            policy = without_gain(self._policies)
        return Thresholded.of(policy, fitting).published(fitting, rule)


def fit_method(fitting: Fitting, method: str = "stacked") -> StackedVariants:
    """Fit a stacked cascade for a comparison.   method: by its name; those with experts read embeddings."""
    policies = variants_by_name(method, fitting.calibration, fitting.validation, fitting.names)
    note = "" if method == "stacked" else fitting.calibration.embedding_note
    return StackedVariants(policies, fitting.validation, note=note)


fit_with_competences = partial(fit_method, method="stacked-competence")
fit_with_experts = partial(fit_method, method="stacked-both")


def variants_by_name(
    method: str, calibration: Examples, validation: Examples, names: tuple[str, str] = SPLITS
) -> list[StackedPolicy]:
    """Return variants_of() the method of a name.

    stacked-competence knows from an embedding how competent each model is, stacked-both also which labels are likely.
    """
    if method == "stacked":
        return variants_of(calibration.chain, validation.chain, names)
    assert calibration.embeddings is not None
    chain = calibration.own_chain(calibration.chain.models, encoded=True)
    n_options, with_labels = calibration.chain.logits[0].shape[1], method == "stacked-both"
    experts, told = fit_experts(
        calibration.embeddings, calibration.correct(), calibration.chain.labels, n_options, with_labels=with_labels
    )
    stage = StackedStage(
        name=chain.models[0],
        cost=float(chain.costs.means[0]),
        logit_kind="embedding",
        temperature=1.0,
        diagnostics=None,
        logit_weight=1.0,
    )
    return variants_of(calibration.chain, validation.chain, names, Encoded(stage, experts, told))


def chooses(rule: ThresholdRule) -> bool:
    """Return whether a rule chooses a threshold on validation by its quality."""
    return (rule.threshold, rule.certify, rule.price) == (None, None, None)


def without_gain(policies: Sequence[StackedPolicy]) -> StackedPolicy:
    """Return the last of the variants in which confidences decide: given thresholds are of these."""
    return [one for one in policies if one.variant != "stacked-gain"][-1]


def fit_stacked(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = SPLITS,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> Policy:
    """Fit a stacked cascade on a chain of any length; the variant that is best on validation by the rule.

    Arguments and errors are those of fit_rf; a given threshold is of confidences. calibrator and safe have no choice:
    terms are chosen by cross-validation. Raises ConfigError for other values.
    """
    require_calibrator(calibrator, "stacked", len(calibration.models))
    if safe:
        raise ConfigError("method stacked chooses its own terms by cross-validation: leave safe out")
    policies = variants_of(calibration, validation, names)
    policy: Policy = without_gain(policies)
    if chooses(rule) and validation is not None:
        validation.require_labels("choosing a threshold")
        assert isinstance(validation, ChainLogits)
        policy = StackedVariants(policies, Examples(validation), rule.objective).chosen(rule.budget)
    with_budget = policy.model_copy(update={"budget": rule.budget})
    return choose_threshold(with_budget, calibration, validation, rule)
