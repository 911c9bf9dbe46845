"""The methods by name: entry points of installed packages, ours among them.

A method is fitted on two splits, chooses a setting for a budget, and answers on a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

from cauc_ray.errors import ConfigError, OptionError, unknown_name
from cauc_ray.files.entry_points import loaded, registered
from cauc_ray.numbers.calibrators import KINDS, CalibratorKind
from cauc_ray.policies.family import Family, Member
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.policy import METHOD_GROUP, Policy
from cauc_ray.policies.pools import Pool, SubChain
from cauc_ray.policies.trace import Examples

Paradigm: TypeAlias = Literal["single-model", "ours", "ensemble", "cascade", "router", "recalibrated", "control"]
_PARADIGMS: Sequence[Paradigm] = get_args(Paradigm)
# What a method reads in addition to logits.
Need: TypeAlias = Literal["texts", "embedding", "hidden states", "labels"]
# What a method must read of models.
Reads: TypeAlias = Literal["logits", "answers", "neither"]
# Why methods cannot run on a table that lacks what they read.
LACKING: Mapping[Reads, str] = {
    "logits": "reads models' logits, which the table does not have",
    "answers": "reads answers in words and confidences in them, which the table does not have",
}
# Fits a policy to chains, which may lie in shards, by a rule; with safe=True it keeps only supported fusions.
Fit: TypeAlias = Callable[..., Policy]
# Isotonic maps are supported for a small and a large model only: with three, the choice among models would depend on
# three maps, each of which only knows how often its own model is right.
MOST_ISOTONIC = 2


@dataclass(frozen=True)
class Method:
    """A method, as its entry point in the group `cauc_ray.methods` names it.

    Importing its module must import neither torch, sklearn nor transformers: its fit does.

    Attributes:
        name: Its name, that of the entry point.
        paradigm: Group of the paper's tables.
        fit: Fits policies, or controls where no policy can do the same; or a family of them.
        packages: Packages that the fit imports in addition to cauc-ray's own.
        extra: The extra of cauc-ray that installs them.
        note: How it differs from the published method, for tables; of a fit where it depends on that.
        needs: What it cannot do without: the queries' texts, which it trains a checkpoint on, their embeddings, the
            hidden states of each model of the chain but the last, or, as an upper bound, the labels of what it answers.
        unpublished: Why no policy can do the same, empty if one can.
        policy: Fits the policy that a rule chooses, on chains that may lie in shards; None if only `fit` does.
        sub_chains: Fits the sub-chains of a pool for a search; None if it is not searched.
        calibrators: Kinds of calibrators of its models; none if it recalibrates them by terms of its own.
        most_models: Largest number of models; None for any.
        reads: What it must read of models: their logits, their answers in words with confidences, or neither.
        broken: Why it cannot be loaded, empty if it can.
    """

    name: str
    paradigm: Paradigm
    fit: Callable[[Fitting], Sequence[Member] | Family]
    packages: tuple[str, ...] = ()
    extra: str = ""
    note: str | Callable[[Fitting], str] = ""
    needs: Need | None = None
    unpublished: str = ""
    policy: Fit | None = None
    sub_chains: Callable[[Pool], Iterable[SubChain]] | None = None
    calibrators: tuple[CalibratorKind, ...] = ("temperature",)
    most_models: int | None = None
    reads: Reads = "logits"
    broken: str = ""

    @property
    def learns(self) -> bool:
        """Return whether it trains more than temperatures and thresholds."""
        return self.paradigm == "router" or bool(self.packages)

    @property
    def sees_labels(self) -> bool:
        """Return whether it uses the labels of what it answers."""
        return self.needs == "labels"

    @property
    def obstacle(self) -> str:
        """Return why it cannot run here, whatever the data; empty if it can."""
        absent = [package for package in self.packages if find_spec(package) is None]
        install = f": pip install 'cauc-ray[{self.extra}]'" if self.extra else ""
        return self.broken or (f"needs {', '.join(absent)}{install}" if absent else "")

    def family(self, fitting: Fitting) -> Family:
        """Fit its policies, and return them as a family."""
        fitted = self.fit(fitting)
        if isinstance(fitted, Family):
            return fitted

        def refit(validation: Examples) -> Family:
            return self.family(replace(fitting, validation=validation))

        note = self.note if isinstance(self.note, str) else self.note(fitting)
        return Family(fitted, fitting.validation, note, self.sees_labels, refit=refit)

    def require_calibrator(self, kind: CalibratorKind, n_models: int) -> None:
        """Raise ConfigError unless the method supports the calibrator with this number of models."""
        if kind not in KINDS:
            raise ConfigError(unknown_name("calibrator", kind, KINDS))
        if kind != "temperature" and not self.calibrators:
            raise OptionError(f"method {self.name} recalibrates models itself: leave {{calibrator}} {kind} out")
        if (kind == "isotonic" and n_models > MOST_ISOTONIC) or kind not in (*self.calibrators, "temperature"):
            raise OptionError(
                f"{{calibrator}} isotonic is for method base with one or two models, got {self.name} with {n_models}; "
                "use temperature or offsets"
            )


class Methods(Mapping[str, Method]):
    """Registered methods by name, in the order of tables: by paradigm, then by name."""

    def __init__(self, accepts: Callable[[Method], bool] = lambda method: True) -> None:
        """Choose among the registered methods."""
        self._accepts = accepts

    def __getitem__(self, name: str) -> Method:
        """Return a method; one that cannot be loaded is broken."""
        method = _load(registered(METHOD_GROUP)[name])
        if not self._accepts(method):
            raise KeyError(name)
        return method

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        methods = [method for method in map(_load, registered(METHOD_GROUP).values()) if self._accepts(method)]
        return iter(sorted((of.name for of in methods), key=lambda name: (_PARADIGMS.index(self[name].paradigm), name)))

    def __len__(self) -> int:
        """Return the number of methods."""
        return sum(1 for _ in self)


METHODS = Methods()
# The methods of CAUC, which are fitted with all options: shards, safe fits, other calibrators, or a search.
OURS = Methods(lambda method: method.policy is not None or method.sub_chains is not None)


@cache
def _load(entry: EntryPoint) -> Method:
    try:
        method = loaded(entry, "entry point")
    except ConfigError as error:
        return Method(entry.name, "control", fit=_unfitted, broken=f"is broken: {error}")
    if isinstance(method, Method) and method.name == entry.name:
        return method
    return Method(entry.name, "control", fit=_unfitted, broken=f"is broken: {entry.value} names something else")


def imported(target: str) -> Callable[[Fitting], Sequence[Member]]:
    """Return a fit that is imported when it is called.

    Args:
        target: "module:function" of a module that imports torch, sklearn or transformers.
    """

    def fit(fitting: Fitting) -> Sequence[Member]:
        module, _, name = target.partition(":")
        members: Sequence[Member] = getattr(import_module(module), name)(fitting)
        return members

    return fit


def _unfitted(fitting: Fitting) -> Sequence[Member]:
    return ()


def method_named(name: str) -> Method:
    """Return a method by its name. Raises ConfigError for an unknown name, or if the method cannot run here."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    method = METHODS[name]
    if method.obstacle:
        raise ConfigError(f"method {name!r} {method.obstacle}")
    return method
