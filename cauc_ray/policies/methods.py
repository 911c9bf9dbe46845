"""The methods by name: what `--methods` may say, and which policy files there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.policies.fitting import ThresholdRule, fit_base, fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Method, Steered
from cauc_ray.policies.policy import POLICY_CLASSES, Policy
from cauc_ray.policies.trace import PolicyCascade


def _base(fitting: Fitting) -> Fitted:
    policy = fit_base(fitting.calibration.chain)
    return Steered(PolicyCascade(policy), fitting.validation, given=policy.threshold)


def _rf(fitting: Fitting) -> Fitted:
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Steered(PolicyCascade(policy), fitting.validation)


def _fit_of(module: str, function: str) -> Callable[[Fitting], Fitted]:
    """Return a fit that is imported when it is first wanted: some take torch or scikit-learn along."""

    def fit(fitting: Fitting) -> Fitted:
        found: Fitted = getattr(import_module(f"cauc_ray.policies.baselines.{module}"), function)(fitting)
        return found

    return fit


_TORCH = {"packages": ("torch",), "extra": "baselines"}
_SKLEARN = {"packages": ("sklearn",), "extra": "baselines"}

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("base", "ours", _base),
        Method("rf", "ours", _rf),
        Method("duo", "ensemble", _fit_of("duo", "fit_duo")),
        Method("margin", "cascade", _fit_of("confidence", "fit_margin")),
        Method("max-probability", "control", _fit_of("confidence", "fit_max_probability")),
        Method("random", "control", _fit_of("controls", "fit_random")),
        Method("shuffled", "control", _fit_of("controls", "fit_shuffled")),
        Method("oracle", "control", _fit_of("controls", "fit_oracle"), sees_labels=True),
    )
}


def method_named(name: str) -> Method:
    """Return a method by its name. Raises ConfigError for a name that is not known, or where its packages are not."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    method = METHODS[name]
    absent = absent_packages(method)
    if absent:
        raise ConfigError(f"method {name!r} needs {', '.join(absent)}: pip install 'cauc-ray[{method.extra}]'")
    return method


def absent_packages(method: Method) -> list[str]:
    """Return what a method imports and is not installed."""
    return [package for package in method.packages if find_spec(package) is None]


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
