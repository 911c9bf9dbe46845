"""Sweeps: methods × budgets × chains × seeds on a logit table, and what they add up to over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.options import Cut, MeasureOptions, SweepOptions
from cauc_ray.api.sources import Logits, Source, fingerprints_of, read_examples
from cauc_ray.api.tables import Grid, percent
from cauc_ray.comparison import measuring
from cauc_ray.comparison.measuring import choose_methods, hidden_of, method_of, set_up
from cauc_ray.data.logits import LogitKinds
from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.logits import stacked
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.trace import Examples

KEYS = ("set", "chain", "method", "budget_kind", "budget")
FIGURES = ("accuracy", "macro_f1", "cost", "relative_cost", "setup_s")
# status: ok; unmet, where no operating point is within the budget; missing, where a task failed. reason: why.
# budget_cost: the budget in the table's unit.   threshold: null where the method has only one setting.
_TYPES = {"seed": pa.int64(), "n": pa.int64()}
_TYPES |= dict.fromkeys(("set", "chain", "method", "budget_kind", "status", "reason", "cost_unit"), pa.string())
_COLUMNS = (
    *("set", "chain", "method", "seed", "budget_kind", "budget", "budget_cost", "status", "reason", "threshold"),
    *("validation_accuracy", "validation_cost", "accuracy", "macro_f1", "cost", "relative_cost", "avoided", "n"),
    *("cost_unit", "setup_s"),
)
RESULTS = pa.schema([(name, _TYPES.get(name, pa.float64())) for name in _COLUMNS])
# Of one logit table, without what differs from one time to the next.
TABLE = pa.schema([field for field in RESULTS if field.name not in ("set", "setup_s")])
SUMMARY = pa.schema(
    [
        *(RESULTS.field(key) for key in KEYS),
        ("n", pa.int64()),
        ("n_unmet", pa.int64()),
        ("n_missing", pa.int64()),
        *((f"{figure}_{what}", pa.float64()) for figure in FIGURES for what in ("mean", "std")),
    ]
)
STATUSES = ("ok", "unmet", "missing")
PURPOSE = "measuring a sweep"


def sweep(
    logits: Logits,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Sequence[str] | None = None,
    chains: Sequence[Sequence[str]] = (),
    methods: Sequence[str] = ("base", "rf", "margin"),
    budgets: Sequence[float] = (),
    relative_budgets: Sequence[float] = (),
    points: int | None = None,
    costs: Mapping[str, float] | Sequence[float] | None = None,
    cost_unit: str | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    validation: Cut = None,
    split: str = "test",
    test: Cut = None,
    seed: int = 0,
    seeds: Sequence[int] = (),
    redrawn: Sequence[str] | None = None,
    embedding: str | None = None,
    logit_kind: LogitKinds = None,
) -> pa.Table:
    """Measure methods over budgets: thresholds are chosen on validation, figures are of another split.

    Without budgets, relative budgets and points, every operating point of validation is measured.

    Args:
        logits: a table or arrays, as for fit().
        labels: as for compare(), like all that is not named here.
        example_ids: of arrays.
        models: the chain.
        chains: several, each cheapest first, in place of models.
        methods: names of methods.
        budgets: mean costs per example on validation.
        relative_budgets: the same as shares of the cost of the chain's most expensive model.
        points: so many budgets, the same for every method, evenly spaced from the mean cost of the cheapest model on
            validation to that of the most expensive.
        costs: of a call of each model.
        cost_unit: of costs.
        calibration_split: what methods are fitted on.
        validation_split: what they are chosen on.
        validation: in place of that split a share, or a pair of arrays.
        split: what they are measured on.
        test: in place of that split a share, or a pair of arrays.
        seed: of all random draws.
        seeds: several, in place of seed.
        redrawn: splits that are pooled and, with each seed, cut again into the same sizes; None for calibration and
            validation where there are several seeds, else none.
        embedding: what routers look at.
        logit_kind: of the models.

    Returns:
        A row for each chain, method, seed and budget.

    Raises:
        CaucError: as fit() does.

    Examples:
        >>> import cauc_ray
        >>> table = cauc_ray.sweep(cauc_ray.sample_logits(), methods=["rf"], points=5)
        >>> table.num_rows, max(table["accuracy"].to_pylist()) > 0.9
        (5, True)
    """
    options = SweepOptions.of(locals())
    require_methods(options.methods)
    rows: list[dict[str, Any]] = []
    for chain in options.chains or (options.models,):
        source = Source(logits, of_chain(options, chain), labels, example_ids)
        chosen, _ = choose_methods(options.methods, source.models, embedding=embedding, hidden=source.hidden)
        read = read_examples(source, PURPOSE, embedding, hidden=hidden_of(chosen, source.models))
        for each in options.all_seeds:
            drawn = redraw(dict(zip(options.cuts, read, strict=True)), options.pooled, each)
            for name in chosen:
                keys = {"chain": ",".join(source.models), "method": name, "seed": each}
                rows += measure(keys, source.models, options, drawn)
    chain_of = [examples.chain for examples in read]
    about: dict[str, str] = {"cost_unit": chain_of[0].costs.unit, "models": ",".join(source.models), "split": split}
    if len(options.chains) <= 1 and not options.pooled:
        about["fingerprints"] = json.dumps(fingerprints_of(*chain_of))
    return pa.Table.from_pylist(rows, schema=TABLE).replace_schema_metadata(about)


def measure(
    keys: Mapping[str, Any], models: Sequence[str], options: SweepOptions, splits: Mapping[str, Examples]
) -> list[dict[str, Any]]:
    """Fit a method and measure it at all budgets.

    keys: what names each of the rows, the method and seed among them.   splits: by name, calibration, validation, and
    what is measured on. Returns rows as RESULTS has them. Raises CaucError.
    """
    calibration, validation, final = splits.values()
    fitting = Fitting(calibration, validation, keys["seed"])
    method, fit = method_of(keys["method"], models)
    fitted, setup_s = set_up(fit, fitting)
    of_fit = fitted.points
    common = {"setup_s": setup_s, "n": len(final), "cost_unit": final.chain.costs.unit, **keys}
    wanted = list(_budgets(options, validation.chain.costs.means))
    if not wanted:
        return [common | row for row in _curve(fitted, final, np.arange(len(of_fit.cost)))]
    rows: list[dict[str, Any]] = []
    for kind, budget, cost in wanted:
        try:
            if not method.sees_labels:
                of_fit.index_of_best(cost)  # raises where the cheapest point costs more, with one setting too
            setting = fitted.setting(cost)
        except BudgetError as error:
            rows.append({"status": "unmet", "reason": str(error)})
        else:
            found = fitted.default if setting is None else setting
            index = np.flatnonzero(of_fit.settings == found)[:1]
            (row,) = _curve(fitted, final, index, settings=np.array([found]))
            rows.append(row | {"threshold": setting})
        rows[-1] |= {"budget_kind": kind, "budget": budget, "budget_cost": cost}
    return [common | row for row in rows]


def _curve(
    fitted: Family, final: Examples, points: np.ndarray, settings: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Return figures at points of validation, int (n,), or at settings of which validation has no more than one."""
    of_fit = fitted.points
    curve = fitted.curve(final, of_fit.settings[points] if settings is None else settings)
    of_last = float(final.chain.costs.means[-1])
    on_validation = len(points) == len(curve.cost)
    return [
        {
            "status": "ok",
            "threshold": float(curve.settings[row]),
            "validation_accuracy": float(of_fit.quality[points[row]]) if on_validation else None,
            "validation_cost": float(of_fit.cost[points[row]]) if on_validation else None,
            "accuracy": float(curve.accuracy[row]),
            "macro_f1": float(curve.macro_f1[row]),
            "cost": float(curve.cost[row]),
            "relative_cost": float(curve.cost[row]) / of_last if of_last > 0 else None,
            "avoided": 1.0 - float(curve.last_share[row]),
        }
        for row in range(len(curve.cost))
    ]


def _budgets(options: SweepOptions, costs: np.ndarray) -> Iterator[tuple[str, float, float]]:
    """Yield each budget: what it is a number of, the number, and the cost that it stands for.

    costs: (M,), each model's mean.
    """
    most_expensive = float(costs.max())
    yield from (("relative", share, share * most_expensive) for share in options.relative_budgets)
    yield from (("cost", budget, budget) for budget in options.budgets)
    if options.points is not None:
        for budget in np.linspace(costs.min(), most_expensive, options.points).tolist():
            yield "cost", budget, budget


def require_methods(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not a method, or one that trains on texts."""
    measuring.require_methods(names)
    for name in (name.removeprefix(f"{measuring.RECALIBRATED}+") for name in names):
        if name in METHODS and METHODS[name].needs_texts:
            raise ConfigError(f"method {name!r} trains a model on texts, which only `cauc compare` takes")


def of_chain(options: SweepOptions, models: Sequence[str] | None) -> MeasureOptions:
    """Return the options by which one chain is read."""
    return MeasureOptions.of({**dict(options), "models": models, "methods": ("all",)})


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each set, chain, method and budget the mean and spread of its seeds (SUMMARY), in the rows' order.

    n: seeds that have figures; n_unmet: those whose budget could not be met; n_missing: those without a value.
    Of each figure its mean over those n, and its standard deviation (n - 1), None below two.
    """
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(tuple(row.get(key) for key in KEYS), []).append(row)
    return [{**dict(zip(KEYS, key, strict=True)), **_spread(of_key)} for key, of_key in grouped.items()]


def _spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if row["status"] == "ok"]
    counts = {f"n_{status}": sum(row["status"] == status for row in rows) for status in ("unmet", "missing")}
    spread: dict[str, Any] = {"n": len(measured), **counts}
    for figure in FIGURES:
        values = [row[figure] for row in measured if row.get(figure) is not None]
        spread[f"{figure}_mean"] = float(np.mean(values)) if values else None
        spread[f"{figure}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return spread


def grids(summary: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return a table for people of each set and chain: methods by budgets."""
    made = []
    summary = [row for row in summary if row["budget"] is not None]
    for set_name, chain in dict.fromkeys((row["set"], row["chain"]) for row in summary):
        rows = [row for row in summary if (row["set"], row["chain"]) == (set_name, chain)]
        budgets = list(dict.fromkeys((row["budget_kind"], row["budget"]) for row in rows))
        methods = list(dict.fromkeys(row["method"] for row in rows))
        found = {(row["method"], row["budget_kind"], row["budget"]): row for row in rows}
        # A method whose mean left out the budgets that it does not meet would seem better than those that meet all.
        common = [at for at in budgets if all(_meets(found[method, *at]) for method in methods)]
        lines = [
            (
                method,
                *(_cell(found[method, *budget]) for budget in budgets),
                percent(float(np.mean([found[method, *at]["accuracy_mean"] for at in common])) if common else None),
            )
            for method in methods
        ]
        headings = [
            f"{budget:g} of the most expensive" if kind == "relative" else f"{budget:g}" for kind, budget in budgets
        ]
        mean = f"mean of the {len(common)} that all methods meet"
        made.append(Grid(f"{set_name}: {chain.replace(',', ' → ')}", ("method", *headings, mean), tuple(lines)))
    return made


def _meets(row: Mapping[str, Any]) -> bool:
    """Return whether a method has met a budget with all seeds."""
    return bool(row["n"]) and not (row["n_unmet"] or row["n_missing"])


def _cell(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return "not met" if row["n_unmet"] else "missing"
    of_last = row["relative_cost_mean"]
    at = f" at {of_last:.2f}" if of_last is not None else ""
    seeds = f" ({row['n']} of {total})" if (total := row["n"] + row["n_unmet"] + row["n_missing"]) > row["n"] else ""
    spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.2f}"
    return f"{100 * row['accuracy_mean']:.2f}{spread}{at}{seeds}"


def highlights(table: pa.Table, n_budgets: int = 5) -> list[dict[str, Any]]:
    """Return for each method of a sweep over one chain, at a few budgets, the point that validation chooses.

    The budgets are evenly spaced over the method's validation costs; equal choices are shown once. A method with one
    setting has that point.
    """
    found = []
    for name in table.column("method").unique().to_pylist():
        rows = table.filter(pc.equal(table.column("method"), name)).to_pylist()
        met = [row for row in rows if row["cost"] is not None]
        rows = [row for row in met if row["validation_cost"] is not None]
        if not rows:  # one setting, which validation does not choose
            found += [{**row, "budget": row["cost"]} for row in met[:1]]
            continue
        cost = np.array([row["validation_cost"] for row in rows])
        quality = np.array([row["validation_accuracy"] for row in rows])
        seen: set[int] = set()
        for budget in np.linspace(cost.min(), cost.max(), n_budgets):
            best = int(np.where(cost <= budget * (1 + 1e-9), quality, -np.inf).argmax())
            if best not in seen:
                seen.add(best)
                found.append({**rows[best], "budget": float(budget)})
    return found


def redraw(splits: Mapping[str, Examples], names: Sequence[str], seed: int) -> dict[str, Examples]:
    """Put the named splits together, shuffle them with a seed, and cut them into the sizes that they had.

    splits: of one chain, by name; those that are not named stay as they are.
    """
    if not names:
        return dict(splits)
    pooled = _joined([splits[name] for name in names])
    ends = np.cumsum([len(splits[name]) for name in names])
    shuffled = np.random.default_rng(seed).permutation(len(pooled))
    parts = np.split(shuffled, ends[:-1])
    drawn = {
        name: pooled.of_rows(np.sort(rows), f"{splits[name].chain.source}, redrawn with seed {seed}")
        for name, rows in zip(names, parts, strict=True)
    }
    return {**splits, **drawn}


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return examples of several splits as one; where splits differ in options, rows get -inf for those they lack."""
    chains, first = [part.chain for part in parts], parts[0]
    costs = [of.costs.per_call for of in chains]
    if any(each.ndim == 2 for each in costs):
        shapes = [(len(of), len(of.models)) for of in chains]
        costs = [np.concatenate(list(map(np.broadcast_to, costs, shapes)))]
    joined = replace(
        first.chain,
        logits=tuple(stacked(of_model) for of_model in zip(*(of.logits for of in chains), strict=True)),
        example_ids=tuple(example for of in chains for example in of.example_ids),
        labels=np.concatenate([of.labels for of in chains]),
        costs=Costs(first.chain.costs.unit, costs[0]),
        per_call_costs=any(of.per_call_costs for of in chains),
    )
    calls = [part.embedding_call for part in parts]
    paid = [np.broadcast_to(call.costs, len(part)) for call, part in zip(calls, parts, strict=True) if call is not None]
    embeddings = [part.embeddings for part in parts if part.embeddings is not None]
    texts = [text for part in parts for text in part.texts or ()]
    call = None if calls[0] is None else replace(calls[0], costs=np.concatenate(paid))
    hidden = {model: np.concatenate([part.hidden[model] for part in parts]) for model in first.hidden}
    vectors = np.concatenate(embeddings) if embeddings else None
    return Examples(joined, vectors, tuple(texts) or None, call, hidden=hidden)
