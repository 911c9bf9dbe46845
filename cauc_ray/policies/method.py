"""The methods by name: entry points of installed packages, ours among them.

A method is fitted on two splits, chooses a setting for a budget, and answers on a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from typing import Literal, TypeAlias, get_args

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.files.entry_points import loaded, registered
from cauc_ray.policies.family import Family, Member
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.policy import METHOD_GROUP

Paradigm: TypeAlias = Literal["single-model", "ours", "ensemble", "cascade", "router", "recalibrated", "control"]
_PARADIGMS: Sequence[Paradigm] = get_args(Paradigm)


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
        needs_texts: Whether it trains on the queries' texts, from a checkpoint.
        needs_embedding: Whether it cannot do without the queries' embeddings.
        needs_hidden: Whether it reads the hidden states of each model of the chain but the last.
        spends_budget: Whether a budget chooses the most expensive point within it, not the best.
        sees_labels: Whether it uses the labels, as an upper bound for all methods.
        unpublished: Why no policy can do the same, empty if one can.
        broken: Why it cannot be loaded, empty if it can.
    """

    name: str
    paradigm: Paradigm
    fit: Callable[[Fitting], Sequence[Member] | Family]
    packages: tuple[str, ...] = ()
    extra: str = ""
    note: str | Callable[[Fitting], str] = ""
    needs_texts: bool = False
    needs_embedding: bool = False
    needs_hidden: bool = False
    spends_budget: bool = False
    sees_labels: bool = False
    unpublished: str = ""
    broken: str = ""

    @property
    def learns(self) -> bool:
        """Return whether it trains more than temperatures and thresholds."""
        return self.paradigm == "router" or bool(self.packages)

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
        note = self.note if isinstance(self.note, str) else self.note(fitting)
        return Family(fitted, fitting.validation, note, self.sees_labels, self.spends_budget)


class Methods(Mapping[str, Method]):
    """All registered methods by name, in the order of tables: by paradigm, then by name."""

    def __getitem__(self, name: str) -> Method:
        """Return a method; one that cannot be loaded is broken."""
        return _load(registered(METHOD_GROUP)[name])

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(sorted(registered(METHOD_GROUP), key=lambda name: (_PARADIGMS.index(self[name].paradigm), name)))

    def __len__(self) -> int:
        """Return the number of methods."""
        return len(registered(METHOD_GROUP))


METHODS = Methods()


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
