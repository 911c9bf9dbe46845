"""The methods by name: what `--methods` may say, and which policy files there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.policies.cascade import Cascade, PolicyCascade
from cauc_ray.policies.fitting import ThresholdRule, fit_base, fit_rf
from cauc_ray.policies.margin import MarginSampling
from cauc_ray.policies.policy import POLICY_CLASSES, Policy

# Fit a method on calibration logits alone; its threshold stays open, for a sweep to set.
METHODS: Mapping[str, Callable[[ChainLogits], Cascade]] = {
    "base": lambda calibration: PolicyCascade(fit_base(calibration)),
    "rf": lambda calibration: PolicyCascade(fit_rf(calibration, rule=ThresholdRule(threshold=1.0))),
    "margin": lambda calibration: MarginSampling(),
}


def fit_method(name: str, calibration: ChainLogits) -> Cascade:
    """Fit a method by its name. Raises ConfigError for a name that is not known."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    return METHODS[name](calibration)


def fit_policy(
    method: str,
    calibration: ChainLogits,
    validation: ChainLogits | None,
    rule: ThresholdRule,
    names: tuple[str, str],
) -> Policy:
    """Fit a policy by its method's name. Raises ConfigError where the method has no policy file."""
    if method not in POLICY_CLASSES:
        raise ConfigError(unknown_name("method", method, POLICY_CLASSES))
    fit = fit_base if method == "base" else fit_rf
    return fit(calibration, validation, rule, names=names)
