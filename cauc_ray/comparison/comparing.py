"""Methods over budgets, seeds, chains and sets: the Python side of `cauc compare`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from cauc_ray.api.offline import require_apart, require_output_file
from cauc_ray.api.options import (
    Amounts,
    Chains,
    Common,
    Costs,
    Cut,
    Flag,
    InputPath,
    Kinds,
    Names,
    OfChain,
    OnRay,
    Output,
    Pairs,
    Seconds,
    Seed,
    Seeds,
    checked_as,
    options_of,
    takes,
)
from cauc_ray.api.sources import Logits, Source
from cauc_ray.comparison.design import ComparedSet, CompareOptions
from cauc_ray.comparison.differences import with_differences
from cauc_ray.comparison.measuring import CONVENTIONS, Bench
from cauc_ray.comparison.result import Comparison, is_file
from cauc_ray.comparison.selection import choose_methods, require_trainable
from cauc_ray.comparison.tasks import require_comparison_folder, run_stored
from cauc_ray.data.logits import LogitTable, encoders
from cauc_ray.data.scores import ScoreTable, is_score_file
from cauc_ray.errors import (
    BudgetError,
    ConfigError,
    DataError,
    OptionError,
    equal_warnings_once,
    require_packages,
    unknown_name,
)
from cauc_ray.execution.outcomes import Outcome, Task
from cauc_ray.files.paths import AnyPath, absolute, content_digest, path_of
from cauc_ray.numbers.metrics import aiq, upper_hull
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.method import Reads

# What says nothing of a cell, or is a part of its keys.
_NOT_OF_CELLS = {
    *("sets", "chains", "models", "methods", "seeds", "seed"),
    *("address", "deadline_s", "reference", "output"),
}
_FIRST_COLUMNS = ("set", "chain", "method", "seed", "budget_kind", "budget", "budget_cost", "status", "reason")
# The shares of arrays that methods are chosen and measured on, without validation and test.
ARRAY_SHARES = (0.25, 0.5)


@takes(CompareOptions)
def compare(
    logits: Logits | None = None,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Common[Names | None] = None,
    methods: Common[Annotated[Names, Field(min_length=1)]] = ("all",),
    budget: Common[Annotated[float, Field(allow_inf_nan=False)] | None] = None,
    budgets: Common[Amounts] = (),
    relative_budgets: Common[Amounts] = (),
    points: Common[Annotated[int, Field(ge=2, le=1_000)] | None] = None,
    seeds: Common[Seeds] = (),
    split: Common[str] = "test",
    output: Common[Output | None] = None,
    reference: str | None = None,
    objective: Objective = "accuracy",
    embedding: str | None = None,
    texts: InputPath | None = None,
    text_column: str = "question",
    checkpoints: Pairs | None = None,
    chains: OfChain[Chains] = (),
    sets: OfChain[
        Annotated[
            Sequence[ComparedSet | Mapping[str, Any]],
            checked_as(tuple[ComparedSet, ...]),
            Flag(config_only=True),
        ]
    ] = (),
    costs: OfChain[Costs | None] = None,
    cost_unit: OfChain[str | None] = None,
    calibration_split: OfChain[str] = "calibration",
    validation_split: OfChain[str] = "validation",
    validation: OfChain[Cut] = None,
    test: OfChain[Cut] = None,
    training_split: OfChain[str | None] = None,
    seed: OfChain[Seed] = 0,
    redrawn: OfChain[Names | None] = None,
    logit_kind: OfChain[Kinds | None] = None,
    address: OnRay[str | None] = None,
    deadline_s: OnRay[Seconds] = 3600.0,
    on_cell: Callable[[Outcome, int, int], None] = lambda outcome, index, of: None,
) -> Comparison:
    """Fit methods, and measure them at budgets on a split that none of them has seen.

    A method that cannot run, or whose fit fails, is named with the reason; the others are measured.

    Args:
        logits: A table or arrays, as for fit(); or a file of scores, with columns query, model, score and, if known,
            cost, split and embedding.
        labels: Labels of arrays, as for fit().
        example_ids: Ids of the rows of arrays, as for fit().
        models: The chain, cheapest first (default: all models, by cost).
        methods: Names of methods; single is each model alone, recalibrated each model and each other method that is
            named once more on recalibrated logits.
        budget: Mean cost per example on validation that every method may spend (default: the cost of base at its own
            threshold).
        budgets: Several budgets.
        relative_budgets: Budgets as shares of the mean cost of the chain's most expensive model.
        points: Number of budgets, evenly spaced from the mean cost of the cheapest model to that of the most expensive.
        seeds: Several random seeds, in place of seed.
        split: Split to measure on.
        output: A file of results (.csv, .json, .parquet, .tex, .pdf, .png, .svg), or a folder with all of them, where
            finished cells are kept and not measured again.
        reference: Method that others are compared with (default: rf, else base).
        objective: What is maximised within a budget.
        embedding: Encoder of the table whose embeddings routers look at, or a model, whose call they pay (default: the
            first model's outputs).
        texts: Parquet file of the queries' texts, for methods that train on them.
        text_column: Column of the texts.
        checkpoints: Hub id or folder of the model that each of these methods trains, as
            routellm-bert=bert-base-uncased.
        chains: Several chains, each cheapest first, in place of models.
        sets: Several logit tables, in place of one: each a mapping with name, logits and, if need be, chains and
            embedding.
        costs: Cost of a call of each model, by name or in the order of models (default: the table's).
        cost_unit: Unit of the costs (default: the table's, else 'cost units').
        calibration_split: Split to fit on.
        validation_split: Split to choose thresholds on.
        validation: Share of the calibration examples to choose on, drawn at random (default: the validation split; of
            arrays, and of scores without splits, a quarter, or half of the rest). In Python, for arrays, also a pair as
            for fit().
        test: Share of the calibration examples to measure on (default: the test split; of arrays, and of scores without
            splits, a half, or half of the rest). In Python, for arrays, also a pair.
        training_split: Split that routers and scorers are trained on (default: the calibration split).
        seed: Random seed.
        redrawn: Splits that are pooled and cut into the same sizes again with each seed (default: with several seeds
            calibration and validation, else none).
        logit_kind: Kind of the logits, of all models or by model: raw, log-probabilities, probabilities or surrogate
            (default: as declared in the table, else raw).
        address: Address of a Ray cluster, or local, on which each method, chain and seed is a task (default:
            RAY_ADDRESS, else this process).
        deadline_s: On a cluster, seconds for one method on one chain.
        on_cell: Called with the outcome of each cell, its number and their count.

    Returns:
        A row for each set, chain, method, seed and budget, and the curves.

    Raises:
        CaucError: As fit() does, and where no method can be measured.

    Examples:
        >>> import cauc_ray
        >>> comparison = cauc_ray.compare(cauc_ray.sample_logits(), methods=["base", "rf", "oracle"])
        >>> comparison.row("oracle")["accuracy"] >= comparison.row("rf")["accuracy"]
        True
    """
    is_cut = isinstance(logits, Mapping) or (is_score_file(logits) and ScoreTable.read(logits).split_of is None)
    shares = _array_shares(validation, test) if is_cut else {}
    options: CompareOptions = options_of(compare).of({**locals(), **shares})
    with equal_warnings_once():
        return _compared(options, logits, labels, example_ids, output, on_cell)


def _compared(
    options: CompareOptions,
    logits: Logits | None,
    labels: Any,
    example_ids: Any,
    output: str | AnyPath | None,
    on_cell: Callable[[Outcome, int, int], None],
) -> Comparison:
    require_trainable(options.checkpoints or {})
    on_ray = options.address is not None
    benches, not_run = _benches(options, logits, labels, example_ids)
    folder = _require_output(output, [bench.logits for bench in benches if not isinstance(bench.logits, Mapping)])
    cells = [cell for bench in benches for cell in _cells(bench, on_ray=on_ray, is_stored=folder is not None)]
    outcomes = run_stored(
        folder,
        [task for _, task in cells],
        on_ray=on_ray,
        deadline_s=options.deadline_s,
        address=options.address,
        on_outcome=on_cell,
    )
    by_cell = {key: outcome for (key, _), outcome in zip(cells, outcomes, strict=True)}
    comparison = _comparison(options, benches, by_cell, not_run)
    _require_figures(comparison, options)
    if output is not None:
        comparison.save(output)
    return comparison


def _array_shares(validation: Cut, test: Cut) -> dict[str, Cut]:
    """Return how arrays are cut that have no splits of their own."""
    if validation is None and test is None:
        return dict(zip(("validation", "test"), ARRAY_SHARES, strict=True))
    if isinstance(validation, float) and test is None:
        return {"test": (1 - validation) / 2}
    if isinstance(test, float) and validation is None:
        return {"validation": (1 - test) / 2}
    return {}


def _benches(
    options: CompareOptions, logits: Any, labels: Any, example_ids: Any
) -> tuple[list[Bench], list[dict[str, Any]]]:
    """Return the chains to measure, and the methods that cannot run on them. Raises CaucError for what is missing."""
    if (logits is None) is not bool(options.sets):
        raise ConfigError("compare one logit table or arrays, or the sets of a config; give one of the two")
    benches, not_run, cache = list[Bench](), list[dict[str, Any]](), dict[str, Any]()
    plain = options.model_copy(update={"sets": (), "chains": ()})
    for compared in options.sets or (None,):
        chains = options.chains if compared is None else compared.chains
        encoder = (compared and compared.embedding) or options.embedding
        for chain in chains or (options.models,):
            of_chain = plain.model_copy(update={"models": chain})
            source = Source(logits if compared is None else compared.logits, of_chain, labels, example_ids)
            of_chain = of_chain.model_copy(update={"models": source.models, "costs": source.costs})
            name, located = "arrays", logits
            if source.gives != "logits":
                _require_enough(of_chain, str(source.path), source.gives)
            if source.table is not None:
                _require_splits(source.table, of_chain, encoder)
                located = absolute(source.table.path)
                name = compared.name if compared else located.name
            elif source.scores is not None:
                located = absolute(source.scores.path)
                name = compared.name if compared else located.stem
            elif options.address is not None:
                raise OptionError("arrays are compared in this process: leave {address} out, or write a logit table")
            trainable = options.checkpoints or () if options.texts is not None or source.scores is not None else ()
            chosen, absent = choose_methods(
                options.methods, source.models, trainable, encoder, source.hidden, gives=source.gives
            )
            if options.reference is not None and options.reference not in chosen:
                raise ConfigError(f"reference: {unknown_name('method', options.reference, chosen)}")
            bench = Bench(
                *(name, located, source.models, tuple(chosen), encoder, of_chain, labels, example_ids, cache),
                gives=source.gives,
            )
            benches.append(bench)
            not_run += [{**bench.keys, **entry} for entry in absent]
    return benches, not_run


def _require_enough(options: CompareOptions, path: str, gives: Reads) -> None:
    """Raise ConfigError for options of a comparison that need logits."""
    if not (options.all_budgets or options.relative_budgets or options.points):
        raise OptionError(
            f"{path} has no logits: Base cannot give the budget; give {{budget}}, {{budgets}}, "
            "{relative_budgets} or {points}"
        )
    reads_embedding = options.embedding is not None and gives == "neither"
    if options.objective != "accuracy" or options.texts is not None or reads_embedding:
        raise OptionError(f"{path} has no logits: leave {{objective}}, {{texts}}, {{embedding}} out")


def _require_splits(table: LogitTable, options: CompareOptions, encoder: str | None) -> None:
    """Raise ConfigError or DataError where a table lacks an encoder, or a model a split."""
    if encoder is not None and encoder not in encoders(table.path):
        raise ConfigError(f"{table.path}: {unknown_name('encoder', encoder, encoders(table.path))}")
    for model, name in product(options.models or (), options.cuts):
        if options.cuts[name] is None and name not in table.splits(model):
            raise DataError(f"{table.path}: model {model!r}: {unknown_name('split', name, table.splits(model))}")


def _cells(bench: Bench, *, on_ray: bool, is_stored: bool) -> list[tuple[tuple[Any, ...], Task]]:
    """Return what is measured of a chain, by (bench, seed, method); without a method what holds for all of them."""
    part, options = f"{bench.set_name}, {' → '.join(bench.models)}", bench.options
    identity: list[Any] = []
    if is_stored and not isinstance(bench.logits, Mapping):
        files = [path_of(bench.logits), *([] if options.texts is None else [options.texts])]
        dump = options.model_dump(mode="json", exclude=_NOT_OF_CELLS)
        identity = [[content_digest(file) for file in files], bench.keys, bench.embedding, options.pooled, dump]
    facts = Task(part, "chain", bench.facts, json.dumps([*identity, "chain"]))
    cells: list[tuple[tuple[Any, ...], Task]] = [((id(bench), None, None), facts)]
    for seed, method in product(options.all_seeds, bench.methods):
        measured = replace(bench, methods=(method,), cache={}) if on_ray else bench
        measure, name = partial(measured.measure, method, seed), f"{method}, seed {seed}"
        cells.append(((id(bench), seed, method), Task(part, name, measure, json.dumps([*identity, method, seed]))))
    return cells


def _comparison(
    options: CompareOptions,
    benches: Sequence[Bench],
    by_cell: Mapping[tuple[Any, ...], Outcome],
    not_run: Sequence[dict[str, Any]],
) -> Comparison:
    """Return the values of cells as one result."""
    facts, rows, curves, failed = (
        list[dict[str, Any]](),
        list[dict[str, Any]](),
        list[pa.Table](),
        list[dict[str, Any]](),
    )
    for bench in benches:
        of_chain = by_cell[id(bench), None, None]
        content = {**bench.keys, "models": list(bench.models), "n": 0, "cost_unit": ""}
        content |= {} if of_chain.error is not None else of_chain.value.content
        measured: list[dict[str, Any]] = []
        values: dict[tuple[str, int], tuple[float, pa.Table]] = {}
        for method, seed in product(bench.methods, options.all_seeds):
            outcome, keys = by_cell[id(bench), seed, method], {**bench.keys, "method": method, "seed": seed}
            if outcome.error is None:
                content_rows = outcome.value.content
                values[method, seed] = content_rows[0]["setup_s"], outcome.value.table
                measured += content_rows
            else:
                failed.append({**keys, "why": f"failed: {outcome.error}"})
                measured.append({**keys, "status": "failed", "reason": outcome.error})
        if of_chain.error is not None and values:
            failed.append({**bench.keys, "method": "chain", "seed": None, "why": f"failed: {of_chain.error}"})
        reference = options.reference or next((n for n in ("rf", "base") if n in bench.methods), bench.methods[0])
        sums = _sums_of_curves(values)
        rows += [
            row | sums.get((row["method"], row["seed"]), {"setup_ratio": None, "aiq": None})
            for row in with_differences(measured, content, options, reference)
        ]
        curves += [curve for _, curve in values.values()]
        facts.append({**content, "reference": reference})
    splits = dict(zip(("calibration", "validation", "final", "training"), [*options.cuts, None], strict=False))
    columns = dict.fromkeys((*_FIRST_COLUMNS, *(key for row in rows for key in row)))
    rows = [columns | row for row in rows]
    is_free = not (options.all_budgets or options.relative_budgets or options.points)
    costs = {row["budget_cost"] for row in rows if row["status"] != "failed"}
    about = {
        "splits": splits,
        "budget": costs.pop() if len(costs) == 1 else None,
        "budget_rule": f"what base costs on {options.validation_split} at its own threshold" if is_free else "given",
        "objective": options.objective,
        "seed": options.seed,
        "seeds": list(options.all_seeds),
        "redrawn": list(options.pooled),
        "conventions": dict(CONVENTIONS),
        **(facts[0] if len(facts) == 1 else {"chains": facts}),
    }
    return Comparison(about, rows, pa.concat_tables(curves) if curves else pa.table({}), [*not_run, *failed])


def _sums_of_curves(
    values: Mapping[tuple[str, int], tuple[float, pa.Table]],
) -> dict[tuple[str, int], dict[str, float | None]]:
    """Return by method and seed what depends on other methods: its setup time over Base's, and AIQ.

    Args:
        values: The seconds of the setup, and the curve.
    """
    largest = {
        seed: max(float(pc.max(curve["cost"]).as_py()) for (_, s), (_, curve) in values.items() if s == seed)
        for _, seed in values
    }
    sums = {}
    for (method, seed), (setup_s, curve) in values.items():
        columns = ("validation_cost", "validation_accuracy", "cost", "accuracy")
        *on_validation, cost, accuracy = (curve[name].to_numpy() for name in columns)
        hull, base = upper_hull(*on_validation), values.get(("base", seed))
        ratio = None if base is None else setup_s / base[0]
        sums[method, seed] = {"setup_ratio": ratio, "aiq": aiq(cost[hull], accuracy[hull], largest[seed])}
    return sums


def _require_figures(comparison: Comparison, options: CompareOptions) -> None:
    """Raise the reason where no method can be measured, or none within the only budget."""
    reasons = {row["status"]: row["reason"] for row in reversed(comparison.rows)}
    if set(reasons) == {"unmet"} and options.budget is not None:
        raise BudgetError(reasons["unmet"])
    if set(reasons) == {"failed"}:
        raise ConfigError(f"no method could be measured: {reasons['failed']}")


def _require_output(output: str | AnyPath | None, inputs: Sequence[Any]) -> AnyPath | None:
    """Check an output before any work; return it if it is a folder."""
    if output is None:
        return None
    path = path_of(output)
    if path.suffix in (".pdf", ".png", ".svg"):
        require_packages("a plot", "reports", "matplotlib")
    if is_file(path):
        require_output_file(path, *inputs)
        return None
    require_apart(path, *inputs)
    require_comparison_folder(path)
    return path
