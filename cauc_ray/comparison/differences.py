"""Paired differences of methods on the same rows, pooled over seeds and budgets."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.comparison.design import CompareOptions
from cauc_ray.comparison.redrawing import drawn_rows
from cauc_ray.numbers.intervals import N_RESAMPLES, Difference, holm, signs
from cauc_ray.numbers.types import Bools, Floats, Ints

# What a row has of its difference, of the accuracy at a budget and of the area over budgets.
DIFFERENCE = ("difference", "difference_interval", "difference_p")
AREA_DIFFERENCE = ("area_difference", "area_difference_interval", "area_difference_p")
_KEYS = ("budget_kind", "budget")


def packed(right: Bools) -> str:
    """Return which rows are right as text, which unpacked() reads."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def unpacked(text: str, n: int) -> Ints:
    """Return 1 for each of n rows that is right, else 0, uint8 (n,)."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8), count=n)


def pooled_difference(totals: Ints, n_terms: float, seed: int, error_rate: float) -> Difference:
    """Return a mean paired difference with its percentile bootstrap interval over rows, and a sign-flip p-value.

    A row keeps all its terms (seeds, budgets) when it is drawn, so that answers of one row to several seeds do not
    count as several rows. The p-value is the share of random signs of the rows' totals whose sum is as far from zero:
    the sign test where totals differ in their sign alone.

    Args:
        totals: For each row the sum of its differences, int (N,): right by one method but not the other is 1 or -1.
        n_terms: Differences for each row that the sum is divided by.
        seed: Of the resamples.
        error_rate: Of the interval, 0.05 for 95 %.

    >>> pooled_difference(np.repeat([1, 0], [10, 90]), 1, 0, 0.05)
    Difference(value=0.1, low=0.05, high=0.16, n=100, p_value=0.001953125)
    """
    n, rng = len(totals), np.random.default_rng(seed)
    values, counts = np.unique(totals, return_counts=True)
    means = rng.multinomial(n, counts / n, size=N_RESAMPLES) @ values / (n * n_terms)
    low, high = np.quantile(means, [error_rate / 2, 1 - error_rate / 2])
    return Difference(float(totals.sum() / (n * n_terms)), float(low), float(high), n, _sign_flip(totals, rng))


def _sign_flip(totals: Ints, rng: np.random.Generator) -> float:
    sizes, counts = np.unique(np.abs(totals[totals != 0]), return_counts=True)
    if len(sizes) < 2:
        return signs(int((totals > 0).sum()), int((totals < 0).sum()), len(totals)).p_value
    flipped: Floats = (2 * rng.binomial(counts, 0.5, size=(N_RESAMPLES, len(counts))) - counts) @ sizes
    n_as_far = int((np.abs(flipped) >= abs(totals.sum())).sum())
    return (1 + n_as_far) / (1 + N_RESAMPLES)


def adjusted_differences(
    totals: Mapping[str, Ints], n_terms: float, seed: int, names: tuple[str, str, str]
) -> dict[str, dict[str, object]]:
    """Return by method its pooled difference, with p-values and intervals as Holm adjusts them over the methods.

    Args:
        totals: By method, as for pooled_difference.
        n_terms: As for pooled_difference.
        seed: As for pooled_difference.
        names: How a row names the difference, its interval and its p-value.
    """
    p_values = [pooled_difference(of_method, n_terms, seed, 0.05).p_value for of_method in totals.values()]
    adjusted, error_rates = holm(np.array(p_values))
    rows = {}
    for name, p_value, error_rate in zip(totals, adjusted.tolist(), error_rates.tolist(), strict=True):
        pooled = pooled_difference(totals[name], n_terms, seed, error_rate)
        rows[name] = dict(zip(names, (pooled.value, [pooled.low, pooled.high], p_value), strict=True))
    return rows


def with_differences(
    rows: Sequence[dict[str, Any]], facts: Mapping[str, Any], options: CompareOptions, reference: str
) -> list[dict[str, Any]]:
    """Return the rows of a chain with their differences to a reference method at each budget and over budgets.

    Args:
        rows: Of all methods, seeds and budgets; one without figures for a method that failed with a seed.
        facts: Of the chain, with the number of rows of each split.
        options: Splits and seeds.
        reference: The method that others are compared with.
    """
    seeds = options.all_seeds
    budgets = list(dict.fromkeys((row["budget_kind"], row["budget"]) for row in rows if "right" in row))
    measured = {(row["method"], row["budget_kind"], row["budget"], row["seed"]): row for row in rows if "right" in row}
    methods = [
        method
        for method in dict.fromkeys(row["method"] for row in rows)
        if all((method, *budget, seed) in measured for budget in budgets for seed in seeds)
    ]

    def meets(method: str, budget: tuple[str, float | None]) -> bool:
        return all(measured[method, *budget, seed]["status"] == "ok" for seed in seeds)

    steered = [m for m in methods if budgets and measured[m, *budgets[0], seeds[0]]["n_settings"] > 1]
    common = [budget for budget in budgets if all(meets(method, budget) for method in steered)]
    hits = _Hits(measured, facts, options)
    differences: dict[tuple[str, Any, Any], dict[str, Any]] = {}
    for budget in budgets if "n_rows" in facts else ():
        compared = hits.differences(methods, reference, [budget])
        adjusted = adjusted_differences(compared, hits.n_terms, seeds[0], DIFFERENCE)
        differences |= {(method, *budget): difference for method, difference in adjusted.items()}
    areas: dict[str, dict[str, Any]] = {}
    if len(common) > 1 and "n_rows" in facts:
        compared = hits.differences(steered, reference, common)
        areas = adjusted_differences(compared, hits.n_terms * len(common), seeds[0], AREA_DIFFERENCE)
        for method in steered:
            at_common = [measured[method, *budget, seed]["accuracy"] for budget in common for seed in seeds]
            areas[method] = {"area": float(np.mean(at_common)), "area_budgets": len(common), **areas.get(method, {})}
    names = (*DIFFERENCE, "area", "area_budgets", *AREA_DIFFERENCE)
    completed = []
    for row in rows:
        difference = differences.get((row["method"], row.get("budget_kind"), row.get("budget")), {})
        places = (
            [{}] if "right" in row or not budgets else [dict(zip(_KEYS, budget, strict=True)) for budget in budgets]
        )
        for place in places:
            whole = dict.fromkeys(names) | row | place | difference | areas.get(row["method"], {})
            completed.append({key: value for key, value in whole.items() if key != "right"})
    return completed


@dataclass(frozen=True, slots=True)
class _Hits:
    """Which rows methods get right, pooled over seeds.

    Attributes:
        measured: The rows of the comparison by method, kind of budget, budget and seed.
        facts: Of the chain.
        options: Splits and seeds.
    """

    measured: Mapping[tuple[Any, ...], Mapping[str, Any]]
    facts: Mapping[str, Any]
    options: CompareOptions

    @property
    def n_examples(self) -> int:
        """Return the examples that seeds may measure on: those of all splits that are drawn again with this one."""
        splits = self.options.pooled if self.options.split in self.options.pooled else (self.options.split,)
        return sum(self.facts["n_rows"][split] for split in splits)

    @property
    def n_terms(self) -> float:
        """Return how often seeds measure on an example, in the mean."""
        n_measured = len(self.options.all_seeds) * self.facts["n_rows"][self.options.split]
        return float(n_measured / self.n_examples)

    def differences(self, methods: Sequence[str], reference: str, budgets: Sequence[Any]) -> dict[str, Ints]:
        """Return by method, for each example, how much oftener than the reference it is right; none without that."""
        if reference not in methods:
            return {}
        n_right = self._n_right(reference, budgets)
        return {name: self._n_right(name, budgets) - n_right for name in methods if name != reference}

    def _n_right(self, method: str, budgets: Sequence[Any]) -> Ints:
        n_right, options, split = np.zeros(self.n_examples, dtype=np.int64), self.options, self.options.split
        for seed in options.all_seeds:
            drawn = split in options.pooled
            places = drawn_rows(self.facts["n_rows"], options.pooled, seed)[split] if drawn else slice(None)
            for budget in budgets:
                row = self.measured[method, *budget, seed]
                n_right[places] += unpacked(row["right"], row["n"])
        return n_right
