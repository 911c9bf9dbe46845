"""Fits of stacked cascades to chains of some models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import calibrated_models, split_entries
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.stacked import StackedPolicy, StackedStage
from cauc_ray.policies.stacking import PENALTIES, PLAIN, Stacking
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Examples


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
        self._entries = calibrated_models(chain)
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
            stages.insert(0, _encoder(chain))
        common = split_entries(chain, chosen_on, self._names, BY_DEFAULT)
        common["threshold"] = (STOP_NONE,) * (len(models) - 1)
        policy = StackedPolicy(**common, stages=tuple(stages), gains=gains)
        if classifier is not None:
            policy = policy.with_arrays({"weights": classifier.weights.T, "offsets": classifier.offsets})
        return policy


def _encoder(chain: ChainLogits) -> StackedStage:
    return StackedStage(
        name=chain.models[0],
        cost=float(chain.costs.means[0]),
        logit_kind="embedding",
        temperature=1.0,
        diagnostics=None,
        logit_weight=1.0,
    )


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
    require_calibrator(calibrator, "stacked", len(calibration.models))
    if safe:
        raise ConfigError("method stacked has CAUC-RF among its candidates: leave safe out")
    if not isinstance(calibration, ChainLogits):
        raise ConfigError("method stacked needs all logits in one process; leave shards out")
    assert validation is None or isinstance(validation, ChainLogits)
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)
    chosen_on = None if validation is None else Examples(validation)
    policies = StackedFits(Examples(calibration), chosen_on, names).candidates()
    if validation is None or chosen_on is None or not validation.labelled.all():
        policy = policies[0].model_copy(update={"budget": rule.budget})
        return choose_threshold(policy, calibration, validation, rule)
    return Family(policies, chosen_on).choose(Examples(calibration), rule)
