"""The methods by name: the values of `--methods`, and which policy files there are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from cauc_ray.errors import ConfigError, PolicyError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.chain import Chain
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Method, Thresholded
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.policy_file import POLICY_CLASSES
from cauc_ray.policies.safe import Fit, fit_safe
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import PolicyCascade

_OURS = "cauc_ray.policies.methods"
_OTHERS = "cauc_ray.policies.baselines"
_SKLEARN: dict[str, Any] = {"packages": ("sklearn",), "extra": "baselines"}
_TORCH: dict[str, Any] = {"packages": ("torch", "sklearn"), "extra": "baselines"}
_TEXTS: dict[str, Any] = {"packages": ("torch", "transformers"), "extra": "text-routers", "needs_texts": True}

# In the order of tables.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("base", "ours", f"{_OURS}:fit_cauc_base"),
        Method("rf", "ours", f"{_OURS}:fit_cauc_rf"),
        Method("duo", "ensemble", f"{_OTHERS}.simple:fit_duo"),
        Method("frugalgpt", "cascade", f"{_OTHERS}.frugalgpt:fit_frugalgpt", **_SKLEARN),
        Method("margin", "cascade", f"{_OTHERS}.simple:fit_margin"),
        Method("post-hoc-embed", "cascade", f"{_OTHERS}.post_hoc_embed:fit_post_hoc_embed", **_TORCH),
        Method("routerdc", "router", f"{_OTHERS}.routerdc:fit_routerdc", **_TORCH),
        Method("benchmark-routing", "router", f"{_OTHERS}.benchmark_routing:fit_benchmark_routing", **_SKLEARN),
        Method("routellm-mf", "router", f"{_OTHERS}.routellm:fit_routellm_mf", **_TORCH),
        Method("routellm-sw", "router", f"{_OTHERS}.routellm:fit_routellm_sw", **_TORCH),
        Method("routellm-bert", "router", "cauc_ray.text_routers.routellm:fit_routellm_bert", **_TEXTS),
        Method("routellm-causal", "router", "cauc_ray.text_routers.routellm:fit_routellm_causal", **_TEXTS),
        Method("graphrouter", "router", f"{_OTHERS}.graphrouter:fit_graphrouter", **_TORCH),
        Method("embedllm", "router", f"{_OTHERS}.embedllm:fit_embedllm", **_TORCH),
        Method("random", "control", f"{_OTHERS}.controls:fit_random", spends_budget=True),
        Method("shuffled", "control", f"{_OTHERS}.controls:fit_shuffled", spends_budget=True),
        Method("max-probability", "control", f"{_OTHERS}.simple:fit_max_probability"),
        Method("oracle", "control", f"{_OTHERS}.controls:fit_oracle", sees_labels=True),
    )
}


def fit_cauc_base(fitting: Fitting) -> Fitted:
    """Fit Base, whose threshold without a budget is the last model's calibration accuracy (paper, eq. 5)."""
    policy = fit_base(fitting.calibration.chain)
    return Thresholded(PolicyCascade(policy), fitting.validation, given=policy.threshold)


def fit_cauc_rf(fitting: Fitting) -> Fitted:
    """Fit RF, whose threshold is the best on validation, within the budget where there is one (paper, eq. 11)."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Thresholded(PolicyCascade(policy), fitting.validation)


def method_named(name: str) -> Method:
    """Return a method by its name. Raises ConfigError for a name that is not known, or where its packages are not."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    method = METHODS[name]
    if method.absent:
        raise ConfigError(f"method {name!r} needs {', '.join(method.absent)}: pip install 'cauc-ray[{method.extra}]'")
    return method


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
    """Fit a policy by its method's name. Raises ConfigError where the method has no policy file.

    safe: whether it is compared with single models, as fit_safe does. The other arguments are those of fit_base.
    """
    if method not in POLICY_CLASSES:
        raise ConfigError(unknown_name("method", method, POLICY_CLASSES))
    fit: Fit = partial(fit_base if method == "base" else fit_rf, names=names, calibrator=calibrator)
    return (partial(fit_safe, fit) if safe else fit)(calibration, validation, rule)


def refit(policy: Policy, calibration: Chain, validation: Chain | None) -> Policy:
    """Fit a policy by another one's rule, on a chain in which models were replaced.

    A threshold that was given stays; one that was chosen is chosen again, by the same rule; a safe policy is guarded
    again. Fits are deterministic: every number that does not depend on a replaced model stays equal to the bit.
    Raises PolicyError where the calibration examples are not those of the policy.
    """
    if policy.calibration.examples_fingerprint != calibration.examples_fingerprint():
        raise PolicyError(
            f"{calibration.source} holds other calibration examples than the policy was fitted on; fit a new policy"
        )
    choice = policy.threshold_choice
    rule = ThresholdRule(budget=policy.budget, objective=choice.objective or "accuracy")
    if choice.rule == "given":
        rule = ThresholdRule(threshold=policy.threshold)
    elif choice.certificate is not None:
        rule = ThresholdRule(certify=RiskLimit(choice.certificate.risk, choice.certificate.confidence))
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    kind, safe = policy.calibrator_kind, policy.safe is not None
    return fit_policy(policy.method, calibration, validation, rule, names, calibrator=kind, safe=safe)
