"""What fits of methods share: their input, calibrated models, and the entries of their policies.

A fit takes calibration logits, and validation logits where a threshold is chosen on them. Both may be split
into parts, which a fit asks for sums and, on validation, for each row's answers. A fit is deterministic: the same data
give the same numbers to the bit, whatever the other models of the chain are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from cauc_ray.errors import warn
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.intervals import signs_of
from cauc_ray.numbers.logits import VECTOR_KINDS, joint_kind
from cauc_ray.numbers.sweep import STOP_NONE, Objective
from cauc_ray.policies.calibrated import AnswerSums, CalibratorFit, calibrator_of, sum_answers
from cauc_ray.policies.evidence import FittedOn, TemperatureDiagnostics, ThresholdChoice
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule
from cauc_ray.policies.trace import Examples, answers_alone, trace_policy

AnyMethodPolicy = TypeVar("AnyMethodPolicy", bound=Policy)


def fusion_gains(policy: Policy, validation: Chain) -> bool:
    """Return whether the last stage's fused answers are significantly better on validation than its unfused ones.

    Args:
        policy: A policy that fuses.
        validation: Logits of the policy's models, all rows labelled.
    """
    fused = trace_policy(policy, validation).predictions[:, -1]
    last = policy.model_copy(update={"stages": policy.stages[-1:]})
    unfused = answers_alone(last, validation.of_models([len(policy.stages) - 1]))[:, 0]
    return signs_of(fused == validation.labels, unfused == validation.labels).gains


def require_fit(calibration: Chain) -> None:
    """Raise DataError unless all rows have labels; warn if costs do not rise."""
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)


def calibrate(calibration: Chain, index: int, kind: CalibratorKind) -> CalibratorFit:
    """Fit a model's calibrator, with a warning if it is clamped or has a floor."""
    fit, name = calibrator_of(calibration, index, kind), calibration.models[index]
    if fit.floor is not None:
        warn(f"{calibration.source}: model {name!r}: {fit.floor}")
    if fit.temperature.status is not FitStatus.CONVERGED:
        warn(
            f"{calibration.source}: model {name!r} is {fit.temperature.status} on its {len(calibration)} examples; its "
            f"temperature is set to {fit.calibrator.temperature:.3g}"
        )
    return fit


def model_entries(calibration: Chain, index: int, fit: CalibratorFit, sums: AnswerSums) -> dict[str, Any]:
    """Return the entries of a model that all policies have."""
    calibrator = fit.calibrator
    return {
        "name": calibration.models[index],
        "cost": float(calibration.costs.means[index]),
        "logit_kind": calibration.logit_kinds[index],
        "floor": calibrator.floor,
        "temperature": calibrator.temperature,
        "offsets": calibrator.offsets,
        "isotonic": calibrator.isotonic,
        "diagnostics": TemperatureDiagnostics(
            **fit.temperature.diagnostics(),
            calibration_error_before=sums.before.error,
            calibration_error_after=sums.after.error,
            accuracy=sums.accuracy,
            logits_fingerprint=calibration.logits_fingerprint(index),
        ),
    }


def split_entries(
    calibration: Chain, validation: Chain | None, names: tuple[str, str], rule: ThresholdRule
) -> dict[str, Any]:
    """Return a policy's entries on its splits, with a threshold that no example reaches and no measurements yet."""
    return {
        "cost_unit": calibration.costs.unit,
        "costs": "per-call" if calibration.per_call_costs else "per-model",
        "threshold": STOP_NONE,
        "threshold_choice": ThresholdChoice(rule="given", objective=None, split=None),
        "budget": rule.budget,
        "logit_kind": joint_kind([kind for kind in calibration.logit_kinds if kind != "embedding"]),
        "calibration": _fitted_on(calibration, names[0]),
        "validation": _fitted_on(validation, names[1]) if validation is not None else None,
        "expected": None,
    }


def entries_of_models(calibration: ChainLogits, *, warns: bool = False) -> list[dict[str, Any]]:
    """Return the entries of all models of a chain; encoders, and answers in words, have no logits to calibrate.

    Args:
        calibration: Labelled examples.
        warns: Whether to warn of each model that is clamped or has a floor.
    """
    entries, fit = list[dict[str, Any]](), calibrate if warns else calibrator_of
    for index, (name, kind) in enumerate(zip(calibration.models, calibration.logit_kinds, strict=True)):
        if kind in VECTOR_KINDS:
            encoder = {"name": name, "cost": float(calibration.costs.means[index]), "logit_kind": kind}
            entries.append({**encoder, "temperature": 1.0, "diagnostics": None})
            continue
        fitted = fit(calibration, index, "temperature")
        (sums,) = sum_answers(calibration, {index: fitted.calibrator}).values()
        entries.append(model_entries(calibration, index, fitted, sums))
    return entries


def _fitted_on(chain: Chain, split: str) -> FittedOn:
    return FittedOn(split=split, n=len(chain), examples_fingerprint=chain.examples_fingerprint())


@dataclass(frozen=True, slots=True)
class Fitting:
    """The input of a method's fit.

    Attributes:
        calibration: Split to fit numbers on.
        validation: Split to choose thresholds, epochs and sizes on.
        seed: Random seed.
        checkpoint: Model that some methods train on texts, a hub id or a folder.
        shared: Cache of intermediate results, reused by later fits, by name.
        names: Names of the two splits.
        training: Split that methods that learn are fitted on in place of calibration; None without one.
        objective: What auto chooses chains by.
        recorded: The splits that policies name, if not these.
    """

    calibration: Examples
    validation: Examples
    seed: int = 0
    checkpoint: str | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, str] = ("calibration", "validation")
    training: Examples | None = None
    objective: Objective = "accuracy"
    recorded: Fitting | None = None

    def without_validation(self) -> Fitting:
        """Return the input of fits that leave validation for tests: random halves of calibration."""
        order = np.random.default_rng(self.seed).permutation(len(self.calibration))
        first, second = (self.calibration.of_rows(np.sort(half)) for half in np.array_split(order, 2))
        return replace(self, calibration=first, validation=second, recorded=self)

    def for_learning(self) -> Fitting:
        """Return the input of a method that learns: its calibration split is the training split, if there is one."""
        return self if self.training is None else replace(self, calibration=self.training, training=None)

    def diagnose(self) -> None:
        """Measure the models' entries in policies once, for the fits of all methods."""
        self._entries(self.calibration, self.calibration.chain)

    def _entries(self, examples: Examples, chain: ChainLogits) -> list[dict[str, Any]]:
        """Return the entries of a chain's models in policies; `examples` is the key of their cache."""
        recorded = self.shared.setdefault(f"entries {id(examples)}", {})
        for model, name in enumerate(chain.models):
            if name not in recorded:
                (recorded[name],) = entries_of_models(chain.of_models([model]))
        costs = zip(chain.models, chain.costs.means.tolist(), strict=True)
        return [{**recorded[name], "cost": cost} for name, cost in costs]

    def policy(
        self,
        kind: type[AnyMethodPolicy],
        models: Sequence[int] | None = None,
        *,
        encoded: bool = False,
        of_stages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> AnyMethodPolicy:
        """Return a policy of some of the models, at a threshold that no row reaches.

        Args:
            kind: Class of the policy.
            models: Indices of the models; None for all.
            encoded: Whether the encoder is its first stage.
            of_stages: Fields of each model's stage that only this method has.
            **fields: Fields of the policy that only this method has.
        """
        splits, every = self.recorded or self, self.calibration.chain.models
        names = every if models is None else [every[model] for model in models]
        calibration = splits.calibration.own_chain(names, encoded=encoded)
        validation = splits.validation.own_chain(names, encoded=encoded)
        stage_fields: list[Mapping[str, Any]] = [*[{}] * encoded, *(of_stages or [{}] * len(names))]
        entries = self._entries(splits.calibration, calibration)
        fields["stages"] = [{**entry, **more} for entry, more in zip(entries, stage_fields, strict=True)]
        return kind(**split_entries(calibration, validation, self.names, BY_DEFAULT), **fields)
