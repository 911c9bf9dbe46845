"""A policy for people: its stages, its threshold, what to expect of it, and what to be warned of."""

from __future__ import annotations

from cauc_ray.api.tables import add_row, line, new_table, number, percent, print_table, relative, with_interval
from cauc_ray.numbers.intervals import Share
from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.evidence import ChainSearch, RiskCertificate
from cauc_ray.policies.policy import Policy

_CALIBRATED = {
    "temperature": "",
    "offsets": ", calibrated by temperature and offsets",
    "isotonic": ", calibrated by temperature and isotonic maps",
}


def show_policy(policy: Policy) -> None:
    """Show a policy: its numbers by stage, how its threshold came about, what to expect."""
    is_base = isinstance(policy, BasePolicy)
    own_headings = ["CR", "fused"] if is_base else ["alpha", "beta"]
    title = f"CAUC {'Base' if is_base else 'RF'}, policy {policy.id}, costs in {policy.cost_unit}"
    title += _CALIBRATED[policy.calibrator_kind]
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
            own = [number(stage.alpha), number(stage.beta)] if stage.fused else ["–", "not fused"]
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
            f"cost {number(whole.cost)} {policy.cost_unit}{relative(whole.relative_cost)}"
        )
    if policy.reference is None:
        line("answers cannot be watched at this threshold: nothing is kept that they could be compared with")
    if policy.curve:
        first, last = policy.curve[0], policy.curve[-1]
        line(
            f"curve of {len(policy.curve)} points: {choice.objective or 'accuracy'} {percent(first.quality)} at "
            f"{number(first.cost)} {policy.cost_unit} to {percent(last.quality)} at {number(last.cost)}"
        )
    if policy.search is not None:
        _search(policy.search, policy.cost_unit)
    if policy.safe is not None:
        line(f"safe: {policy.safe.says}")
    if policy.guards:
        fired = [at.name if at.stage is None else f"{at.name} ({at.stage})" for at in policy.guards if at.fired]
        warned = f"{len(fired)} warning{'s' if len(fired) > 1 else ''}: {', '.join(fired)}"
        line(f"guards: {len(policy.guards)} looked at, {warned if fired else 'all quiet'}")


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
    line(f"{found.n_measured:,} chains measured; the best of so many looks better on {found.split} than it is")
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


def _share(share: Share | None) -> str:
    return "–" if share is None else with_interval(share.value, [share.low, share.high])
