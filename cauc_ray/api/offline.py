"""Fit, evaluate and sweep policies on a logit table: the Python side of `cauc fit`, `evaluate` and `sweep`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.examples import ExampleReader
from cauc_ray.api.fingerprints import fingerprints_of
from cauc_ray.api.options import ChainOptions, Cut, EvaluateOptions, FitOptions, SweepOptions
from cauc_ray.api.sources import Logits, Source, positions_of_rows, read_policy_chain
from cauc_ray.data.logits import LogitKinds
from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.files.atomic import require_writable
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.sweep import Objective
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.checks import require_quiet, warn_of
from cauc_ray.policies.fitting import fit_policy, refit
from cauc_ray.policies.methods import Fitting, method_named
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.safe import require_safe_rule
from cauc_ray.policies.search import check_pool, search_chains


def fit(
    logits: Logits,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Sequence[str] | None = None,
    method: str = "base",
    costs: Mapping[str, float] | Sequence[float] | None = None,
    cost_unit: str | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    validation: Cut = None,
    seed: int = 0,
    budget: float | None = None,
    threshold: float | None = None,
    objective: Objective = "accuracy",
    certify: str | None = None,
    search: bool = False,
    strict: bool = False,
    safe: bool = False,
    calibrator: CalibratorKind = "temperature",
    logit_kind: LogitKinds = None,
) -> Policy:
    """Fit a policy on arrays of logits or on a logit table.

    >>> import cauc_ray
    >>> policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
    >>> policy.models, policy.cost_unit
    (('small', 'large'), 'k multiply-adds')

    An array's numbers are rounded to float32. A table of the same ids, labels and logits gives the same policy file,
    byte for byte.

    Args:
        logits: a table's path or URI; or by model arrays (N, K) with a column for each option: numpy arrays, lists,
            pandas or polars frames.
        labels: int (N,), the index of the right option; only for arrays, whose policy is fitted on them.
        example_ids: (N,), of arrays, each once; without them row i is "i", the position as text. Nothing depends on
            the order of rows, but of shares that are cut off where ids are positions.
        models: the chain, cheapest first; without them all models by rising cost.
        method: "base" or "rf".
        costs: of a call of each model, by name or in the order of models; without them the table's.
        cost_unit: of costs; without it the table's, else "cost units".
        calibration_split: what the policy is fitted on.
        validation_split: what its threshold is chosen on.
        validation: without the latter, a share of the calibration examples, cut off at random; the policy records how
            many and a digest of which. For arrays also (logits, labels) or (logits, labels, example_ids).
        seed: of that cut.
        budget: mean cost per example that the threshold is chosen for.
        threshold: one to use as it is.
        objective: what a chosen threshold maximises, "accuracy" or "macro-f1".
        certify: "risk<=0.05@0.95" for the threshold of most coverage at which, with that confidence, answers given
            before the last stage are wrong at most so often, by validation's labels.
        search: take models as a pool, in any order, and fit the best of its sub-chains, cheapest first: the policy is
            that of its models alone, with what else there was under search (see policies.search).
        strict: make every warning about the policy (policies.checks) an error.
        safe: fuse only where that is supported, and fall back on a single model where the chain is no better on
            validation (see policies.safe); not with search or certify.
        calibrator: of every model: "temperature"; "offsets", with one for each option of a fixed set as well;
            "isotonic", with a map of the confidence to how often such answers were right, for Base with one or two
            models.
        logit_kind: of all models or by model: "raw", "log-probabilities", "probabilities" or "surrogate"; without it
            as the table declares, else raw.

    Returns:
        The policy. Warns, with CaucWarning, of each guard that fires.

    Raises:
        CaucError: DataError for the logits, ConfigError for the arguments, BudgetError for the budget, RiskError where
            no threshold is certified, GuardError where a guard fires that must not.
    """
    options = FitOptions.of(locals())
    source = Source(logits, options, labels, example_ids)
    require_fit(options, len(source.models))
    if search:
        check_pool(source.models)
    found, splits = None, source.read(source.models, source.costs)
    if options.search:
        found = search_chains(method, *splits, options.rule, validation_split, calibrator=calibrator)
        # Read again: an example that only other models failed on counts here.
        splits = source.read(found.chosen.models, source.costs)
    policy = fit_chains(options, *splits).model_copy(update={"search": found})
    warn_of(policy.guards)
    return policy


def require_fit(options: FitOptions, n_models: int) -> None:
    """Raise ConfigError, before any reading, where so many models cannot be fitted by options."""
    require_calibrator(options.calibrator, options.method, n_models)
    if options.safe:
        require_safe_rule(options.rule)


def fit_chains(options: FitOptions, calibration: Chain, validation: Chain | None = None) -> Policy:
    """Fit a policy on chains, here or in shards, without a search. Raises as fit() does."""
    policy = fit_policy(
        options.method,
        calibration,
        validation,
        options.rule,
        options.splits,
        calibrator=options.calibrator,
        safe=options.safe,
    )
    if options.strict:
        require_quiet(policy.guards)
    return policy


def replace_model(
    policy: str | Path | Policy,
    logits: Logits,
    replacements: Mapping[str, str],
    labels: Any = None,
    *,
    example_ids: Any = None,
    costs: Mapping[str, float] | None = None,
    validation: Cut = None,
    seed: int = 0,
    logit_kind: LogitKinds = None,
) -> Policy:
    """Put other models in the place of some of a policy's, and fit it again by its own rule.

    policy: or its file.   logits: a table, or arrays, with the remaining and the new models on the examples that the
    policy was fitted on; labels, example_ids, validation, seed as fit() had
    them.   replacements: new model by the one that it
    replaces.   costs: of the new models, by name; without them the table's. Those of the remaining models stay.
    logit_kind: as for fit; without it that of the policy's models is the policy's.
    Numbers that do not depend on a replaced model stay equal to the bit: the other models' calibrators; for Base,
    unless the last model was replaced, their complementarity; for RF, all stages before the first replaced one. Warns
    as fit() does.
    Raises CaucError.
    """
    policy = policy_of(policy)
    for name in replacements:
        if name not in policy.models:
            raise ConfigError(unknown_name("model", name, policy.models))
    models = [replacements.get(name, name) for name in policy.models]
    options = ChainOptions.of(
        {
            "costs": None if costs is None else dict(costs),
            "cost_unit": policy.cost_unit if isinstance(logits, Mapping) else None,
            "calibration_split": policy.calibration.split,
            "validation_split": policy.validation.split if policy.validation else "validation",
            "validation": validation,
            "seed": seed,
            "logit_kind": logit_kind,
        }
    )
    source = Source(logits, options, labels, example_ids, policy.kinds_by_model)
    if policy.costs == "per-call":
        splits = source.read(models, "per-call")
    else:
        kept = {stage.name: stage.cost for stage in policy.stages if stage.name in models}
        splits = source.read(models, {**source.declared, **kept})
    replaced = refit(policy, *splits)
    warn_of(replaced.guards)
    return replaced


def evaluate(
    logits: Logits,
    policy: str | Path | Policy,
    *,
    labels: Any = None,
    example_ids: Any = None,
    split: str = "test",
    logit_kind: LogitKinds = None,
) -> Evaluation:
    """Replay a policy on a split of a logit table, or on arrays.

    >>> import cauc_ray
    >>> policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
    >>> measures = cauc_ray.evaluate(cauc_ray.sample_logits(), policy).measures
    >>> measures.accuracy.value > 0.9, measures.cost < 5.0
    (True, True)

    logits, example_ids: as for fit.   policy: or its file.   labels: int (N,), of arrays; None where there are none,
    and no accuracy then.   split: of a table.   logit_kind: as for fit; what is not declared is of the kind that the
    policy was fitted on.
    Warns, with CaucWarning, where examples cost other than the policy expects. Raises DataError where the logits do
    not serve, PolicyError where the file does not.
    """
    options, policy = EvaluateOptions.of(locals()), policy_of(policy)
    chain = read_policy_chain(logits, policy, options.split, logit_kind, labels, example_ids)
    order = positions_of_rows(chain, example_ids) if isinstance(logits, Mapping) else None
    evaluation = Evaluation.of(policy, chain, order)
    warn_of(evaluation.guards)
    return evaluation


def policy_of(policy: str | Path | Policy) -> Policy:
    """Return a policy, read from its file where that is given. Raises PolicyError as Policy.load does."""
    return policy if isinstance(policy, Policy) else Policy.load(policy)


def sweep(
    logits: Logits,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Sequence[str] | None = None,
    methods: Sequence[str] = ("base", "rf", "margin"),
    costs: Mapping[str, float] | Sequence[float] | None = None,
    cost_unit: str | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    validation: Cut = None,
    split: str = "test",
    test: Cut = None,
    seed: int = 0,
    points: int | None = None,
    embedding: str | None = None,
    logit_kind: LogitKinds = None,
) -> pa.Table:
    """Trace each method's accuracy over cost: thresholds from validation, final figures on another split.

    >>> import cauc_ray
    >>> table = cauc_ray.sweep(cauc_ray.sample_logits(), methods=["rf"], points=5)
    >>> table.num_rows, max(table["accuracy"].to_pylist()) > 0.9
    (5, True)

    Arguments are those of compare, but for points: how many budgets, evenly spaced over the validation costs, to
    choose a threshold for; None takes every distinct operating point of the validation split.
    Returns one row per method and point, by rising threshold: method, budget (null without points), threshold,
    validation_accuracy, validation_cost, accuracy, macro_f1, cost, relative_cost, avoided (the share of
    examples that never reach the last model). Raises CaucError as fit does.
    """
    options = SweepOptions.of(locals())
    if not options.methods or len(set(options.methods)) < len(options.methods):
        raise ConfigError(f"a sweep needs methods, each once, got {', '.join(options.methods) or 'none'}")
    for name in options.methods:
        if method_named(name).needs_texts:
            raise ConfigError(f"method {name!r} trains a model on texts, which only `cauc compare` takes")
    source = Source(logits, options, labels, example_ids)
    calibrating, choosing, final = ExampleReader(source, embedding).read("measuring a sweep")
    fitting = Fitting(calibrating, choosing, seed)
    of_last = float(final.chain.costs.means[-1])
    parts = []
    for name in options.methods:
        fitted = method_named(name).load()(fitting)
        of_fit = fitted.points
        budgets: Floats | None = None
        chosen: Ints = np.arange(len(of_fit.cost))
        if points is not None:
            budgets = np.linspace(of_fit.cost.min(), of_fit.cost.max(), points)
            chosen = np.array([of_fit.index_of_best(float(budget)) for budget in budgets])
        curve = fitted.curve(final, of_fit.settings[chosen])
        parts.append(
            pa.table(
                {
                    "method": pa.array([name] * len(chosen), pa.string()),
                    "budget": pa.array(budgets, pa.float64())
                    if budgets is not None
                    else pa.nulls(len(chosen), pa.float64()),
                    "threshold": curve.settings,
                    "validation_accuracy": of_fit.quality[chosen],
                    "validation_cost": of_fit.cost[chosen],
                    "accuracy": curve.accuracy,
                    "macro_f1": curve.macro_f1,
                    "cost": curve.cost,
                    "relative_cost": pa.array(curve.cost / of_last)
                    if of_last > 0
                    else pa.nulls(len(chosen), pa.float64()),
                    "avoided": 1.0 - curve.last_share,
                }
            )
        )
    fingerprints = fingerprints_of(calibrating.chain, choosing.chain, final.chain)
    about = {"cost_unit": final.chain.costs.unit, "models": ",".join(source.models), "split": split}
    return pa.concat_tables(parts).replace_schema_metadata(about | {"fingerprints": json.dumps(fingerprints)})


def sweep_highlights(table: pa.Table, n_budgets: int = 5) -> list[dict[str, Any]]:
    """Return for each method of a sweep, at a few budgets, the point that validation chooses.

    The budgets are evenly spaced over the method's validation costs; equal choices are shown once.
    """
    highlights = []
    for name in table.column("method").unique().to_pylist():
        rows = table.filter(pc.equal(table.column("method"), name)).to_pydict()
        cost, quality = np.array(rows["validation_cost"]), np.array(rows["validation_accuracy"])
        seen: set[int] = set()
        for budget in np.linspace(cost.min(), cost.max(), n_budgets):
            best = int(np.where(cost <= budget * (1 + 1e-9), quality, -np.inf).argmax())
            if best not in seen:
                seen.add(best)
                highlights.append({key: values[best] for key, values in rows.items()} | {"budget": float(budget)})
    return highlights


def save_table(table: pa.Table, path: str | Path) -> None:
    """Write a Parquet file, whole or not at all."""
    write_parquet(path_of(path), table)


def require_apart(output: str | AnyPath, *inputs: str | AnyPath) -> None:
    """Raise ConfigError where an output would replace one of the inputs, or a file within it."""
    target = Path(str(output)).resolve()
    for source in inputs:
        if target.is_relative_to(Path(str(source)).resolve()):
            raise ConfigError(f"output {output} is, or lies in, the input {source}; write it elsewhere")


def require_output_file(output: str | Path, *inputs: str | Path) -> None:
    """Raise ConfigError, before any work, where a file cannot be written or would replace one of the inputs."""
    require_apart(output, *inputs)
    require_writable(path_of(output))
