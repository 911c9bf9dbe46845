"""The methods by name: the values of `--methods`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.method import Fitted, Fitting, Method, Thresholded
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
