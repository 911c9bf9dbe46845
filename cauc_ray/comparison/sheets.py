"""The display of a comparison: methods at one budget with all their figures, or their accuracies at several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from cauc_ray.api.worth import against
from cauc_ray.display import Grid, Mark, Sheet, number, percent, points_with_interval, with_interval
from cauc_ray.policies.by_method import SINGLE

# A Holm-adjusted p-value below each of these is a star.
_STARS = (0.05, 0.01, 0.001)
# Its kind, and its size.
_Budget: TypeAlias = tuple[str | None, float | None]
_CALIBRATION = {"ece": "ECE", "ece_equal_mass": "equal mass", "nll": "NLL", "brier": "Brier", "z": "z"}


def comparison_sheet(result: Mapping[str, Any], grids: Sequence[Grid]) -> Sheet:
    """Return the display of a comparison.

    Args:
        result: The comparison, as --json prints it.
        grids: Of each chain, a table of methods by budgets.
    """
    rows = [row for row in result["rows"] if row["accuracy"] is not None]
    absent = [f"not run: {method['method']} {method['why']}" for method in result["not_run"]]
    if len({row["method"] for row in rows}) < len(rows) or not rows:
        return Sheet("accuracy of methods at budgets", [*grids, *absent])
    chain = " → ".join(result["models"])
    budget = f"{number(result['budget'])} {result['cost_unit']} ({result['budget_rule']})"
    title = f"{chain}, {result['n']:,} examples, methods at a cost of {budget}"
    details = [_curves(rows), _setup(rows), *_calibration(result["calibration"] or {})]
    return Sheet(title, [*_best(result, rows), _at_budget(result, rows), *absent], details)


def _best(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what is the most accurate within the budget, of methods and single models, and whether it is worth it."""
    within = [row for row in rows if row["paradigm"] not in (None, "control") and row["status"] == "ok"]
    best = max(within, key=lambda row: (row["accuracy"], -row["cost"]), default=None)
    if best is None:
        return
    text = (
        f"{best['method']} is the most accurate within the budget: {percent(best['accuracy'])} at "
        f"{number(best['cost'])} {result['cost_unit']}."
    )
    last = result["models"][-1]
    if best["method"] != f"{SINGLE}:{last}":
        saving = None if best["relative_cost"] is None else 1 - best["relative_cost"]
        text += f" {against(last, saving, best['gain'], *best['gain_interval'])[1]}"
    yield text


def _at_budget(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return a table of each method's accuracy and cost at the budget."""
    figures = [
        {
            **row,
            "name": row["method"] + " *" * (not row["steered"]) + " †" * (row["status"] == "unmet"),
            "gain": points_with_interval(row["gain"], *row["gain_interval"]),
            "difference": points_with_interval(row["difference"], *(row["difference_interval"] or ())),
        }
        for row in rows
    ]
    columns: list[tuple[str, ...]] = [
        ("method", "text", "name"),
        ("accuracy", "share", "accuracy", "accuracy_interval"),
        (f"vs. {result['models'][-1]} (points)", "text", "gain"),
        (f"vs. {result['reference']} (points)", "text", "difference"),
        (f"cost ({result['cost_unit']})", "number", "cost"),
        ("relative", "decimals", "relative_cost"),
        ("avoided", "percent", "avoided"),
        ("random mix", "percent", "random_mix"),
    ]
    if any(row["macro_f1"] is not None for row in rows):
        columns.append(("macro-F1", "percent", "macro_f1"))
    notes = ["* has no threshold to set; random mix: accuracy of choosing among single models at random, at that cost"]
    if any(row["status"] == "unmet" for row in rows):
        notes.append("† costs more than the budget on validation")
    if surrogates := [model for model, kind in result["logit_kinds"].items() if kind == "surrogate"]:
        notes.append(f"logits of {', '.join(surrogates)} are surrogates: not comparable with published results")
    return Grid.of("", figures, columns, notes=notes)


def _curves(rows: Sequence[Mapping[str, Any]]) -> Grid:
    defaults = ("accuracy", "relative_cost")
    figures = [{**row, **{f"default_{key}": row["default"][key] for key in defaults}} for row in rows]
    columns = [
        ("method", "text", "method"),
        ("accuracy", "percent", "default_accuracy"),
        ("relative", "number", "default_relative_cost"),
        ("deferral area", "number", "deferral_area"),
        ("AIQ", "number", "aiq"),
        ("APGR", "number", "apgr"),
        ("CPT 50 %", "percent", "cpt50"),
        ("CPT 80 %", "percent", "cpt80"),
    ]
    return Grid.of("at the default setting without a budget, and over the whole curve", figures, columns)


def _setup(rows: Sequence[Mapping[str, Any]]) -> Grid:
    columns = [
        ("method", "text", "method"),
        ("seconds", "number", "setup_s"),
        ("over base's", "times", "setup_ratio"),
        ("in the paper", "times", "paper_setup_ratio"),
        ("differs from the published method", "text", "note"),
    ]
    return Grid.of("setup", rows, columns, texts=(4,))


def _calibration(calibration: Mapping[str, Any]) -> Iterator[str | Grid]:
    """Yield each model's calibration before and after its temperature, and what Base's threshold promised and kept.

    Nothing where a table of scores was compared.
    """
    if not calibration:
        return
    rows = [
        model | {key: f"{number(model['before'][key])} → {number(model['after'][key])}" for key in _CALIBRATION}
        for model in calibration["models"]
    ]
    columns = [("model", "text", "model"), ("T", "number", "temperature")]
    columns += [(heading, "text", key) for key, heading in _CALIBRATION.items()]
    yield Grid.of("calibration, before → after the temperature", rows, columns)
    for stage in calibration["base"]["stages"]:
        risk = with_interval(stage["risk"], stage["risk_interval"])
        yield (
            f"base accepted {percent(stage['coverage'])} of what reached {stage['stage']}; wrong of these: {risk}, "
            f"promised {percent(stage['promised'])} at most"
        )


def budget_grid(about: Mapping[str, Any], chain: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of a chain: each method's accuracy at each budget, the best in bold."""
    budgets, by_cell, methods = _cells_of(summary)
    rows, marks = [], dict[tuple[int, int], Mark]()
    for method in methods:
        of_method = [by_cell[method, *budget] for budget in budgets]
        last = of_method[-1]
        more = (
            _with_stars(last["area"], None, last["area_difference_p"])
            if len(budgets) > 1
            else number(last["cost_mean"])
        )
        rows.append((method, *map(_cell, of_method), more))
    for column, budget in enumerate(budgets, start=1):
        values = [_comparable(by_cell[method, *budget]) for method in methods]
        marks |= {(place, column): "bold" for place, value in enumerate(values) if value == max(values) > 0}
    reference, unit = chain["reference"], chain.get("cost_unit", "")
    spread = (
        f"the standard deviation over {len(about['seeds'])} seeds"
        if len(about["seeds"]) > 1
        else "half of the 95 % interval"
    )
    notes = [
        f"Accuracy in percent on {chain.get('n', 0):,} examples ± {spread}; the best that sees no labels in bold. "
        f"*, **, ***: differs from {reference} with a Holm-adjusted p below 0.05, 0.01, 0.001 (all seeds pooled). "
        "†: costs more than the budget on validation. rel.: of the most expensive model's cost."
    ]
    if len(budgets) > 1:
        n_common = next((row["area_budgets"] for row in summary if row["area_budgets"]), 0)
        if n_common:
            notes.append(f"Mean: over the {n_common} budgets that all methods with several operating points meet.")
    last_title = "mean" if len(budgets) > 1 else f"cost ({unit})"
    headings = ("method", *_budget_titles(budgets, unit), last_title)
    return Grid(_title(chain), headings, tuple(rows), tuple(notes), marks=marks)


def difference_grid(chain: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of a chain: how much more accurate each method is than the reference at each budget."""
    budgets, by_cell, methods = _cells_of(summary)
    headings = _budget_titles(budgets, chain.get("cost_unit", "")) + (["mean"] if len(budgets) > 1 else [])
    rows = []
    for method in methods:
        of_method = [by_cell[method, *budget] for budget in budgets]
        if method != chain["reference"]:
            cells = [points_with_interval(row["difference"], *(row["difference_interval"] or ())) for row in of_method]
            if len(budgets) > 1:
                last = of_method[-1]
                area = points_with_interval(last["area_difference"], *(last["area_difference_interval"] or ()))
                cells.append(area)
            rows.append((method, *cells))
    title = f"{_title(chain)}; accuracy less that of {chain['reference']}, in percentage points"
    note = (
        "Paired differences on the same examples, all seeds pooled, with 95 % intervals that Holm adjusts over methods."
    )
    return Grid(title, ("method", *headings), tuple(rows), (note,))


def _title(chain: Mapping[str, Any]) -> str:
    return f"{chain['set']}: {' → '.join(chain['models'])}"


def _cells_of(summary: Sequence[Mapping[str, Any]]) -> tuple[list[_Budget], dict[Any, Mapping[str, Any]], list[str]]:
    """Return the budgets of a chain's summary, its rows by method and budget, and the methods."""
    by_cell = {(row["method"], row["budget_kind"], row["budget"]): row for row in summary}
    budgets = list(dict.fromkeys((kind, budget) for _, kind, budget in by_cell))
    return budgets, by_cell, list(dict.fromkeys(method for method, _, _ in by_cell))


def _budget_titles(budgets: Sequence[_Budget], unit: str) -> list[str]:
    headings = {"relative": "{:g} rel.", "cost": f"{{:.4g}} {unit}", "base": "at base's cost", None: "–"}
    return [headings[kind].format(budget) for kind, budget in budgets]


def _comparable(row: Mapping[str, Any]) -> float:
    """Return the accuracy of a method that may be the best at a budget, 0 of others."""
    return 0.0 if row["paradigm"] in (None, "control") or row["n_unmet"] else float(row["accuracy_mean"] or 0.0)


def _cell(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return "failed"
    interval = row["accuracy_interval"]
    spread = row["accuracy_std"] if interval is None else (interval[1] - interval[0]) / 2
    return _with_stars(row["accuracy_mean"], spread, row["difference_p"]) + ("†" if row["n_unmet"] else "")


def _with_stars(value: float | None, spread: float | None, p_value: float | None) -> str:
    if value is None:
        return "–"
    stars = "" if p_value is None else "*" * sum(p_value < level for level in _STARS)
    return f"{100 * value:.2f}{'' if spread is None else f' ± {100 * spread:.2f}'}{stars}"
