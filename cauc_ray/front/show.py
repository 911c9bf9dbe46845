"""Tables for people, on standard output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.policy import MeasuredShare, Policy

if TYPE_CHECKING:
    from cauc_ray.front.serving import Service

_PIPE_WIDTH = 200


def line(text: str) -> None:
    """Print a line as it is."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def service(running: Service) -> None:
    """Print where a service is and how it is ended."""
    line(f"{running.model} with policy {running.policy_id} is served at {running.url}/v2/models/{running.model}")
    line(f"its addresses are described at {running.url}/docs; Ctrl-C ends it")


def amount(value: float) -> str:
    """Return a number of any size in few letters."""
    if value >= 1e7:
        return f"{value / 1e6:,.4g} M" if value < 1e10 else f"{value:.3e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def collected(summary: Mapping[str, Any]) -> None:
    """Show what was collected, model by model."""
    title = f"{summary['dataset']}: {summary['rule']}"
    unit = summary["cost_unit"]
    headings = ["model", *summary["splits"], "failed", "rows/s"]
    if unit is not None:
        headings[-2:-2] = ["accuracy", f"cost ({unit})"]
    table = _table(title, headings)
    for model in summary["models"]:
        cells = [f"{split['rows']:,}" for split in model["splits"].values()]
        if unit is not None:
            cells += [_with_interval(model["accuracy"], model["accuracy_interval"]), _number(model["cost"])]
        _add_row(table, model["name"], *cells, f"{model['n_failed']:,}", _number(model["rows_per_s"]))
    _print(table)
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
    table = _table(title, ["stage", "cost", "T", "ECE", *own_headings, "answered", "accuracy"])
    whole = policy.expected
    by_stage = [None] * len(policy.stages) if whole is None else whole.stages
    for stage, expected in zip(policy.stages, by_stage, strict=True):
        at = stage.diagnostics
        error = "" if at.standard_error is None else f" ± {at.standard_error:.2g}"
        clamped = "" if at.status == "converged" else f" ({at.status})"
        if isinstance(stage, BaseStage):
            own = [_percent(stage.complementarity_rate, sign=True), "yes" if stage.fused else "no"]
        elif isinstance(stage, RFStage):
            own = [_number(stage.alpha), _number(stage.beta)]
        _add_row(
            table,
            stage.name,
            _number(stage.cost),
            f"{stage.temperature:.4g}{error}{clamped}",
            f"{at.calibration_error_before:.3f} → {at.calibration_error_after:.3f}",
            *own,
            _percent(None if whole is None or expected is None else expected.answered / whole.n),
            _share(None if expected is None else expected.accepted_accuracy),
        )
    _print(table)
    how = {
        "reference-accuracy": "the last model's accuracy on {split}",
        "best": "best {objective} on {split}",
        "budget": "best {objective} on {split} within a budget of {budget:g} {unit}",
        "given": "given",
    }[policy.threshold_choice.rule]
    choice = policy.threshold_choice
    how = how.format(split=choice.split, objective=choice.objective, budget=policy.budget or 0, unit=policy.cost_unit)
    line(f"threshold {policy.threshold:.6g}: {how}")
    if whole is None:
        line("what to expect at this threshold was not measured")
    else:
        line(
            f"on {whole.split} ({whole.n:,} examples): accuracy {_share(whole.accuracy)}, "
            f"cost {_number(whole.cost)} {policy.cost_unit}{_relative(whole.relative_cost)}"
        )
    if policy.curve:
        first, last = policy.curve[0], policy.curve[-1]
        line(
            f"curve of {len(policy.curve)} points: {choice.objective or 'accuracy'} {_percent(first.quality)} at "
            f"{_number(first.cost)} {policy.cost_unit} to {_percent(last.quality)} at {_number(last.cost)}"
        )


def evaluation(result: Mapping[str, Any]) -> None:
    """Show an evaluation."""
    table = _table(f"{result['method']} on {result['source']}", ["stage", "reached", "answered", "accuracy"])
    for stage in result["stages"]:
        _add_row(
            table,
            stage["name"],
            f"{stage['reached']:,}",
            f"{stage['answered']:,}",
            _with_interval(stage["accepted_accuracy"], stage["accepted_accuracy_interval"]),
        )
    _print(table)
    line(
        f"accuracy {_with_interval(result['accuracy'], result['accuracy_interval'])}, macro-F1 "
        f"{_percent(result['macro_f1'])}, over {result['n_labelled']:,} labelled of {result['n']:,} examples"
    )
    line(f"cost {_number(result['cost'])} {result['cost_unit']}{_relative(result['relative_cost'])}")


def sweep(rows: Sequence[Mapping[str, Any]], unit: str, split: str) -> None:
    """Show what each method makes of a few budgets."""
    headings = ["method", f"budget ({unit})", "threshold", f"{split} accuracy", f"{split} cost", "relative", "avoided"]
    table = _table(f"budgets chosen on validation, measured on {split}", headings)
    for row in rows:
        _add_row(
            table,
            row["method"],
            _number(row["budget"]),
            f"{row['threshold']:.4f}",
            _percent(row["accuracy"]),
            _number(row["cost"]),
            _number(row["relative_cost"]),
            _percent(row["avoided"]),
        )
    _print(table)


def comparison(result: Mapping[str, Any]) -> None:
    """Show methods side by side: at the matched cost, over their whole curves, and what setting them up took."""
    unit, chain = result["cost_unit"], " → ".join(result["models"])
    rows = result["rows"]
    title = (
        f"{chain}, {result['n']:,} examples, at a cost of {_number(result['budget'])} {unit} ({result['budget_rule']})"
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
    at_budget = _table(title, headings)
    for row in rows:
        _add_row(
            at_budget,
            row["method"] if row["steered"] else f"{row['method']} *",
            _with_interval(row["accuracy"], row["accuracy_interval"]),
            _points(row["gain"], row["gain_interval"]),
            _percent(row["by_lot"]),
            _percent(row["macro_f1"]),
            _number(row["cost"]),
            _number(row["relative_cost"]),
            _percent(row["avoided"]),
        )
    _print(at_budget)
    line("* no budget steers it; by lot: what mixing single models by lot has at the same cost")
    headings = ["method", "accuracy", "relative", "deferral area", "AIQ", "APGR", "CPT 50 %", "CPT 80 %"]
    whole = _table("at its own setting without a budget, and over its whole curve", headings)
    for row in rows:
        _add_row(
            whole,
            row["method"],
            _percent(row["default"]["accuracy"]),
            _number(row["default"]["relative_cost"]),
            *(_number(row[area]) for area in ("deferral_area", "aiq", "apgr")),
            *(_percent(row[share]) for share in ("cpt50", "cpt80")),
        )
    _print(whole)
    setup = _table(
        "setting it up", ["method", "seconds", "over base's", "in the paper", "differs from the published method"]
    )
    setup.columns[-1].justify = "left"
    for row in rows:
        ratios = _times(row["setup_ratio"]), _times(row["paper_setup_ratio"])
        _add_row(setup, row["method"], _number(row["setup_s"]), *ratios, row["note"])
    _print(setup)
    _calibration(result["calibration"])
    for absent in result["not_run"]:
        line(f"not run: {absent['method']} {absent['why']}")


def _calibration(found: Mapping[str, Any]) -> None:
    """Show each model's calibration before and after its temperature, and what Base's threshold promised and kept."""
    names = {"ece": "ECE", "ece_equal_mass": "equal mass", "nll": "NLL", "brier": "Brier", "z": "z"}
    table = _table("calibration, before → after the temperature", ["model", "T", *names.values()])
    for model in found["models"]:
        pairs = (" → ".join(_number(model[at][name]) for at in ("before", "after")) for name in names)
        _add_row(table, model["model"], _number(model["temperature"]), *pairs)
    _print(table)
    for stage in found["base"]["stages"]:
        risk = _with_interval(stage["risk"], stage["risk_interval"])
        line(
            f"base accepted {_percent(stage['coverage'])} of what reached {stage['stage']}; wrong of these: {risk}, "
            f"promised {_percent(stage['promised'])} at most"
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
    table = _table(f"run {summary['run_id']}, policy {summary['policy_id']}", headings)
    table.collapse_padding = True
    for column in table.columns:
        column.no_wrap = not column.no_wrap  # names give way first
    for stage in stages:
        _add_row(
            table,
            stage["name"],
            f"{stage['reached']:,}",
            f"{stage['answered']:,}",
            _percent(stage["batch_fill"]),
            amount(stage["cost"]),
            _percent(stage["cost_share"]),
            amount(stage["compute_s"]),
            _percent(stage["busy_share"]),
            "–" if stage["queue_s"] is None else amount(stage["queue_s"]),
        )
    _print(table)
    of = summary["accuracy"]
    accuracy = f"accuracy {_with_interval(of['value'], [of['low'], of['high']])}, " if of else ""
    cost, last = f"cost {_number(summary['cost'])} {unit} a row", stages[-1]["name"]
    line(f"{summary['n']:,} rows: {accuracy}{cost}{_relative(summary['relative_cost'])}")
    line(
        f"saved {_percent(summary['saving'])} of the last model's cost ({_percent(summary['expected_saving'])} "
        f"expected); {_percent(summary['last_stage_avoided'])} of rows never called {last} "
        f"({_percent(summary['expected_last_stage_avoided'])} expected)"
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
            _add_row(table, key, "\n".join(map(str, value)) if isinstance(value, list) else str(value))
    _print(table)


def demo(result: Mapping[str, Any]) -> None:
    """Show the demo's table and where its files are."""
    unit = result["cost_unit"]
    headings = ["", "accuracy", "95 % interval", f"cost ({unit})", "relative", "largest avoided"]
    table = _table(f"{result['n']} test images of handwritten digits", headings)
    for row in result["rows"]:
        _add_row(
            table,
            row["name"],
            _percent(row["accuracy"]),
            f"{_percent(row['low'])} – {_percent(row['high'])}",
            _number(row["cost"]),
            f"{row['relative_cost']:.2f}",
            _percent(row["avoided"]),
        )
    _print(table)
    line(result["agreement"])
    line(f"everything is in {result['folder']}: " + ", ".join(result["files"]))


def _add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a name may hold what rich takes for markup."""
    table.add_row(*(Text(cell) for cell in cells))


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if place == 0 else "right", no_wrap=place == 0)
    return table


def _print(table: Table) -> None:
    terminal = Console()
    # A pipe has no width of its own: its lines are not folded. A terminal that is too narrow folds lines by itself,
    # where rich would leave figures out.
    least = Measurement.get(terminal, terminal.options.update(width=_PIPE_WIDTH), table).minimum
    fits = terminal.width >= least + 2 * len(table.columns)
    wide = terminal.width if fits else least + 3 * len(table.columns)
    width = wide if terminal.is_terminal else _PIPE_WIDTH
    Console(width=width).print(table)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _percent(value: float | None, *, sign: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:+.2f} %" if sign else f"{100 * value:.1f} %"


def _share(share: MeasuredShare | None) -> str:
    return "–" if share is None else _with_interval(share.value, [share.low, share.high])


def _with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    if value is None or interval is None:
        return "–"
    return f"{_percent(value)} ({100 * interval[0]:.1f} – {100 * interval[1]:.1f})"


def _points(value: float, interval: Sequence[float]) -> str:
    """Return a difference of shares in percentage points."""
    return f"{100 * value:+.2f} ({100 * interval[0]:+.2f} – {100 * interval[1]:+.2f})"


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{amount(ratio)} ×"


def _relative(relative: float | None) -> str:
    return "" if relative is None else f", {relative:.2f} of the last model alone"
