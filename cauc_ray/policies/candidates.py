"""Stacked cascades with their operating points on validation, among which a budget chooses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.gains import Gains
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.sweep import STOP_NONE, Frontier, OperatingPoints
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.fitting import calibrated_models, split_entries
from cauc_ray.policies.methods import Curve, Fitting, cascade_of, curve_of
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.stacked import StackedPolicy, StackedStage
from cauc_ray.policies.stacking import PENALTIES, PLAIN, Stacking
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Answers, Examples, Trace, places_in


@dataclass(frozen=True)
class Candidate:
    """A fitted cascade without chosen thresholds.

    Attributes:
        policy: At thresholds that no row reaches.
        gains: By which a price chooses its thresholds.
        splits: What it was fitted on, and where its operating points are measured; None without validation.
    """

    policy: StackedPolicy
    gains: Gains
    splits: tuple[Examples, Examples | None]

    @property
    def validation(self) -> Examples:
        """Return the validation split."""
        assert self.splits[1] is not None
        return self.splits[1]

    @cached_property
    def trace(self) -> Trace:
        """Return its answers on validation, ordered by their worth."""
        trace = cascade_of(self.policy)(self.validation)
        return replace(trace, worth=self.gains.worth(trace.confidences))

    @cached_property
    def points(self) -> Frontier:
        """Return its operating points by accuracy, by falling price."""
        return self.trace.frontier(self.validation.chain)

    @cached_property
    def schedule(self) -> Floats:
        """Return its thresholds at every point, float64 (P, S - 1)."""
        return self.gains.between(self.points.settings, self.trace.confidences)

    def published(self, rule: ThresholdRule) -> StackedPolicy:
        """Return it at the thresholds that a rule chooses. Raises as choose_threshold does."""
        encoded = self.policy.encoder is not None
        names = [stage.name for stage in self.policy.answering]
        calibration, validation = (
            None if split is None else split.own_chain(names, encoded=encoded) for split in self.splits
        )
        assert calibration is not None
        policy = self.policy.model_copy(update={"budget": rule.budget})
        return choose_threshold(policy, calibration, validation, rule, gains=self.gains)


class Candidates:
    """A method that has several cascades; a setting is an index of an operating point of one of them."""

    def __init__(self, candidates: Sequence[Candidate], note: str = "") -> None:
        """Join their operating points.   note: for tables."""
        self.candidates, self.note = candidates, note
        sizes = [len(candidate.points.cost) for candidate in candidates]
        self._owners = np.repeat(np.arange(len(sizes)), sizes)
        self._places = np.concatenate([np.arange(size) for size in sizes])
        cost, quality = (
            np.concatenate([getattr(candidate.points, name) for candidate in candidates])
            for name in ("cost", "quality")
        )
        unit = candidates[0].points.unit
        self.points = OperatingPoints(np.arange(len(cost), dtype=np.float64), cost, quality, unit)

    @property
    def default(self) -> float:
        """Return the best point."""
        return float(self.points.index_of_best())

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        candidate = self.candidates[int(self._owners[int(setting)])]
        thresholds = tuple(candidate.schedule[self._places[int(setting)]].tolist())
        return cascade_of(candidate.policy)(examples).answers(thresholds)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples, those of a candidate by one sweep."""
        at = settings.astype(np.int64)
        measured = np.empty((4, len(at)))
        for owner in np.unique(self._owners[at]).tolist():
            candidate, rows = self.candidates[owner], np.flatnonzero(self._owners[at] == owner)
            trace = cascade_of(candidate.policy)(examples)
            trace = replace(trace, worth=places_in(candidate.schedule, trace.confidences))
            figures = curve_of(trace, examples.chain, self._places[at[rows]].astype(np.float64))
            measured[:, rows] = figures.cost, figures.accuracy, figures.macro_f1, figures.last_share
        return Curve(settings, *measured)

    def best(self, rule: ThresholdRule) -> Candidate:
        """Return the candidate that has the best point on validation by a rule; the first where that chooses none.

        Raises BudgetError.
        """
        if (rule.threshold, rule.certify, rule.price) != (None, None, None):
            return self.candidates[0]
        points = self.points
        if rule.objective != "accuracy":
            frontiers = [one.trace.frontier(one.validation.chain, rule.objective) for one in self.candidates]
            points = replace(points, quality=np.concatenate([frontier.quality for frontier in frontiers]))
        return self.candidates[int(self._owners[points.index_of_best(rule.budget)])]

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return the candidate and thresholds that a rule chooses as a policy. Raises ConfigError and BudgetError."""
        return self.best(rule).published(rule)


class StackedFits:
    """Fits of stacked cascades to chains of some models, which share what they begin with.

    Args:
        calibration: To fit on; with embeddings, cascades begin with their encoder if these explain the labels.
        validation: Where operating points are measured; None without.
        names: Of the two splits.
    """

    def __init__(
        self, calibration: Examples, validation: Examples | None, names: tuple[str, str] = ("calibration", "validation")
    ) -> None:
        """Calibrate the models, and fit the classifier of embeddings."""
        self._splits, self._names = (calibration, validation), names
        chain, embeddings = calibration.chain, calibration.embeddings
        self._entries = calibrated_models(chain)
        logits = [Stage(**entry).bounded(logits) for entry, logits in zip(self._entries, chain.logits, strict=True)]
        self._plain = self._ridged = Stacking(logits, chain.labels)
        self._classifier = None
        if embeddings is not None:
            n_options = max(own.shape[1] for own in logits)
            classifier = fit_classifier(np.asarray(embeddings, dtype=np.float64), chain.labels, n_options)
            if classifier.explains:
                self._classifier = classifier
                self._ridged = Stacking(logits, chain.labels, classifier.held_out)

    def candidates(self, models: Sequence[int] | None = None) -> list[Candidate]:
        """Fit a chain: the one that cross-validation chooses, and CAUC-RF if that is another.

        models: by index; all without it.
        """
        models = range(len(self._entries)) if models is None else models
        ridged = self._candidate(self._ridged, models, PENALTIES)
        found = [ridged]
        if ridged.policy.encoder is not None or any(stage.penalty is not None for stage in ridged.policy.stages):
            found.append(self._candidate(self._plain, models, PLAIN))
        return found

    def _candidate(self, stacking: Stacking, models: Sequence[int], penalties: Sequence[float]) -> Candidate:
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
            stages.insert(0, _encoder(chain))
        common = split_entries(chain, chosen_on, self._names, BY_DEFAULT)
        policy = StackedPolicy(**common | {"threshold": (STOP_NONE,) * (len(models) - 1)}, stages=tuple(stages))
        if classifier is not None:
            policy = policy.with_arrays({"weights": classifier.weights.T, "offsets": classifier.offsets})
        return Candidate(policy, gains, self._splits)


def _encoder(chain: ChainLogits) -> StackedStage:
    return StackedStage(
        name=chain.models[0],
        cost=float(chain.costs.means[0]),
        logit_kind="embedding",
        temperature=1.0,
        diagnostics=None,
        logit_weight=1.0,
    )


def fit_method(fitting: Fitting) -> Candidates:
    """Fit a stacked cascade, for a comparison or with embeddings."""
    note = "" if fitting.calibration.embeddings is None else fitting.calibration.embedding_note
    fits = StackedFits(fitting.calibration, fitting.validation, fitting.names)
    return Candidates(fits.candidates(), note)


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

    Arguments and errors are those of fit_rf; a threshold may be given for two models at most. calibrator and safe have
    no choice: penalties are chosen by cross-validation. Raises ConfigError for other values.
    """
    require_calibrator(calibrator, "stacked", len(calibration.models))
    if safe:
        raise ConfigError("method stacked has CAUC-RF among its candidates: leave safe out")
    if not isinstance(calibration, ChainLogits):
        raise ConfigError("method stacked needs all logits in one process; leave shards out")
    assert validation is None or isinstance(validation, ChainLogits)
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)
    chosen_on = None if validation is None else Examples(validation)
    candidates = StackedFits(Examples(calibration), chosen_on, names).candidates()
    if validation is None or not validation.labelled.all():
        return candidates[0].published(rule)
    return Candidates(candidates).best(rule).published(rule)
