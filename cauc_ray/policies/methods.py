"""The methods by name, the values of `--methods`, and the protocol that they share.

A method is fitted on two splits, chooses a setting for a budget, and answers on a third.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.sweep import Objective, OperatingPoints, reached_shares
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.fitting import entries_of_models, fit_base, fit_rf, split_entries
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.scored import MethodPolicy
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Answers, Examples, Trace, trace_policy, with_embedding_paid

Paradigm: TypeAlias = Literal["single-model", "ours", "ensemble", "cascade", "router", "recalibrated", "control"]

AnyMethodPolicy = TypeVar("AnyMethodPolicy", bound=MethodPolicy)

# A method's answers and confidences after each step, without a threshold.
Cascade: TypeAlias = Callable[[Examples], Trace]


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's results on labelled examples at P settings; float64 (P,) each.

    cost: mean per example.   last_share: of the examples, how many called the last model.
    """

    settings: Floats
    cost: Floats
    accuracy: Floats
    macro_f1: Floats
    last_share: Floats


class Fitted(Protocol):
    """A fitted method without a chosen operating point; it must not use labels any more."""

    @property
    def note(self) -> str:
        """Return how it differs from the published method, for tables; empty if it does not."""
        ...

    @property
    def points(self) -> OperatingPoints:
        """Return the validation split's results at every distinct setting."""
        ...

    @property
    def default(self) -> float:
        """Return the setting without a budget."""
        ...

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        ...

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples."""
        ...


@runtime_checkable
class Publishable(Protocol):
    """A fitted method that may also be a policy."""

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return it as a policy, at the setting that a rule chooses.

        fitting: what it was fitted from. Raises ConfigError where the method does not support the rule, and
        BudgetError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fitting:
    """The input of a method's fit.

    calibration: to fit its numbers.   validation: to choose thresholds, epochs and sizes.
    seed: of all random numbers.   checkpoint: the model that some methods train on texts, a hub id or a folder.
    shared: what fits on the same splits need and only the first makes, by name.   names: of the two splits.
    training: what methods that learn are fitted on in place of calibration; None without a split for that.
    objective: what auto chooses chains by.   recorded: what policies say that they were fitted from; None for this.
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
        """Return what to fit from where validation is kept for tests: random halves of calibration."""
        order = np.random.default_rng(self.seed).permutation(len(self.calibration))
        first, second = (self.calibration.of_rows(np.sort(half)) for half in np.array_split(order, 2))
        return replace(self, calibration=first, validation=second, recorded=self)

    def for_learning(self) -> Fitting:
        """Return what a method that learns is fitted from."""
        return self if self.training is None else replace(self, calibration=self.training, training=None)

    def diagnose(self) -> None:
        """Measure what policies of all methods record of the models, which is then not measured by their fits."""
        self._entries(self.calibration, self.calibration.chain)

    def _entries(self, examples: Examples, chain: ChainLogits) -> list[dict[str, Any]]:
        """Return what policies record of the models of a chain, with the logits of some examples."""
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

        models: by index; all without it.   encoded: whether the encoder is its first stage.   of_stages: what each
        model's stage has of its own.   fields: what the policy has.
        """
        of, every = self.recorded or self, self.calibration.chain.models
        names = every if models is None else [every[model] for model in models]
        calibration = of.calibration.own_chain(names, encoded=encoded)
        validation = of.validation.own_chain(names, encoded=encoded)
        own: list[Mapping[str, Any]] = [*[{}] * encoded, *(of_stages or [{}] * len(names))]
        entries = self._entries(of.calibration, calibration)
        fields["stages"] = [{**entry, **more} for entry, more in zip(entries, own, strict=True)]
        return kind(**split_entries(calibration, validation, self.names, BY_DEFAULT), **fields)


@dataclass(frozen=True, slots=True)
class Method:
    """A method by its name.

    paradigm: as the paper's tables group methods.   where: "module:function" that fits it from a Fitting.
    packages: those it imports in addition to cauc-ray's own.   extra: the extra of cauc-ray that installs them.
    needs_texts: it trains on the queries' texts, from a checkpoint.   needs_embedding: it cannot do without the
    queries' embeddings.   needs_hidden: it reads the hidden states of each model of the chain but the last.
    spends_budget: at a budget it chooses the most expensive point within it, not the best.
    sees_labels: it uses the labels, as an upper bound for all methods.   unpublished: why no policy can do the same,
    empty if one can.
    """

    name: str
    paradigm: Paradigm
    where: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    needs_texts: bool = False
    needs_embedding: bool = False
    needs_hidden: bool = False
    spends_budget: bool = False
    sees_labels: bool = False
    unpublished: str = ""

    @property
    def learns(self) -> bool:
        """Return whether it trains more than temperatures and thresholds."""
        return self.paradigm == "router" or bool(self.packages)

    @property
    def absent(self) -> list[str]:
        """Return its packages that are not installed."""
        return [package for package in self.packages if find_spec(package) is None]

    def load(self) -> Callable[[Fitting], Fitted]:
        """Return the function that fits it, importing its packages, such as torch."""
        module, _, function = self.where.partition(":")
        fit: Callable[[Fitting], Fitted] = getattr(import_module(module), function)
        return fit

    def setting(self, fitted: Fitted, budget: float, points: OperatingPoints | None = None) -> float | None:
        """Return its setting for a budget, a mean cost per example on validation; None if it has only one.

        points: to choose among, in place of its own.
        Raises BudgetError if no point is within the budget.
        """
        points = points or fitted.points
        if self.sees_labels or len(points.settings) == 1:
            return None
        point = points.index_of_most_expensive(budget) if self.spends_budget else points.index_of_best(budget)
        return float(points.settings[point])


@dataclass(frozen=True)
class Thresholded:
    """A fitted method with one threshold that is not chosen yet.

    given: the threshold without a budget; None for the best on validation.   policy: whose steps the cascade's are, at
    any threshold; None where no policy can do the same.
    """

    cascade: Cascade
    validation: Examples
    given: float | None = None
    note: str = ""
    sees_labels: bool = False
    policy: Policy | None = None

    @classmethod
    def of(cls, policy: Policy, fitting: Fitting, given: float | None = None, note: str = "") -> Thresholded:
        """Return a fitted policy without a chosen threshold."""
        return cls(cascade_of(policy), fitting.validation, given, note, policy=policy)

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return the policy at the threshold that a rule chooses. Raises ConfigError and BudgetError."""
        assert self.policy is not None
        if rule == BY_DEFAULT and self.given is not None:
            rule = ThresholdRule(threshold=self.given)
        encoded = self.policy.encoder is not None
        names = [stage.name for stage in self.policy.answering]
        calibration = fitting.calibration.own_chain(names, encoded=encoded)
        validation = fitting.validation.own_chain(names, encoded=encoded)
        policy = self.policy.model_copy(update={"budget": rule.budget})
        return choose_threshold(policy, calibration, validation, rule)

    @cached_property
    def points(self) -> OperatingPoints:
        """Return the results on validation at every threshold."""
        return self._trace(self.validation).frontier(self.validation.chain)

    @property
    def default(self) -> float:
        """Return the threshold without a budget."""
        if self.given is not None:
            return self.given
        return float(self.points.settings[self.points.index_of_best()])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a threshold."""
        return self._trace(examples).answers(setting)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure thresholds on labelled examples, all by one sweep."""
        return curve_of(self._trace(examples), examples.chain, settings)

    def _trace(self, examples: Examples) -> Trace:
        """Answer examples without showing their labels to the cascade."""
        return self.cascade(examples if self.sees_labels else examples.without_labels())


def curve_of(trace: Trace, chain: Chain, thresholds: Floats) -> Curve:
    """Measure thresholds, float64 (P,), on a chain's labelled examples, all by one sweep."""
    accuracy, f1 = trace.frontier(chain, "accuracy"), trace.frontier(chain, "macro-f1")
    at = accuracy.index(thresholds)
    return Curve(thresholds, accuracy.cost[at], accuracy.quality[at], f1.quality[at], _last_share(trace, thresholds))


def _last_share(trace: Trace, settings: Floats) -> Floats:
    reached = reached_shares(trace.compared[:, :-1], settings)
    stopped = reached - np.pad(reached[:, 1:], ((0, 0), (0, 1)))
    share: Floats = stopped[:, trace.calls[:, -1]].sum(axis=1)
    return share


_OURS = "cauc_ray.policies.methods"
_OTHERS = "cauc_ray.policies.baselines"
_HIDDEN: dict[str, Any] = {"needs_hidden": True, "unpublished": "reads models' hidden states, which no stage gives"}
_FULL = "cauc_ray.text_routers.full_forms"
_SKLEARN: dict[str, Any] = {"packages": ("sklearn",), "extra": "baselines"}
_TORCH: dict[str, Any] = {"packages": ("torch", "sklearn"), "extra": "baselines"}
_TEXTS: dict[str, Any] = {
    "packages": ("torch", "transformers", "sklearn"),
    "extra": "text-routers",
    "needs_texts": True,
}
_TEXTS["unpublished"] = "reads the queries' texts, which no policy does"

_SHUFFLED = "gives a row another row's confidence"

# In the order in which tables list them.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("base", "ours", f"{_OURS}:fit_cauc_base"),
        Method("rf", "ours", f"{_OURS}:fit_cauc_rf"),
        Method("rf-shared", "ours", f"{_OURS}:fit_cauc_rf_shared", unpublished="is rf at the threshold of base"),
        Method("stacked", "ours", "cauc_ray.policies.candidates:fit_method"),
        Method("auto", "ours", "cauc_ray.policies.search:fit_auto"),
        Method("duo", "ensemble", f"{_OTHERS}.simple:fit_duo"),
        Method("frugalgpt", "cascade", f"{_OTHERS}.frugalgpt:fit_frugalgpt", **_SKLEARN),
        Method("frugalgpt-bert", "cascade", f"{_FULL}:fit_frugalgpt_bert", **_TEXTS),
        Method("cascade-routing", "cascade", f"{_OTHERS}.cascade_routing:fit_cascade_routing", **_SKLEARN),
        Method("margin", "cascade", f"{_OTHERS}.simple:fit_margin"),
        Method("post-hoc-embed", "cascade", f"{_OTHERS}.post_hoc_embed:fit_post_hoc_embed", **_TORCH),
        Method("post-hoc-embed-hidden", "cascade", f"{_OTHERS}.post_hoc_embed:fit_hidden", **_TORCH, **_HIDDEN),
        Method("routerdc", "router", f"{_OTHERS}.model_vectors:fit_routerdc", **_TORCH),
        Method("routerdc-encoder", "router", f"{_FULL}:fit_routerdc_encoder", **_TEXTS),
        Method("benchmark-routing", "router", f"{_OTHERS}.neighbours:fit_benchmark_routing", **_SKLEARN),
        Method("routellm-mf", "router", f"{_OTHERS}.model_vectors:fit_routellm_mf", **_TORCH),
        Method("routellm-sw", "router", f"{_OTHERS}.neighbours:fit_routellm_sw", **_SKLEARN),
        Method("routellm-bert", "router", "cauc_ray.text_routers.routellm:fit_routellm_bert", **_TEXTS),
        Method("routellm-causal", "router", "cauc_ray.text_routers.routellm:fit_routellm_causal", **_TEXTS),
        Method("graphrouter", "router", f"{_OTHERS}.graphrouter:fit_graphrouter", **_TORCH),
        Method("embedllm", "router", f"{_OTHERS}.model_vectors:fit_embedllm", **_TORCH),
        Method(
            "embedding",
            "control",
            f"{_OTHERS}.simple:fit_embedding",
            needs_embedding=True,
            unpublished="calls no model of the chain",
        ),
        Method("random", "control", f"{_OTHERS}.simple:fit_random", spends_budget=True),
        Method("shuffled", "control", f"{_OTHERS}.simple:fit_shuffled", spends_budget=True, unpublished=_SHUFFLED),
        Method("max-probability", "control", f"{_OTHERS}.simple:fit_max_probability"),
        Method("oracle", "control", f"{_OTHERS}.simple:fit_oracle", sees_labels=True, unpublished="needs the labels"),
    )
}


def cascade_of(policy: Policy) -> Cascade:
    """Return a fitted policy as a cascade without a chosen threshold, among all models of the examples."""
    names, encoded = [stage.name for stage in policy.answering], policy.encoder is not None

    def cascade(examples: Examples) -> Trace:
        trace = trace_policy(policy, examples.own_chain(names, encoded=encoded))
        calls = np.zeros((len(trace.calls), len(examples.chain.models)), dtype=bool)
        calls[:, [examples.chain.models.index(name) for name in names]] = trace.calls[:, encoded:]
        whole = replace(trace, calls=calls)
        return with_embedding_paid(whole, examples) if encoded else whole

    return cascade


def fit_cauc_base(fitting: Fitting) -> Fitted:
    """Fit Base, whose threshold without a budget is the last model's calibration accuracy (paper, eq. 5)."""
    policy = fit_base(fitting.calibration.chain)
    return Thresholded.of(policy, fitting, given=policy.threshold)


def fit_cauc_rf(fitting: Fitting) -> Fitted:
    """Fit RF, whose threshold is the best on validation, within the budget if there is one (paper, eq. 11)."""
    policy = fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Thresholded.of(policy, fitting)


@dataclass(frozen=True)
class Scheduled(Thresholded):
    """A fitted method whose threshold is always the one that another method of the same chain chooses."""

    schedule: Fitted | None = None

    @cached_property
    def points(self) -> OperatingPoints:
        """Return the other method's results on validation."""
        assert self.schedule is not None
        return self.schedule.points


def fit_cauc_rf_shared(fitting: Fitting) -> Fitted:
    """Fit RF at Base's thresholds: the paper's two policies share a routing schedule."""
    base, policy = fit_cauc_base(fitting), fit_rf(fitting.calibration.chain, rule=ThresholdRule(threshold=1.0))
    return Scheduled(cascade_of(policy), fitting.validation, given=base.default, schedule=base)


def method_named(name: str) -> Method:
    """Return a method by its name. Raises ConfigError for an unknown name, or if its packages are not installed."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    method = METHODS[name]
    if method.absent:
        raise ConfigError(f"method {name!r} needs {', '.join(method.absent)}: pip install 'cauc-ray[{method.extra}]'")
    return method
