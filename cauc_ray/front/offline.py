"""Fit, evaluate and sweep policies on a logit table: the Python side of `cauc fit`, `evaluate` and `sweep`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.files import write_parquet, write_text
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.predictions import predictions_table
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.front.examples import ExampleReader
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.sweep import Objective
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.cost_guards import as_expected
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.fitting import refit
from cauc_ray.policies.guards import require_quiet
from cauc_ray.policies.method import Fitting
from cauc_ray.policies.methods import fit_policy, method_named
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.replay import Measures, Replay, measure_replay
from cauc_ray.policies.safe import fit_safe, refit_safe
from cauc_ray.policies.searching import check_pool, search_chains
from cauc_ray.policies.stage_guarantees import StageGuarantees, measure_guarantees
from cauc_ray.policies.threshold import ThresholdRule

MOST_POINTS = 100_000


def fit(
    logits: str | Path,
    *,
    models: Sequence[str],
    method: str = "base",
    costs: Sequence[float] | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    budget: float | None = None,
    threshold: float | None = None,
    objective: Objective = "accuracy",
    certify: str | None = None,
    search: bool = False,
    strict: bool = False,
    safe: bool = False,
    calibrator: CalibratorKind = "temperature",
) -> Policy:
    """Fit a policy on a logit table.

    logits: the table's folder.   models: the chain, cheapest first.   method: "base" or "rf".
    costs: of a call of each model; without them the table's.   budget: mean cost per example that the
    threshold is chosen for.   threshold: one to use as it is.   objective: what a chosen threshold maximises.
    certify: "risk<=0.05@0.95" for the threshold of most coverage at which, with that confidence, answers given before
    the last stage are wrong at most so often; validation's labels say so.
    search: take models as a pool, in any order, and fit the best of its sub-chains, cheapest first: the policy is that
    of its models alone, and says under search what else there was (see policies.searching).
    strict: take every guard that fires (policies.guards) for an error.
    safe: fuse only where that is supported, and fall back on a single model where the chain is no better on validation
    (see policies.safe); not with search or certify.
    calibrator: of every model: "temperature"; "offsets", with one for each option of a fixed set beside it; "isotonic",
    with a map of the confidence to how often such answers were right, for Base with one or two models.
    Raises CaucError: DataError for the table, ConfigError for the arguments, BudgetError for the budget, RiskError
    where no threshold is certified, GuardError where a guard has fired that must not.
    """
    limit = None if certify is None else RiskLimit.parse(certify)
    table, rule = LogitTable(logits), ThresholdRule(threshold, budget, objective, limit)
    names = (calibration_split, validation_split)
    policy = _fit(table, models, method, names, costs, rule, calibrator, search, safe)
    if strict:
        require_quiet(policy.guards)
    return policy


def _fit(
    table: LogitTable,
    models: Sequence[str],
    method: str,
    names: tuple[str, str],
    costs: Sequence[float] | None,
    rule: ThresholdRule,
    calibrator: CalibratorKind,
    search: bool,
    safe: bool,
) -> Policy:
    require_calibrator(calibrator, method, len(models))
    if search:
        if safe:
            raise ConfigError("a search measures chains without the guards of a safe policy; leave one of both out")
        if rule.certify is not None:
            raise ConfigError(
                "a chain that was searched for on validation cannot be certified there; leave one of both out"
            )
        check_pool(models)
    calibration, validation = _read_fitting_splits(table, models, names, costs=costs)
    if not search:
        if safe:
            return fit_safe(method, calibration, validation, rule, names, calibrator=calibrator)
        return fit_policy(method, calibration, validation, rule, names, calibrator=calibrator)
    found = search_chains(method, calibration, validation, rule, names[1], calibrator=calibrator)
    chain = found.chosen.models
    if costs is not None:
        costs = [costs[list(models).index(name)] for name in chain]
    # Read again: an example that only other models failed on counts here.
    splits = _read_fitting_splits(table, chain, names, costs=costs)
    policy = fit_policy(method, *splits, rule, names, calibrator=calibrator)
    return policy.model_copy(update={"search": found})


def replace_model(policy: Policy, logits: str | Path, replacements: Mapping[str, str]) -> Policy:
    """Put other models in the place of some of a policy's, refitting only what that changes.

    logits: a table with the remaining and the new models on the examples that the policy was fitted on.
    replacements: new model by the one that it replaces. The costs of the remaining models stay.
    Every other number stays as it is, bit for bit: Base keeps the other models' calibrators and, unless the
    last model went, their complementarity; RF keeps all before the first replaced stage. Raises CaucError.
    """
    for name in replacements:
        if name not in policy.models:
            raise ConfigError(unknown_name("model", name, policy.models))
    table = LogitTable(logits)
    models = [replacements.get(name, name) for name in policy.models]
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    again = refit if policy.safe is None else refit_safe
    if policy.costs == "per-call":
        return again(policy, *_read_fitting_splits(table, models, names, per_call_costs=True))
    info = table.info()
    declared = {m.name: m.cost for m in info.models} if info else {}
    costs = []
    for stage, model in zip(policy.stages, models, strict=True):
        if model != stage.name and model not in declared:
            raise DataError(f"{table.path} has no pool.json that gives the cost of {model!r}")
        costs.append(stage.cost if model == stage.name else declared[model])
    return again(policy, *_read_fitting_splits(table, models, names, costs=costs))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A policy's answers on a split of a logit table, and what they are worth.

    guarantees: of each stage, what its threshold promises there; None for the last.   guards: of what was realised
    there against what was expected.
    """

    policy: Policy
    chain: Chain
    replay: Replay
    measures: Measures
    guarantees: tuple[StageGuarantees | None, ...]
    guards: tuple[Guard, ...]

    @classmethod
    def of(cls, policy: Policy, chain: Chain) -> Evaluation:
        """Evaluate a policy on a chain."""
        answers, measures = measure_replay(policy, chain)
        on_cost = as_expected(policy.expected, answers.costs, chain.source, policy.budget, policy.cost_unit)
        guards = () if on_cost is None else (on_cost,)
        return cls(policy, chain, answers, measures, measure_guarantees(policy, chain), guards)

    def predictions(self) -> pa.Table:
        """Return the answers as a predictions table."""
        replay, labels = self.replay, self.chain.labels
        return predictions_table(
            self.chain.example_ids,
            replay.predictions,
            replay.confidences,
            replay.stages,
            replay.costs,
            labels if self.chain.labelled.any() else None,
        )


def evaluate(logits: str | Path, policy: Policy, *, split: str = "test") -> Evaluation:
    """Replay a policy on a split of a logit table. Raises DataError where the table does not serve."""
    chain = read_policy_chain(logits, policy, split)
    return Evaluation.of(policy, chain)


def read_policy_chain(logits: str | Path, policy: Policy, split: str) -> ChainLogits:
    """Read a policy's models on a split, with costs counted as the policy counts them."""
    per_call = policy.costs == "per-call"
    return LogitTable(logits).read_chain(
        policy.models,
        split,
        costs=None if per_call else [stage.cost for stage in policy.stages],
        per_call_costs=per_call,
    )


def sweep(
    logits: str | Path,
    *,
    models: Sequence[str],
    methods: Sequence[str] = ("base", "rf", "margin"),
    costs: Sequence[float] | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    split: str = "test",
    points: int | None = None,
    embedding: str | None = None,
) -> pa.Table:
    """Trace each method's accuracy over cost: thresholds from validation, final figures on another split.

    points: how many budgets, evenly spaced over the validation costs, to choose a threshold for; None takes
    every distinct operating point of the validation split.   embedding: an encoder of the table, for routers.
    Returns one row per method and point, by rising threshold: method, budget (null without points), threshold,
    validation_accuracy, validation_cost, accuracy, macro_f1, cost, relative_cost, avoided (the share of
    examples that never reach the last model). Raises CaucError as fit does.
    """
    if points is not None and not 2 <= points <= MOST_POINTS:
        raise ConfigError(f"a sweep can have 2 to {MOST_POINTS:,} points, got {points}")
    if not methods or len(set(methods)) < len(methods):
        raise ConfigError(f"a sweep needs methods, each once, got {', '.join(methods) or 'none'}")
    for name in methods:
        if method_named(name).needs_texts:
            raise ConfigError(f"method {name!r} trains a model on texts, which only `cauc compare` takes")
    reader = ExampleReader(LogitTable(logits), models, costs, embedding)
    fitting = Fitting(*reader.read_fitting_splits(calibration_split, validation_split))
    final = reader.read_final(split, "measuring a sweep", fitting)
    of_last = float(final.chain.costs.means[-1])
    parts = []
    for name in methods:
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
    unit = {"cost_unit": final.chain.costs.unit, "models": ",".join(models), "split": split}
    return pa.concat_tables(parts).replace_schema_metadata(unit)


def sweep_highlights(table: pa.Table, n_budgets: int = 5) -> list[dict[str, Any]]:
    """Return for each method of a sweep, at a few budgets, the point that validation chooses.

    The budgets are evenly spaced over the method's validation costs; equal choices are shown once.
    """
    highlights = []
    for name in table.column("method").unique().to_pylist():
        rows = table.filter(pc.equal(table.column("method"), name)).to_pydict()
        cost, quality = np.array(rows["validation_cost"]), np.array(rows["validation_accuracy"])
        seen: set[int] = set()
        for budget in np.linspace(cost[0], cost[-1], n_budgets):
            best = int(np.where(cost <= budget * (1 + 1e-9), quality, -np.inf).argmax())
            if best not in seen:
                seen.add(best)
                highlights.append({key: values[best] for key, values in rows.items()} | {"budget": float(budget)})
    return highlights


def save_policy(policy: Policy, path: str | Path) -> None:
    """Write a policy file, whole or not at all."""
    write_text(Path(path), policy.to_json())


def save_table(table: pa.Table, path: str | Path) -> None:
    """Write a Parquet file, whole or not at all."""
    write_parquet(Path(path), table)


def require_apart(output: str | Path, *inputs: str | Path) -> None:
    """Raise ConfigError where an output would replace one of the inputs, or a file within it."""
    target = Path(output).resolve()
    for source in inputs:
        if target.is_relative_to(Path(source).resolve()):
            raise ConfigError(f"output {output} is, or lies in, the input {source}; write it elsewhere")


def _read_fitting_splits(
    table: LogitTable,
    models: Sequence[str],
    names: tuple[str, str],
    *,
    costs: Sequence[float] | None = None,
    per_call_costs: bool | None = None,
) -> tuple[ChainLogits, ChainLogits | None]:
    """Read calibration, and validation if the first model has it: a fit says when it cannot do without."""
    if names[0] == names[1]:
        raise ConfigError(f"calibration and validation must be two splits, both are {names[0]!r}")
    calibration = table.read_chain(models, names[0], costs=costs, per_call_costs=per_call_costs)
    if names[1] not in table.splits(models[0]):
        return calibration, None
    return calibration, table.read_chain(models, names[1], costs=costs, per_call_costs=per_call_costs)
