"""The methods by name: what `--methods` may say, and which policy files there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import POLICY_CLASSES, Policy
from cauc_ray.policies.threshold import ThresholdRule

_OURS = "cauc_ray.policies.cauc"
_OTHERS = "cauc_ray.policies.baselines"
_SKLEARN: dict[str, Any] = {"packages": ("sklearn",), "extra": "baselines"}
_TORCH: dict[str, Any] = {"packages": ("torch", "sklearn"), "extra": "baselines"}
_GRAPH: dict[str, Any] = {"packages": ("torch", "torch_geometric"), "extra": "baselines"}
_TEXTS: dict[str, Any] = {"packages": ("torch", "transformers"), "extra": "transformers", "needs_texts": True}

# In the order of tables.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("base", "ours", f"{_OURS}:fit_cauc_base"),
        Method("rf", "ours", f"{_OURS}:fit_cauc_rf"),
        Method("duo", "ensemble", f"{_OTHERS}.duo:fit_duo"),
        Method("frugalgpt", "cascade", f"{_OTHERS}.frugalgpt:fit_frugalgpt", **_SKLEARN),
        Method("margin", "cascade", f"{_OTHERS}.confidence:fit_margin"),
        Method("post-hoc-embed", "cascade", f"{_OTHERS}.post_hoc_embed:fit_post_hoc_embed", **_TORCH),
        Method("routerdc", "router", f"{_OTHERS}.routerdc:fit_routerdc", **_TORCH),
        Method("benchmark-routing", "router", f"{_OTHERS}.benchmark_routing:fit_benchmark_routing", **_SKLEARN),
        Method("routellm-mf", "router", f"{_OTHERS}.routellm:fit_routellm_mf", **_TORCH),
        Method("routellm-sw", "router", f"{_OTHERS}.routellm:fit_routellm_sw", **_TORCH),
        Method("routellm-bert", "router", f"{_OTHERS}.routellm_text:fit_routellm_bert", **_TEXTS),
        Method("routellm-causal", "router", f"{_OTHERS}.routellm_text:fit_routellm_causal", **_TEXTS),
        Method("graphrouter", "router", f"{_OTHERS}.graphrouter:fit_graphrouter", **_GRAPH),
        Method("embedllm", "router", f"{_OTHERS}.embedllm:fit_embedllm", **_TORCH),
        Method("random", "control", f"{_OTHERS}.controls:fit_random", spends_budget=True),
        Method("shuffled", "control", f"{_OTHERS}.controls:fit_shuffled", spends_budget=True),
        Method("max-probability", "control", f"{_OTHERS}.confidence:fit_max_probability"),
        Method("oracle", "control", f"{_OTHERS}.controls:fit_oracle", sees_labels=True),
    )
}


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
    previous: Policy | None = None,
) -> Policy:
    """Fit a policy by its method's name. Raises ConfigError where the method has no policy file.

    The other arguments are those of fit_base and fit_rf.
    """
    if method not in POLICY_CLASSES:
        raise ConfigError(unknown_name("method", method, POLICY_CLASSES))
    if method == "base":
        of_base = previous if isinstance(previous, BasePolicy) else None
        return fit_base(calibration, validation, rule, names=names, calibrator=calibrator, previous=of_base, safe=safe)
    of_rf = previous if isinstance(previous, RFPolicy) else None
    return fit_rf(calibration, validation, rule, names=names, calibrator=calibrator, previous=of_rf, safe=safe)
