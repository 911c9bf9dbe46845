"""Tables for people, on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from cauc_ray.api.tables import (
    add_row,
    amount,
    line,
    new_table,
    number,
    percent,
    print_table,
    relative,
    with_interval,
)
from cauc_ray.cli.show_policy import show_policy
from cauc_ray.policies.policy import Policy

if TYPE_CHECKING:
    from cauc_ray.api.serving import Service
    from cauc_ray.api.tables import Grid
    from cauc_ray.paper.run import Paper


def service(running: Service) -> None:
    """Print where a service is and how it is ended."""
    line(f"{running.model} with policy {running.policy_id} is served at {running.url}/v2/models/{running.model}")
    line(f"its addresses are described at {running.url}/openapi.json; Ctrl-C ends it")


def collected(summary: Mapping[str, Any]) -> None:
    """Show what was collected, model by model."""
    title = f"{summary['dataset']}: {summary['rule']}"
    unit = summary["cost_unit"]
    headings = ["model", *summary["splits"], "failed", "rows/s"]
    if unit is not None:
        headings[-2:-2] = ["accuracy", f"cost ({unit})"]
    table = new_table(title, headings)
    for model in summary["models"]:
        cells = [f"{split['rows']:,}" for split in model["splits"].values()]
        if unit is not None:
            cells += [with_interval(model["accuracy"], model["accuracy_interval"]), number(model["cost"])]
        add_row(table, model["name"], *cells, f"{model['n_failed']:,}", number(model["rows_per_s"]))
    print_table(table)
    for model in summary["models"]:
        for what, n in model["counts"].items():
            line(f"{model['name']}: {n:,} {what}")
    if any(model["n_failed"] for model in summary["models"]):
        line(f"why rows failed: {summary['logits']}/failed")


# What calibrates a policy's models, where it is not the temperature alone.


def _early(of: Mapping[str, Any]) -> str:
    """Say how often early answers are wrong, and what was certified of that."""
    said = f"answered before the last stage: {percent(of['coverage'])}; wrong of these: "
    said += with_interval(of["risk"], of["risk_interval"])
    if of["certified_risk"] is None:
        return said
    return f"{said}, certified at most {100 * of['certified_risk']:g} % ({100 * of['certified_confidence']:g} % sure)"


def evaluation(result: Mapping[str, Any]) -> None:
    """Show an evaluation."""
    headings = ["stage", "reached", "answered", "accuracy", "at least", "ε", "by chance", "regret", "at most"]
    table = new_table(f"{result['method']} on {result['source']}", headings)
    figures = ("accepted_accuracy_bound", "epsilon", "epsilon_by_chance", "threshold_regret", "threshold_regret_bound")
    for stage in result["stages"]:
        of = dict.fromkeys(figures) | (stage["guarantees"] or {})
        if (bound := of["accepted_accuracy_bound"]) is not None:
            of["accepted_accuracy_bound"] = max(0.0, bound)  # no accuracy is less
        add_row(
            table,
            stage["name"],
            f"{stage['reached']:,}",
            f"{stage['answered']:,}",
            with_interval(stage["accepted_accuracy"], stage["accepted_accuracy_interval"]),
            *(percent(of[figure]) for figure in figures),
        )
    print_table(table)
    if any(stage["guarantees"] for stage in result["stages"]):
        line(
            "at least: threshold less ε / coverage (proposition 1); regret: at most ε plus the fallback's variation (2)"
        )
    line(_early(result["early"]))
    line(
        f"accuracy {with_interval(result['accuracy'], result['accuracy_interval'])}, macro-F1 "
        f"{percent(result['macro_f1'])}, over {result['n_labelled']:,} labelled of {result['n']:,} examples"
    )
    line(f"cost {number(result['cost'])} {result['cost_unit']}{relative(result['relative_cost'])}")


def watched(found: Mapping[str, Any]) -> None:
    """Show what was watched of a policy, each figure beside the reference's, and whether it holds."""
    headings = ["stage", "answered", f"cost ({found['cost_unit']})", "accuracy", "ECE", "by chance", "z", "agreement"]
    table = new_table(f"policy {found['policy_id']} on {found['source']}; in brackets: on validation", headings)
    for stage in found["stages"]:
        add_row(
            table,
            stage["name"],
            f"{percent(stage['answered'])} [{percent(stage['reference_answered'])}]",
            f"{number((stage['cost'] or [None])[0])} [{number(stage['reference_cost'])}]",
            f"{_of_three(stage['accepted_accuracy'])} [{percent(stage['reference_accepted_accuracy'])}]",
            f"{number(stage['calibration_error'])} [{number(stage['reference_calibration_error'])}]",
            number(stage["calibration_error_by_chance"]),
            number(stage["z"]),
            f"{_of_three(stage['agreement'])} [{percent(stage['reference_agreement'])}]",
        )
    print_table(table)
    evidence = new_table(
        f"evidence of a change, in powers of ten: {found['needed']:.1f} is needed", ["", "rows", "most"]
    )
    for feature in found["features"]:
        add_row(evidence, feature["name"], f"{feature['n']:,}", number(feature["evidence"]))
    print_table(evidence)
    cost = found["cost"]
    line(
        f"{found['n']:,} examples, {found['n_labelled']:,} labelled; cost {number(cost[0])} ({number(cost[1])} – "
        f"{number(cost[2])}) {found['cost_unit']}, {number(found['reference_cost'])} on validation"
    )
    line(f"the policy {found['says']}")


def sweep(rows: Sequence[Mapping[str, Any]], unit: str, split: str) -> None:
    """Show what each method makes of a few budgets."""
    headings = ["method", f"budget ({unit})", "threshold", f"{split} accuracy", f"{split} cost", "relative", "avoided"]
    table = new_table(f"budgets chosen on validation, measured on {split}", headings)
    for row in rows:
        add_row(
            table,
            row["method"],
            number(row["budget"]),
            f"{row['threshold']:.4f}",
            percent(row["accuracy"]),
            number(row["cost"]),
            number(row["relative_cost"]),
            percent(row["avoided"]),
        )
    print_table(table)


def grids(title: str, tables: Sequence[Grid]) -> None:
    """Show tables of text under one title."""
    line(title)
    for table in tables:
        print_table(table.rich())
        for note in table.notes:
            line(note)


def paper(made: Paper, output: str) -> None:
    """Show the paper's tables, and what is missing."""
    for table in made.tables:
        grids(f"\n== {table.title}", table.grids)
    for each in made.figures:
        line(f"\n== {each.title}: {output}/figures/{each.name}.png\n{each.caption}")
    line("")
    for missing in made.not_run:
        line(f"not run here: {missing}")
    line(f"everything is in {output}, see report.md; {made.seconds:.0f} s")


def comparison(result: Mapping[str, Any]) -> None:
    """Show methods side by side: at the matched cost, over their whole curves, and what setting them up took."""
    unit, chain = result["cost_unit"], " → ".join(result["models"])
    rows = result["rows"]
    title = (
        f"{chain}, {result['n']:,} examples, at a cost of {number(result['budget'])} {unit} ({result['budget_rule']})"
    )
    headings = [
        "method",
        "accuracy",
        "less the last model's",
        "random mix",
        "macro-F1",
        f"cost ({unit})",
        "relative",
        "avoided",
    ]
    at_budget = new_table(title, headings)
    for row in rows:
        add_row(
            at_budget,
            row["method"] if row["steered"] else f"{row['method']} *",
            with_interval(row["accuracy"], row["accuracy_interval"]),
            _points(row["gain"], row["gain_interval"]),
            percent(row["random_mix"]),
            percent(row["macro_f1"]),
            number(row["cost"]),
            number(row["relative_cost"]),
            percent(row["avoided"]),
        )
    print_table(at_budget)
    line("* has no threshold to set; random mix: what choosing among single models at random has at the same cost")
    headings = ["method", "accuracy", "relative", "deferral area", "AIQ", "APGR", "CPT 50 %", "CPT 80 %"]
    whole = new_table("at its own setting without a budget, and over its whole curve", headings)
    for row in rows:
        add_row(
            whole,
            row["method"],
            percent(row["default"]["accuracy"]),
            number(row["default"]["relative_cost"]),
            *(number(row[area]) for area in ("deferral_area", "aiq", "apgr")),
            *(percent(row[share]) for share in ("cpt50", "cpt80")),
        )
    print_table(whole)
    setup = new_table(
        "setting it up", ["method", "seconds", "over base's", "in the paper", "differs from the published method"]
    )
    setup.columns[-1].justify = "left"
    for row in rows:
        ratios = _times(row["setup_ratio"]), _times(row["paper_setup_ratio"])
        add_row(setup, row["method"], number(row["setup_s"]), *ratios, row["note"])
    print_table(setup)
    _calibration(result["calibration"])
    for absent in result["not_run"]:
        line(f"not run: {absent['method']} {absent['why']}")


def _calibration(found: Mapping[str, Any]) -> None:
    """Show each model's calibration before and after its temperature, and what Base's threshold promised and kept."""
    names = {"ece": "ECE", "ece_equal_mass": "equal mass", "nll": "NLL", "brier": "Brier", "z": "z"}
    table = new_table("calibration, before → after the temperature", ["model", "T", *names.values()])
    for model in found["models"]:
        pairs = (" → ".join(number(model[at][name]) for at in ("before", "after")) for name in names)
        add_row(table, model["model"], number(model["temperature"]), *pairs)
    print_table(table)
    for stage in found["base"]["stages"]:
        risk = with_interval(stage["risk"], stage["risk_interval"])
        line(
            f"base accepted {percent(stage['coverage'])} of what reached {stage['stage']}; wrong of these: {risk}, "
            f"promised {percent(stage['promised'])} at most"
        )


def run_summary(summary: Mapping[str, Any]) -> None:
    """Show what a run did: its stages, what it saved, where time went, and what went wrong if anything did."""
    unit, stages = summary["cost_unit"], summary["stages"]
    headings = [
        "stage",
        "reached",
        "answered",
        "fill",
        f"cost\n({unit})",
        "share",
        "compute\n(s)",
        "busy",
        "queue\n(s)",
    ]
    table = new_table(f"run {summary['run_id']}, policy {summary['policy_id']}", headings)
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = not column.no_wrap  # names give way first
    for stage in stages:
        add_row(
            table,
            stage["name"],
            f"{stage['reached']:,}",
            f"{stage['answered']:,}",
            percent(stage["batch_fill"]),
            amount(stage["cost"]),
            percent(stage["cost_share"]),
            amount(stage["compute_s"]),
            percent(stage["busy_share"]),
            "–" if stage["queue_s"] is None else amount(stage["queue_s"]),
        )
    print_table(table)
    of = summary["accuracy"]
    accuracy = f"accuracy {with_interval(of['value'], [of['low'], of['high']])}, " if of else ""
    cost, last = f"cost {number(summary['cost'])} {unit} a row", stages[-1]["name"]
    line(f"{summary['n']:,} rows: {accuracy}{cost}{relative(summary['relative_cost'])}")
    line(
        f"saved {percent(summary['saving'])} of the last model's cost ({percent(summary['expected_saving'])} "
        f"expected); {percent(summary['last_stage_avoided'])} of rows never called {last} "
        f"({percent(summary['expected_last_stage_avoided'])} expected)"
    )
    waiting_s, compute_s = (sum(stage[key] for stage in stages) for key in ("waiting_s", "compute_s"))
    line(
        f"{summary['run_s']:.1f} s of work, {summary['elapsed_s']:.1f} s with Ray and the models started; "
        f"replicas waited {amount(waiting_s)} of {amount(waiting_s + compute_s)} s"
    )
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


def contents(found: Mapping[str, Any]) -> None:
    """Show what was found in a file, key by key."""
    if found["kind"] == "policy":
        show_policy(Policy.load(found["path"]))
        for guard in found["guards"]:
            if guard["fired"]:
                line(f"warning: {guard['name']}: {guard['says']}")
        return
    table = Table(
        title=Text(f"{found['path']}: {found['kind']}"), title_justify="left", show_header=False, box=box.SIMPLE
    )
    for key, value in found.items():
        if key not in ("kind", "path"):
            add_row(table, key, "\n".join(map(str, value)) if isinstance(value, list) else str(value))
    print_table(table)


def demo(result: Mapping[str, Any]) -> None:
    """Show the demo's table and where its files are."""
    unit = result["cost_unit"]
    headings = ["", "accuracy", "95 % interval", f"cost ({unit})", "relative", "largest avoided"]
    table = new_table(f"{result['n']} test images of handwritten digits", headings)
    for row in result["rows"]:
        add_row(
            table,
            row["name"],
            percent(row["accuracy"]),
            f"{percent(row['low'])} – {percent(row['high'])}",
            number(row["cost"]),
            f"{row['relative_cost']:.2f}",
            percent(row["avoided"]),
        )
    print_table(table)
    line(result["agreement"])
    line(f"everything is in {result['folder']}: " + ", ".join(result["files"]))


def _of_three(share: Sequence[float] | None) -> str:
    return "–" if share is None else with_interval(share[0], share[1:])


def _points(value: float, interval: Sequence[float]) -> str:
    """Return a difference of shares in percentage points."""
    return f"{100 * value:+.2f} ({100 * interval[0]:+.2f} – {100 * interval[1]:+.2f})"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{amount(ratio)} ×"
