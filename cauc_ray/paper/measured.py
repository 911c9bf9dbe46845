"""What the task of each entry measures: content for JSON, and for comparisons their curves as a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from cauc_ray.api.offline import evaluate, fit
from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.result import Comparison
from cauc_ray.comparison.tasks import Written
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import GuardWarning
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.metrics import reliability_bins
from cauc_ray.paper.config import Chain, ComparedChain, Entry, GrowingChain, PaperConfig, ReliabilityFigure
from cauc_ray.policies.cauc import BasePolicy
from cauc_ray.policies.fitting import fit_base
from cauc_ray.policies.policy import Policy

RELIABILITY = "calibration-reliability"
GAINS = "complementarity-gain"
# A confidence from here on is called high (paper, figure on calibration).
HIGH = 0.85


def measure(config: PaperConfig, part: str, entry: Entry) -> Written:
    """Measure an entry of a table or figure. Raises CaucError.

    Guards do not warn: tables show the method on every chain, also where a policy of it would disappoint.
    """
    with warnings.catch_warnings(action="ignore", category=GuardWarning):
        return _MEASURED.get(part, _compared)(config, entry)


def comparison_of(value: Written) -> Comparison:
    """Return the comparison that the task of a compared chain measured."""
    return Comparison(curves=value.table, **value.content)


def _compared(config: PaperConfig, chain: ComparedChain) -> Written:
    options = chain.model_dump(include={"models", "embedding", "text_column", "checkpoints", "split", "objective"})
    texts = None if chain.texts is None else str(config.logits / chain.texts)
    found = compare(str(config.logits / chain.set), methods=config.methods, seed=config.seed, texts=texts, **options)
    rows = [row for row in found.rows if row["status"] != "failed"]
    return Written({"about": found.about, "rows": rows, "not_run": found.not_run}, found.curves)


def _pair(config: PaperConfig, pair: Chain) -> Written:
    """Measure what fusing does for a pair, and RF at Base's threshold and at its best within the cost Base has."""
    table = config.logits / pair.set
    base = _fit_base(table, pair.models)
    row = pair.keys | _fused(table, base, pair) | {"cost_unit": base.cost_unit}
    return Written([row | _rf(table, base, pair)])


def _gains(config: PaperConfig, entry: Entry) -> Written:
    """Measure what fusing does for every pair of a set whose second model is the more expensive and more accurate.

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
            found = _fused(table.path, _fit_base(table.path, pair.models), pair)
            row = {"set": entry.name, "first": first, "last": last, "complementarity_rate": found["cr"]}
            rows.append(row | {key: found[key] for key in ("gain_of_fusing", "cr_chose_the_better")})
    return Written(rows)


def _fused(table: AnyPath, base: BasePolicy, chain: Chain) -> dict[str, Any]:
    """Measure Base on two models at its own threshold, without and with fusing the first."""
    first, last = base.stages
    stages = [(first.model_copy(update={"fused": fused}), last) for fused in (False, True)]
    direct, fused = (_figures(table, base.model_copy(update={"stages": both}), chain) for both in stages)
    rate, gain = first.complementarity_rate, fused["quality"] - direct["quality"]
    assert rate is not None
    # The sign of the rate chose the better of the two, or as good.
    chose_the_better = gain >= 0 if rate > 0 else gain <= 0
    found = {"direct": direct["quality"], "fuse": fused["quality"], "cr": rate, "gain_of_fusing": gain}
    costs = {"base_cost": direct["cost"], "base_relative_cost": direct["relative_cost"]}
    return {"n": direct["n"], **found, "cr_chose_the_better": chose_the_better, **costs}


def _growth(config: PaperConfig, chain: GrowingChain) -> Written:
    """Measure a chain from its last model alone to all of its models: Base, and RF at two thresholds."""
    table = config.logits / chain.set
    rows, costs = [], LogitTable(table).declared_costs
    for n in range(len(chain.models) + 1):
        # Added in the order of the config, called in that of costs.
        models = (*sorted(chain.models[:n], key=lambda model: costs.get(model, 0.0)), chain.last)
        base = _fit_base(table, models)
        row = chain.keys | {"models": list(models), "n_models": n + 1, "added": (chain.last, *chain.models)[n]}
        found = _figures(table, base, chain)
        row |= {"n": found.pop("n"), "cost_unit": base.cost_unit}
        rows.append(row | {f"base_{figure}": value for figure, value in found.items()} | _rf(table, base, chain))
    return Written(rows)


def _reliability(config: PaperConfig, figure: ReliabilityFigure) -> Written:
    """Measure each model's confidence, raw and at the temperature fitted on calibration."""
    table = LogitTable(config.logits / figure.set)
    rows, unit = [], ""
    for model in figure.wanted:
        stage = fit_base(table.read_chain([model], "calibration")).stages[0]
        test = table.read_chain([model], figure.split)
        test.require_labels("a figure of calibration")
        unit, cost = test.costs.unit, float(test.costs.means[0])
        predictions, raw = top_option(test.logits[0].astype(np.float64))
        _, calibrated = top_option(stage.scores(test.logits[0]))
        for temperature, confidences in ((1.0, raw), (stage.temperature, calibrated)):
            bins = reliability_bins(confidences, predictions == test.labels)
            of_all = {"model": model, "temperature": temperature, "calibrated": confidences is calibrated, "cost": cost}
            of_all["n_high"] = int((confidences >= HIGH).sum())
            names = ("confidence", "accuracy", "accuracy_low", "accuracy_high")
            columns = zip(bins.confidence, bins.accuracy, bins.low, bins.high, strict=True)
            for centre, n, found in zip(bins.centres.tolist(), bins.counts.tolist(), columns, strict=True):
                shares = [float(value) if n else None for value in found]
                rows.append({**of_all, "bin_centre": centre, "n": n, **dict(zip(names, shares, strict=True))})
    return Written({"cost_unit": unit, "rows": rows})


_MEASURED: Mapping[str, Callable[[PaperConfig, Any], Written]] = {
    "complementarity": _pair,
    "growing-chain": _growth,
    RELIABILITY: _reliability,
    GAINS: _gains,
}


def _fit_base(table: AnyPath, models: Sequence[str]) -> BasePolicy:
    policy = fit(str(table), models=models, method="base")
    assert isinstance(policy, BasePolicy)
    return policy


def _rf(table: AnyPath, base: BasePolicy, chain: Chain) -> dict[str, Any]:
    """Measure RF at Base's threshold, as the paper's policies share a schedule, and at its best within Base's cost."""
    assert base.expected is not None
    rules: dict[str, dict[str, Any]] = {
        "rf_shared": {"threshold": base.threshold},
        "rf_best": {"budget": base.expected.cost, "objective": chain.objective},
    }
    row: dict[str, Any] = {}
    for name, rule in rules.items():
        found = _figures(table, fit(str(table), models=base.models, method="rf", **rule), chain)
        row |= {f"{name}_{figure}": value for figure, value in found.items() if figure != "n"}
    return row


def _figures(table: AnyPath, policy: Policy, chain: Chain) -> dict[str, Any]:
    """Measure a policy on the chain's split."""
    measures = evaluate(str(table), policy, split=chain.split).measures
    assert measures.accuracy is not None
    quality = measures.accuracy.value if chain.objective == "accuracy" else measures.macro_f1
    return {"n": measures.n, "quality": quality, "cost": measures.cost, "relative_cost": measures.relative_cost}
