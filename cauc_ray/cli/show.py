"""What verbs show people, on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cauc_ray.api.tables import (
    Grid,
    amount,
    cost_with_interval,
    line,
    number,
    percent,
    print_rows,
    print_table,
    relative,
    with_interval,
)

if TYPE_CHECKING:
    from cauc_ray.api.serving import Service
    from cauc_ray.comparison.result import Comparison

# What is promised of a stage's answers, by its key in an evaluation.
_PROMISED = {
    "accepted_accuracy_bound": "at least",
    "epsilon": "ε",
    "epsilon_by_chance": "by chance",
    "threshold_regret": "regret",
    "threshold_regret_bound": "at most",
}
_CALIBRATION = {"ece": "ECE", "ece_equal_mass": "equal mass", "nll": "NLL", "brier": "Brier", "z": "z"}


def service(running: Service) -> None:
    """Print where a service is and how it is ended."""
    line(f"{running.model} with policy {running.policy_id} is served at {running.url}/v2/models/{running.model}")
    if running.grpc is not None:
        line(f"gRPC is answered at {running.grpc}")
    line(f"its addresses are described at {running.url}/openapi.json; Ctrl-C ends it")


def collected(summary: Mapping[str, Any]) -> None:
    """Show what was collected, model by model."""
    unit, splits, models = summary["cost_unit"], summary["splits"], summary["models"]
    columns: list[tuple[str, ...]] = [("model", "text", "name"), *((split, "count", f"n_{split}") for split in splits)]
    if unit is not None:
        columns += [("accuracy", "share", "accuracy", "accuracy_interval"), (f"cost ({unit})", "number", "cost")]
    columns += [("failed", "count", "n_failed"), ("rows/s", "number", "rows_per_s")]
    rows = [model | {f"n_{split}": model["splits"][split]["rows"] for split in splits} for model in models]
    print_rows(f"{summary['dataset']}: {summary['rule']}", rows, columns)
    for model in models:
        for what, n in model["counts"].items():
            line(f"{model['name']}: {n:,} {what}")
    if any(model["n_failed"] for model in models):
        line(f"why rows failed: {summary['logits']}/failed")


def evaluation(result: Mapping[str, Any]) -> None:
    """Show an evaluation."""
    rows = [stage | dict.fromkeys(_PROMISED) | (stage["guarantees"] or {}) for stage in result["stages"]]
    for row in rows:
        if (bound := row["accepted_accuracy_bound"]) is not None:
            row["accepted_accuracy_bound"] = max(0.0, bound)  # no accuracy is less
    columns = [
        ("stage", "text", "name"),
        ("reached", "count", "reached"),
        ("answered", "count", "answered"),
        ("accuracy", "share", "accepted_accuracy", "accepted_accuracy_interval"),
        *((heading, "percent", key) for key, heading in _PROMISED.items()),
    ]
    print_rows(f"{result['method']} on {result['source']}", rows, columns)
    if any(stage["guarantees"] for stage in result["stages"]):
        line(
            "at least: threshold less ε / coverage (proposition 1); regret: at most ε plus the fallback's variation (2)"
        )
    early, certified = result["early"], ""
    if early["certified_risk"] is not None:
        sure = f"{100 * early['certified_confidence']:g} % sure"
        certified = f", certified at most {100 * early['certified_risk']:g} % ({sure})"
    risk = with_interval(early["risk"], early["risk_interval"])
    line(f"answered before the last stage: {percent(early['coverage'])}; wrong of these: {risk}{certified}")
    line(
        f"accuracy {with_interval(result['accuracy'], result['accuracy_interval'])}, macro-F1 "
        f"{percent(result['macro_f1'])}, over {result['n_labelled']:,} labelled of {result['n']:,} examples"
    )
    cost = cost_with_interval(result["cost"], result["cost_interval"])
    line(f"cost {cost} {result['cost_unit']}{relative(result['relative_cost'])}")
    for alone, stage in zip(result["offline"], result["stages"], strict=False):
        expected = with_interval(alone["expected_accuracy"], alone["expected_interval"])
        line(f"offline, up to {stage['name']}: accuracy {percent(alone['accuracy'])}, expected {expected}")


def watched(found: Mapping[str, Any]) -> None:
    """Show what was watched of a policy, each figure next to the reference's, and whether it is valid."""
    rows = [
        {
            "stage": stage["name"],
            "answered": f"{percent(stage['answered'])} [{percent(stage['reference_answered'])}]",
            "cost": f"{number((stage['cost'] or [None])[0])} [{number(stage['reference_cost'])}]",
            "accuracy": f"{_of_three(stage['accepted_accuracy'])} [{percent(stage['reference_accepted_accuracy'])}]",
            "ECE": f"{number(stage['calibration_error'])} [{number(stage['reference_calibration_error'])}]",
            "by chance": number(stage["calibration_error_by_chance"]),
            "z": number(stage["z"]),
            "agreement": f"{_of_three(stage['agreement'])} [{percent(stage['reference_agreement'])}]",
        }
        for stage in found["stages"]
    ]
    columns = [(f"cost ({found['cost_unit']})" if key == "cost" else key, "text", key) for key in rows[0]]
    print_rows(f"policy {found['policy_id']} on {found['source']}; in brackets: on validation", rows, columns)
    title = f"evidence of a change, in powers of ten: {found['needed']:.1f} is needed"
    columns = [("", "text", "name"), ("rows", "count", "n"), ("most", "number", "evidence")]
    print_rows(title, found["features"], columns)
    cost, low, high = found["cost"]
    line(
        f"{found['n']:,} examples, {found['n_labelled']:,} labelled; cost {number(cost)} ({number(low)} – "
        f"{number(high)}) {found['cost_unit']}, {number(found['reference_cost'])} on validation"
    )
    line(f"the policy {found['says']}")


def grids(title: str, tables: Sequence[Grid]) -> None:
    """Show tables of text under one title."""
    line(title)
    for table in tables:
        print_table(table.rich())
        for note in table.notes:
            line(note)


def comparison(compared: Comparison) -> None:
    """Show methods side by side; at one budget also over their whole curves, their setup and the calibration."""
    result = compared.as_json()
    rows = [row for row in result["rows"] if row["accuracy"] is not None]
    if len({row["method"] for row in rows}) == len(rows):
        _at_one_budget(result, rows)
    else:
        grids("accuracy of methods at budgets", compared.grids())
    for absent in result["not_run"]:
        line(f"not run: {absent['method']} {absent['why']}")


def _at_one_budget(result: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    unit, chain = result["cost_unit"], " → ".join(result["models"])
    shown = [
        row
        | {"name": row["method"] if row["steered"] else f"{row['method']} *"}
        | dict(zip(("gain_low", "gain_high"), row["gain_interval"], strict=True))
        | dict(zip(("difference_low", "difference_high"), row["difference_interval"] or (None, None), strict=True))
        for row in rows
    ]
    columns: list[tuple[str, ...]] = [
        ("method", "text", "name"),
        ("accuracy", "share", "accuracy", "accuracy_interval"),
        ("less the last model's", "gain", "gain", "gain_low", "gain_high"),
        (f"less {result['reference']}'s", "gain", "difference", "difference_low", "difference_high"),
        ("random mix", "percent", "random_mix"),
        ("macro-F1", "percent", "macro_f1"),
        (f"cost ({unit})", "number", "cost"),
        ("relative", "number", "relative_cost"),
        ("avoided", "percent", "avoided"),
    ]
    budget = f"{number(result['budget'])} {unit} ({result['budget_rule']})"
    print_rows(f"{chain}, {result['n']:,} examples, at a cost of {budget}", shown, columns)
    if surrogates := [model for model, kind in result["logit_kinds"].items() if kind == "surrogate"]:
        line(f"logits of {', '.join(surrogates)} are surrogates: figures here are not comparable with published ones")
    line("* has no threshold to set; random mix: what choosing among single models at random has at the same cost")
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
    shown = [row | {f"default_{key}": row["default"][key] for key in ("accuracy", "relative_cost")} for row in rows]
    print_rows("at its own setting without a budget, and over its whole curve", shown, columns)
    columns = [
        ("method", "text", "method"),
        ("seconds", "number", "setup_s"),
        ("over base's", "times", "setup_ratio"),
        ("in the paper", "times", "paper_setup_ratio"),
        ("differs from the published method", "text", "note"),
    ]
    table = Grid.of("setting it up", rows, columns).rich()
    table.columns[-1].justify = "left"
    print_table(table)
    _calibration(result["calibration"])


def _calibration(found: Mapping[str, Any]) -> None:
    """Show each model's calibration before and after its temperature, and what Base's threshold promised and kept."""
    rows = [
        model | {key: f"{number(model['before'][key])} → {number(model['after'][key])}" for key in _CALIBRATION}
        for model in found["models"]
    ]
    columns = [("model", "text", "model"), ("T", "number", "temperature")]
    columns += [(heading, "text", key) for key, heading in _CALIBRATION.items()]
    print_rows("calibration, before → after the temperature", rows, columns)
    for stage in found["base"]["stages"]:
        risk = with_interval(stage["risk"], stage["risk_interval"])
        line(
            f"base accepted {percent(stage['coverage'])} of what reached {stage['stage']}; wrong of these: {risk}, "
            f"promised {percent(stage['promised'])} at most"
        )


def run_summary(summary: Mapping[str, Any]) -> None:
    """Show what a run did: its stages, what it saved, where time went, and what went wrong if anything did."""
    unit, stages = summary["cost_unit"], summary["stages"]
    columns = [
        ("stage", "text", "name"),
        ("reached", "count", "reached"),
        ("answered", "count", "answered"),
        ("fill", "percent", "batch_fill"),
        (f"cost\n({unit})", "amount", "cost"),
        ("share", "percent", "cost_share"),
        ("compute\n(s)", "amount", "compute_s"),
        ("busy", "percent", "busy_share"),
        ("queue\n(s)", "amount", "queue_s"),
    ]
    table = Grid.of(f"run {summary['run_id']}, policy {summary['policy_id']}", stages, columns).rich()
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = not column.no_wrap  # names give way first
    print_table(table)
    of = summary["accuracy"]
    accuracy = f"accuracy {with_interval(of['value'], [of['low'], of['high']])}, " if of else ""
    cost, last = f"cost {number(summary['cost'])} {unit} a row", stages[-1]["name"]
    line(f"{summary['n']:,} rows: {accuracy}{cost}{relative(summary['relative_cost'])}")
    line(
        f"saved {percent(summary['saving'])} of the last model's cost ({percent(summary['expected_saving'])} "
        f"expected); {percent(summary['last_stage_avoided'])} of answered rows never called {last} "
        f"({percent(summary['expected_last_stage_avoided'])} expected)"
    )
    waiting_s, compute_s = (sum(stage[key] for stage in stages) for key in ("waiting_s", "compute_s"))
    line(
        f"{summary['run_s']:.1f} s of work, {summary['elapsed_s']:.1f} s with Ray and the models started; "
        f"replicas waited {amount(waiting_s)} of {amount(waiting_s + compute_s)} s"
    )
    for stage in stages:
        if stage["bytes_out"] is not None:
            sent, received = stage["bytes_out"] / 1e6, stage["bytes_in"] / 1e6
            line(f"{stage['name']} is elsewhere: {number(sent)} MB sent, {number(received)} MB received")
    trouble = {
        "rows failed (see failed/)": summary["n_failed"],
        "rows answered without a stage that was down": summary["degraded"],
        "calls that brought nothing": sum(stage["lost_calls"] for stage in stages),
    }
    if any(trouble.values()):
        line("; ".join(f"{what}: {n:,}" for what, n in trouble.items() if n))


def report(result: Mapping[str, Any]) -> None:
    """Say what a report found, and where it is."""
    line(f"policy {result['policy_id']}: {result['verdict']}")
    line(result["consequence"])
    for left_out in result["left_out"]:
        line(f"left out: {left_out}")
    line(f"written to {result['page']}, its policy card to {result['card']}")


def demo(result: Mapping[str, Any]) -> None:
    """Show the demo's table and where its files are."""
    columns = [
        ("", "text", "name"),
        ("accuracy", "percent", "accuracy"),
        ("95 % interval", "text", "interval"),
        (f"cost ({result['cost_unit']})", "number", "cost"),
        ("relative", "decimals", "relative_cost"),
        ("largest avoided", "percent", "avoided"),
    ]
    rows = [row | {"interval": f"{percent(row['low'])} – {percent(row['high'])}"} for row in result["rows"]]
    print_rows(f"{result['n']} test images of handwritten digits", rows, columns)
    line(result["agreement"])
    line(f"everything is in {result['folder']}: " + ", ".join(result["files"]))


def _of_three(share: Sequence[float] | None) -> str:
    return "–" if share is None else with_interval(share[0], share[1:])
