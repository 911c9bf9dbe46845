"""Tables for people, on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from cauc_ray.front.tables import add_row, amount, line, new_table, number, percent, print_table
from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.evidence import ChainSearch, MeasuredShare, RiskCertificate
from cauc_ray.policies.policy import Policy

if TYPE_CHECKING:
    from cauc_ray.front.serving import Service


def service(running: Service) -> None:
    """Print where a service is and how it is ended."""
    line(f"{running.model} with policy {running.policy_id} is served at {running.url}/v2/models/{running.model}")
    line(f"its addresses are described at {running.url}/docs; Ctrl-C ends it")


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
            cells += [_with_interval(model["accuracy"], model["accuracy_interval"]), number(model["cost"])]
        add_row(table, model["name"], *cells, f"{model['n_failed']:,}", number(model["rows_per_s"]))
    print_table(table)
    for model in summary["models"]:
        for what, n in model["counts"].items():
            line(f"{model['name']}: {n:,} {what}")
    if any(model["n_failed"] for model in summary["models"]):
        line(f"why rows failed: {summary['logits']}/failed")


def policy(policy: Policy) -> None:
    """Show a policy: its numbers by stage, how its threshold came about, what to expect."""
    is_base = isinstance(policy, BasePolicy)
    own_headings = ["CR", "fused"] if is_base else ["alpha", "beta"]
    title = f"CAUC {'Base' if is_base else 'RF'}, policy {policy.id}, costs in {policy.cost_unit}"
    table = new_table(title, ["stage", "cost", "T", "ECE", *own_headings, "answered", "accuracy"])
    whole = policy.expected
    by_stage = [None] * len(policy.stages) if whole is None else whole.stages
    for stage, expected in zip(policy.stages, by_stage, strict=True):
        at = stage.diagnostics
        error = "" if at.standard_error is None else f" ± {at.standard_error:.2g}"
        clamped = "" if at.status == "converged" else f" ({at.status})"
        if isinstance(stage, BaseStage):
            own = [percent(stage.complementarity_rate, sign=True), "yes" if stage.fused else "no"]
        elif isinstance(stage, RFStage):
            own = [number(stage.alpha), number(stage.beta)]
        add_row(
            table,
            stage.name,
            number(stage.cost),
            f"{stage.temperature:.4g}{error}{clamped}",
            f"{at.calibration_error_before:.3f} → {at.calibration_error_after:.3f}",
            *own,
            percent(None if whole is None or expected is None else expected.answered / whole.n),
            _share(None if expected is None else expected.accepted_accuracy),
        )
    print_table(table)
    how = {
        "reference-accuracy": "the last model's accuracy on {split}",
        "best": "best {objective} on {split}",
        "budget": "best {objective} on {split} within a budget of {budget:g} {unit}",
        "given": "given",
        "certified": "certified on {split}",
    }[policy.threshold_choice.rule]
    choice = policy.threshold_choice
    how = how.format(split=choice.split, objective=choice.objective, budget=policy.budget or 0, unit=policy.cost_unit)
    line(f"threshold {policy.threshold:.6g}: {how}")
    if choice.certificate is not None:
        line(_certified(choice.certificate))
    if whole is None:
        line("what to expect at this threshold was not measured")
    else:
        line(
            f"on {whole.split} ({whole.n:,} examples): accuracy {_share(whole.accuracy)}, "
            f"cost {number(whole.cost)} {policy.cost_unit}{_relative(whole.relative_cost)}"
        )
    if policy.curve:
        first, last = policy.curve[0], policy.curve[-1]
        line(
            f"curve of {len(policy.curve)} points: {choice.objective or 'accuracy'} {percent(first.quality)} at "
            f"{number(first.cost)} {policy.cost_unit} to {percent(last.quality)} at {number(last.cost)}"
        )
    if policy.search is not None:
        _search(policy.search, policy.cost_unit)


def _search(found: ChainSearch, unit: str) -> None:
    """Show what a search chose, and what else there was."""
    within = "" if found.budget is None else f" within {found.budget:g} {unit}"
    title = f"best {found.objective} on {found.split}{within}, of {found.n_chains:,} chains of {len(found.pool)} models"
    headings = ["", "models", found.split, f"cost ({unit})", "held out", "held-out cost"]
    table = new_table(title, headings)
    table.columns[1].justify = "left"
    named = {"chosen": found.chosen, "best pair": found.pair, "all models": found.full, "best model": found.single}
    for name, chain in named.items():
        if chain is not None:
            held_out = percent(chain.holdout_quality), number(chain.holdout_cost)
            add_row(table, name, " → ".join(chain.models), percent(chain.quality), number(chain.cost), *held_out)
    for other in found.runners_up:
        add_row(table, "next best", " → ".join(other.models), percent(other.quality), number(other.cost), "", "")
    print_table(table)
    line(
        f"{found.n_measured:,} chains measured, {found.n_chains - found.n_measured:,} proven worse; "
        f"the best of so many looks better on {found.split} than it is"
    )
    if found.n_halves:
        line(
            f"held out: chosen on one half of {found.split}, measured on the other, the mean of {found.n_halves}; "
            f"{found.n_same} of these halves chose the same chain"
        )


def _certified(at: RiskCertificate) -> str:
    """Say what is certified of early answers, and what coverage the promise costs."""
    answered, plug_in = at.n_accepted / at.n, at.plug_in_accepted / at.n
    return (
        f"certified with {100 * at.confidence:g} % confidence: at most {100 * at.risk:g} % of early answers are wrong "
        f"(bound {percent(at.upper_bound)}; {at.n_wrong:,} of {at.n_accepted:,} were). "
        f"{percent(answered)} are answered early, {100 * (plug_in - answered):.1f} points less than at "
        f"{at.plug_in_threshold:.6g}, which keeps to it on these examples and promises nothing"
    )


def _early(of: Mapping[str, Any]) -> str:
    """Say how often early answers are wrong, and what was certified of that."""
    said = f"answered before the last stage: {percent(of['coverage'])}; wrong of these: "
    said += _with_interval(of["risk"], of["risk_interval"])
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
            _with_interval(stage["accepted_accuracy"], stage["accepted_accuracy_interval"]),
            *(percent(of[figure]) for figure in figures),
        )
    print_table(table)
    if any(stage["guarantees"] for stage in result["stages"]):
        line(
            "at least: threshold less ε / coverage (proposition 1); regret: at most ε plus the fallback's variation (2)"
        )
    line(_early(result["early"]))
    line(
        f"accuracy {_with_interval(result['accuracy'], result['accuracy_interval'])}, macro-F1 "
        f"{percent(result['macro_f1'])}, over {result['n_labelled']:,} labelled of {result['n']:,} examples"
    )
    line(f"cost {number(result['cost'])} {result['cost_unit']}{_relative(result['relative_cost'])}")


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
        "by lot",
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
            _with_interval(row["accuracy"], row["accuracy_interval"]),
            _points(row["gain"], row["gain_interval"]),
            percent(row["by_lot"]),
            percent(row["macro_f1"]),
            number(row["cost"]),
            number(row["relative_cost"]),
            percent(row["avoided"]),
        )
    print_table(at_budget)
    line("* no budget steers it; by lot: what mixing single models by lot has at the same cost")
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
        risk = _with_interval(stage["risk"], stage["risk_interval"])
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
    accuracy = f"accuracy {_with_interval(of['value'], [of['low'], of['high']])}, " if of else ""
    cost, last = f"cost {number(summary['cost'])} {unit} a row", stages[-1]["name"]
    line(f"{summary['n']:,} rows: {accuracy}{cost}{_relative(summary['relative_cost'])}")
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


def inspection(found: Mapping[str, Any]) -> None:
    """Show what was found in a file, key by key."""
    if found["kind"] == "policy":
        policy(Policy.load(found["path"]))
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


def _share(share: MeasuredShare | None) -> str:
    return "–" if share is None else _with_interval(share.value, [share.low, share.high])


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "–"
    return f"{percent(value)} ({100 * interval[0]:.1f} – {100 * interval[1]:.1f})"


def _points(value: float, interval: Sequence[float]) -> str:
    """Return a difference of shares in percentage points."""
    return f"{100 * value:+.2f} ({100 * interval[0]:+.2f} – {100 * interval[1]:+.2f})"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{amount(ratio)} ×"


def _relative(relative: float | None) -> str:
    return "" if relative is None else f", {relative:.2f} of the last model alone"
