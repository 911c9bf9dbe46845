"""What fills the tables and figures: comparisons by compare(), fusion of pairs, and reliability of confidences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.result import Comparison
from cauc_ray.data.logits import LogitTable
from cauc_ray.execution.outcomes import Outcome
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.metrics import reliability_bins
from cauc_ray.policies.methods.base import BasePolicy, fit_base
from jobs.paper.config import Chain, ComparedChain, Entry, PaperConfig, ReliabilityFigure

# CAUC at its own threshold, CAUC-RF at that one, and CAUC-RF at its best within the cost of the first; within which the
# best pair of the chain's models is chosen, too.
OURS = {"base": "base", "rf-shared": "rf_shared", "rf": "rf_best"}
GROWING = {**OURS, "best-pair": "pair"}
# A confidence from here on is called high (paper, figure on calibration).
HIGH = 0.85
OnCell = Callable[[Outcome, int, int], None]


@dataclass(frozen=True, slots=True)
class MeasuredChain:
    """A chain of a table, with the rows of its comparison and what holds for all of them."""

    chain: Chain
    facts: dict[str, Any]
    rows: list[dict[str, Any]]

    def ours(self, models: Sequence[str]) -> dict[str, Any]:
        """Return quality, cost and relative cost of CAUC and CAUC-RF on some models, by the names of OURS."""
        quality = "accuracy" if self.chain.objective == "accuracy" else "macro_f1"
        rows = {row["method"]: row for row in self.rows if row["chain"] == ",".join(models)}
        columns = {"quality": quality, "cost": "cost", "relative_cost": "relative_cost"}
        return {
            f"{name}_{figure}": rows[method][column]
            for method, name in GROWING.items()
            if method in rows
            for figure, column in columns.items()
        }


def compare_chains(
    config: PaperConfig, part: str, chains: Sequence[Chain], on_cell: OnCell
) -> Iterator[tuple[Sequence[Chain], Comparison]]:
    """Compare methods on the chains of a table, those of the same split and objective at once.

    Finished cells are kept in a folder of the output, and not measured again.
    """
    groups: dict[str, list[Chain]] = {}
    for chain in chains:
        groups.setdefault(json.dumps(_shared_options(config, chain)), []).append(chain)
    methods = {"complementarity": tuple(OURS), "growing-chain": tuple(GROWING)}.get(part, config.methods)
    for number, (options, group) in enumerate(groups.items(), start=1):
        sets = [
            {
                "name": chain.name,
                "logits": config.logits / chain.set,
                "chains": grown(config, chain) if part == "growing-chain" else [chain.models],
                "embedding": getattr(chain, "embedding", None),
            }
            for chain in group
        ]
        comparison = compare(
            sets=sets,
            methods=methods,
            seeds=config.seeds[:1] if part == "setup-time" else config.seeds,
            redrawn=None if part == "setup-time" else config.redrawn,
            address=None if part == "setup-time" else config.address,  # what is timed has the machine to itself
            deadline_s=config.deadline_s,
            output=comparison_folder(config, part, number),
            on_cell=on_cell,
            **json.loads(options),
        )
        yield group, comparison


def comparison_folder(config: PaperConfig, part: str, number: int = 1) -> AnyPath:
    """Return the output of a table's comparison, of which there are several where splits or objectives differ."""
    return config.output / "comparisons" / (part if number == 1 else f"{part}-{number}")


def _shared_options(config: PaperConfig, chain: Chain) -> dict[str, Any]:
    options = chain.model_dump(include={"split", "objective", "checkpoints"})
    texts = chain.texts if isinstance(chain, ComparedChain) else None
    return options if texts is None else {**options, "texts": str(config.logits / texts)}


def grown(config: PaperConfig, chain: Chain) -> list[tuple[str, ...]]:
    """Return the chains from the last model alone to all models: added in order, called in the order of costs."""
    costs = LogitTable(config.logits / chain.set).declared_costs
    *added, last = chain.models
    return [(*sorted(added[:n], key=lambda model: costs.get(model, 0.0)), last) for n in range(len(added) + 1)]


def measured_chains(group: Sequence[Chain], comparison: Comparison) -> Iterator[MeasuredChain]:
    """Yield each chain that has figures, with a row for each method: the means over seeds."""
    for chain in group:
        by_method: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in comparison.rows:
            if row["set"] == chain.name and row["status"] != "failed":
                by_method.setdefault((row["chain"], row["method"]), []).append(row)
        rows = [mean_of(of_method) for of_method in by_method.values()]
        facts = next(facts for facts in comparison.chains if facts["set"] == chain.name)
        if rows:
            yield MeasuredChain(chain, facts, rows)


def mean_of(values: Sequence[Any]) -> Any:
    """Return the mean of numbers, of lists and of mappings of them; the first of what else there is.

    >>> mean_of([{"cost": 1, "interval": [0.0, 1.0], "note": "a"}, {"cost": 2, "interval": [1.0, 2.0], "note": "a"}])
    {'cost': 1.5, 'interval': [0.5, 1.5], 'note': 'a'}
    """
    first = values[0]
    if any(value is None for value in values):
        return None
    if len(values) == 1 or isinstance(first, bool):
        return first
    if isinstance(first, Mapping):
        return {key: mean_of([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [mean_of(items) for items in zip(*values, strict=True)]
    return float(np.mean(values)) if isinstance(first, int | float) else first


def fusion(table: AnyPath, chain: Chain) -> dict[str, Any]:
    """Measure Base on two models at its own threshold, without and with fusing the first.

    Returns:
        direct and fuse, the qualities; cr, the complementarity rate; gain_of_fusing; cr_chose_the_better.
    """
    base = cauc_ray.fit(table, models=chain.models, method="base")
    assert isinstance(base, BasePolicy)
    first, last = base.stages
    direct, fused = (
        _quality(table, base.model_copy(update={"stages": [first.model_copy(update={"fused": is_fused}), last]}), chain)
        for is_fused in (False, True)
    )
    rate, gain = first.complementarity_rate, fused - direct
    assert rate is not None
    # The sign of the rate chose the better of the two, or as good.
    is_right = gain >= 0 if rate > 0 else gain <= 0
    return {"direct": direct, "fuse": fused, "cr": rate, "gain_of_fusing": gain, "cr_chose_the_better": is_right}


def _quality(table: AnyPath, policy: BasePolicy, chain: Chain) -> float:
    measures = cauc_ray.evaluate(table, policy, split=chain.split).measures
    assert measures.accuracy is not None
    quality = measures.accuracy.value if chain.objective == "accuracy" else measures.macro_f1
    assert quality is not None
    return quality


def fusion_gains(config: PaperConfig, entry: Entry) -> list[dict[str, Any]]:
    """Measure fusion for every pair of a set whose second model is the more expensive and more accurate.

    Both by the calibration split: whether a cascade of the two is worth while is known before the test.
    """
    table = LogitTable(config.logits / entry.set)
    alone = {}
    for model in table.models:
        chain = table.read_chain([model], "calibration")
        correct = chain.logits[0].argmax(axis=1) == chain.labels
        alone[model] = (float(chain.costs.means[0]), float(correct.mean()))
    rows = []
    for first, last in combinations(sorted(alone, key=lambda model: alone[model]), 2):
        if alone[first][0] < alone[last][0] and alone[first][1] < alone[last][1]:
            pair = Chain(name=entry.name, set=entry.set, split=entry.split, models=(first, last))
            measured = fusion(table.path, pair)
            row = {"set": entry.name, "first": first, "last": last, "complementarity_rate": measured["cr"]}
            rows.append(row | {key: measured[key] for key in ("gain_of_fusing", "cr_chose_the_better")})
    return rows


def reliability(config: PaperConfig, figure: ReliabilityFigure) -> list[dict[str, Any]]:
    """Measure each model's confidences, raw and at the temperature fitted on calibration: a row for each bin."""
    table, rows = LogitTable(config.logits / figure.set), list[dict[str, Any]]()
    for model in figure.required_models:
        stage = fit_base(table.read_chain([model], "calibration")).stages[0]
        test = table.read_chain([model], figure.split)
        test.require_labels("a figure of calibration")
        predictions, raw = top_option(test.logits[0].astype(np.float64))
        _, calibrated = top_option(stage.scores(test.logits[0]))
        for temperature, confidences in ((1.0, raw), (stage.temperature, calibrated)):
            bins = reliability_bins(confidences, predictions == test.labels)
            of_model = {
                "model": model,
                "temperature": temperature,
                "calibrated": confidences is calibrated,
                "cost": float(test.costs.means[0]),
                "cost_unit": test.costs.unit,
                "n_high": int((confidences >= HIGH).sum()),
            }
            names = ("confidence", "accuracy", "accuracy_low", "accuracy_high")
            shares = zip(bins.confidence, bins.accuracy, bins.low, bins.high, strict=True)
            for centre, n, values in zip(bins.centres.tolist(), bins.counts.tolist(), shares, strict=True):
                of_bin = [float(value) if n else None for value in values]
                rows.append({**of_model, "bin_centre": centre, "n": n, **dict(zip(names, of_bin, strict=True))})
    return rows
