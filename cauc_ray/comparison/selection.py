"""Which methods a comparison runs, and why others cannot run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.policies import by_method
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import LACKING, METHODS, Method, Reads
from cauc_ray.policies.recalibrated import fit_recalibrated

# Single models and other methods on recalibrated logits: recalibrated:<model>, recalibrated+<method>.
RECALIBRATED = "recalibrated"


def recalibrates(method: Method) -> bool:
    """Return whether a method is also measured on recalibrated logits.

    Controls are not, nor are methods that recalibrate models themselves, nor variants of ours for tables.
    """
    is_variant = method.paradigm == "ours" and bool(method.unpublished)
    return method.paradigm != "control" and bool(method.calibrators) and not is_variant


def require_methods(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not of a method, of one on recalibrated logits, or of a group of them."""
    available = ("all", SINGLE, RECALIBRATED, *METHODS)
    forms = [f"{RECALIBRATED}+{method.name}" for method in METHODS.values() if recalibrates(method)]
    for name in names:
        if name not in (*available, *forms):
            raise ConfigError(unknown_name("method", name, available))


def require_trainable(names: Collection[str]) -> None:
    """Raise ConfigError for a method that trains no checkpoint."""
    trained = [method.name for method in METHODS.values() if method.needs == "texts"]
    for name in names:
        if name not in trained:
            raise ConfigError(f"method {name!r} takes no checkpoint; those that do: {', '.join(trained)}")


def choose_methods(
    names: Sequence[str],
    models: Sequence[str],
    trainable: Collection[str] = (),
    embedding: str | None = None,
    hidden: Collection[str] = (),
    *,
    gives: Reads = "logits",
) -> tuple[list[str], list[dict[str, str]]]:
    """Return the methods to run in the order of tables, and those that cannot run here, each with the reason.

    Args:
        names: Names of methods and of groups of them.
        models: The chain.
        trainable: Methods for which there are texts and a checkpoint.
        embedding: What routers look at.
        hidden: Models whose hidden states are available.
        gives: What the table has of models.

    Raises:
        ConfigError: A name is unknown, or none of the methods can run.
    """
    require_methods(names)
    of_all = (SINGLE, RECALIBRATED) if gives == "logits" else (SINGLE,)
    groups = [group for group in (SINGLE, RECALIBRATED) if group in names or ("all" in names and group in of_all)]
    chosen, absent = [f"{group}:{model}" for model in models for group in groups], list[dict[str, str]]()
    if gives != "logits":
        absent = [{"method": name, "why": LACKING["logits"]} for name in chosen if name.startswith(RECALIBRATED)]
        chosen = [name for name in chosen if name.startswith(SINGLE)]
    for name, method in METHODS.items():
        forms = [name] if {"all", name} & set(names) else []
        recalibrated = f"{RECALIBRATED}+{name}"
        if recalibrates(method) and (recalibrated in names or (forms and RECALIBRATED in groups)):
            forms.append(recalibrated)
        why = _obstacle(method, models, trainable, embedding, hidden)
        for form in forms:
            reads: Reads = method.reads if form == name else "logits"
            if gives == "answers" and method.paradigm == "router" and embedding is None:
                reads = "logits"  # of the first model, in place of an embedding
            reason = why if reads in (gives, "neither") else LACKING[reads]
            if reason is None:
                chosen.append(form)
            else:
                absent.append({"method": form, "why": reason})
    if not chosen:
        raise ConfigError(f"method {absent[0]['method']!r} {absent[0]['why']}")
    return chosen, absent


def _obstacle(
    method: Method, models: Sequence[str], trainable: Collection[str], embedding: str | None, hidden: Collection[str]
) -> str | None:
    """Return why a method cannot run, None where it can."""
    unread = [model for model in models[:-1] if model not in hidden]
    if method.needs == "texts" and method.name not in trainable:
        return "trains a model on the queries' texts: give texts, and its checkpoint"
    if method.needs == "embedding" and embedding is None:
        return "reads the queries' embeddings: give their encoder"
    if method.needs == "hidden states" and unread:
        return f"reads hidden states: collect those of {', '.join(unread)} as embeddings"
    if method.obstacle:
        return method.obstacle
    if method.most_models is not None and len(models) > method.most_models:
        return f"searches the sub-chains of up to {method.most_models} models"
    return None


def method_of(name: str, models: Sequence[str]) -> tuple[Method, Callable[[Fitting], Family]]:
    """Return a method by its name, those on recalibrated logits among them, and what fits it."""
    plain = name.replace(f"{RECALIBRATED}:", f"{SINGLE}:").removeprefix(f"{RECALIBRATED}+")
    method = by_method.method_of(plain, models)
    fit = (lambda fitting: method.family(fitting.for_learning())) if method.learns else method.family
    if plain == name:
        return method, fit
    return replace(method, name=name, paradigm="recalibrated"), partial(fit_recalibrated, fit)


def hidden_of(methods: Sequence[str], models: Sequence[str]) -> Sequence[str]:
    """Return the models of a chain whose hidden states some of the methods read."""
    return models[:-1] if any(method_of(name, models)[0].needs == "hidden states" for name in methods) else ()
