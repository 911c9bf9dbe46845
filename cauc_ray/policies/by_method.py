"""Fits of policies by the name of their method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from cauc_ray.errors import ConfigError, PolicyError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.numbers.segments import Segments
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import OURS, Fit, Method, method_named
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.safe import fit_safe
from cauc_ray.policies.threshold import ThresholdRule

# Every model of a chain by itself: methods that are named single:<model>.
SINGLE = "single"


def fit_policy(
    method: str,
    calibration: Chain,
    validation: Chain | None,
    rule: ThresholdRule,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> Policy:
    """Fit a policy of one of our methods by its name. Raises ConfigError for others.

    Args:
        method: Name of the method.
        calibration: As of fit_base.
        validation: As of fit_base.
        rule: As of fit_base.
        names: As of fit_base.
        calibrator: As of fit_base.
        safe: Whether to fit as fit_safe does, compared with single models.
    """
    registered = method_named(method)
    if registered.policy is None:
        chosen = [name for name, of in OURS.items() if of.policy is not None]
        raise ConfigError(unknown_name("method", method, chosen))
    registered.require_calibrator(calibrator, len(calibration.models))
    fit: Fit = partial(registered.policy, names=names, calibrator=calibrator)
    return (partial(fit_safe, fit) if safe else fit)(calibration, validation, rule)


def fit_method(name: str, fitting: Fitting, rule: ThresholdRule) -> Policy:
    """Fit a policy by one of the methods that ours are compared with. Raises ConfigError if it has no policy file.

    If a risk is certified on validation, these methods choose their other numbers on halves of calibration.
    """
    method = method_of(name, fitting.calibration.chain.models)
    splits = fitting.without_validation() if rule.certify is not None and method.paradigm != "ours" else fitting
    return method.family(splits).published(fitting, rule)


def method_of(name: str, models: Sequence[str]) -> Method:
    """Return a method by its name, single:<model> among them.

    Raises ConfigError for an unknown name, or if the method's packages are not installed.
    """
    kind, is_single, model = name.partition(":")
    if is_single and kind == SINGLE:
        if model not in models:
            raise ConfigError(unknown_name("model", model, models))
        return Method(name, "single-model", partial(fit_single, model=models.index(model)))
    return method_named(name)


def refit(policy: Policy, calibration: Chain, validation: Chain | None, segments: Sequence[Segments] = ()) -> Policy:
    """Fit a policy by another one's rule, on a chain in which models were replaced.

    A given threshold stays; a chosen one is chosen again by the same rule; a safe policy is fitted as a safe one
    again. Fits are deterministic: every number that does not depend on a replaced model stays equal to the bit.
    Raises PolicyError if the calibration examples are not those of the policy.

    Args:
        policy: Policy whose rule decides.
        calibration: Examples that it was fitted on.
        validation: Examples that it was chosen on.
        segments: Of both, where its certificate holds in each.
    """
    if policy.calibration.examples_fingerprint != calibration.examples_fingerprint():
        raise PolicyError(
            f"{calibration.source} has other calibration examples than the policy was fitted on; fit a new policy"
        )
    if policy.scored or policy.encoder is not None:
        raise PolicyError(f"a policy of method {policy.method} is fitted anew, not refitted: use cauc_ray.fit")
    choice = policy.threshold_choice
    rule = ThresholdRule(budget=policy.budget, objective=choice.objective or "accuracy", confidence=choice.confidence)
    if choice.rule == "given":
        rule = ThresholdRule(threshold=float(np.max(policy.threshold, initial=0.0)))
    elif choice.price is not None:
        rule = ThresholdRule(price=choice.price)
    elif choice.certificate is not None:
        rule = ThresholdRule(
            certify=RiskLimit(choice.certificate.risk, choice.certificate.confidence), segments=tuple(segments)
        )
    rule = replace(rule, compare="gain" if isinstance(policy.threshold, tuple) else "confidence")
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    safe = policy.safe is not None
    return fit_policy(policy.method, calibration, validation, rule, names, calibrator=policy.calibrator_kind, safe=safe)
