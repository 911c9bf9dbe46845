"""The display of a policy: its expected results, its threshold, its warnings, and how its numbers were fitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cauc_ray.display import Grid, Sheet, cost_with_interval, count_text, number, percent, relative, share_text
from cauc_ray.numbers.chain import cost_text
from cauc_ray.policies.evidence import ChainSearch, RiskCertificate
from cauc_ray.policies.policy import Policy, Stage

_TITLES = {"base": "CAUC Base", "rf": "CAUC RF", "stacked": "stacked cascade"}
_CALIBRATED = {
    "temperature": "",
    "offsets": ", calibrated by temperature and offsets",
    "isotonic": ", calibrated by temperature and isotonic maps",
}


def policy_sheet(policy: Policy) -> Sheet:
    """Return the display of a policy."""
    unit, models = policy.cost_unit, " → ".join(policy.models)
    title = f"{_TITLES.get(policy.method, policy.method)}, {models}: policy {policy.id}"
    lines = [*_expected_lines(policy), f"threshold {policy.threshold_text(6)}: {_choice(policy)}", *_warnings(policy)]
    details: list[str | Grid] = [_fits(policy)]
    if policy.search is not None:
        details += _search(policy.search, unit)
    details += _detail_lines(policy)
    return Sheet(title, [*lines, _stages(policy)], details)


def _stages(policy: Policy) -> Grid:
    """Return a table of the chain, and of what each stage is expected to answer."""
    expected = policy.expected
    rows = []
    for place, stage in enumerate(policy.stages):
        share = None if expected is None else expected.stages[place]
        answered = None if share is None or expected is None else share.answered / expected.n
        accuracy = None if share is None else share.accepted_accuracy
        rows.append((stage.name, number(stage.cost), percent(answered), share_text(accuracy)))
    headings = ("stage", f"cost ({policy.cost_unit})", "answers", "accuracy of these (95 %)")
    return Grid("", headings, tuple(rows))


def _expected_lines(policy: Policy) -> Iterator[str]:
    """Yield the expected accuracy and cost, and how they compare with the last model's."""
    expected, unit = policy.expected, policy.cost_unit
    if expected is None:
        yield "results at this threshold were not measured"
        return
    of_last = relative(expected.relative_cost, policy.models[-1])
    yield (
        f"expected, from {expected.n:,} examples of {expected.split}: accuracy {share_text(expected.accuracy)}, "
        f"cost {cost_with_interval(expected.cost, expected.cost_interval)} {unit}{of_last}"
    )
    against = next((guard for guard in policy.guards if guard.name == "cost-above-largest"), None)
    if against is not None and expected.relative_cost is not None:
        saving, gain = 1 - expected.relative_cost, 100 * against.figures["gain"]
        word = f"saves {percent(saving)} of" if saving >= 0 else f"adds {percent(-saving)} to"
        yield (
            f"{word} the cost of {policy.models[-1]} at {gain:+.2f} points of accuracy; evaluate it on a test split "
            "for intervals"
        )


def _choice(policy: Policy) -> str:
    """Return how the threshold was chosen."""
    choice, unit = policy.threshold_choice, policy.cost_unit
    budget = cost_text(policy.budget or 0, unit, 6)
    sure = "" if choice.confidence is None else f", at {100 * choice.confidence:g} % confidence on new inputs"
    return {
        "reference-accuracy": f"the last model's accuracy on {choice.split}",
        "best": f"best {choice.objective} on {choice.split}",
        "budget": f"best {choice.objective} on {choice.split} within a budget of {budget}{sure}",
        "given": "given",
        "price": f"1 less the last error on {choice.split} and the calls to come at {choice.price} errors per {unit}",
        "certified": f"certified on {choice.split}",
    }[choice.rule]


def _warnings(policy: Policy) -> Iterator[str]:
    """Yield the result of the guards, and each that warns."""
    fired = [guard for guard in policy.guards if guard.fired]
    if policy.guards:
        warned = count_text(len(fired), "warning") if fired else "no warnings"
        yield f"guards: {len(policy.guards)} checked, {warned}"
    for guard in fired:
        yield f"warning: {guard.name}: {guard.message}"


def _fits(policy: Policy) -> Grid:
    """Return a table of each stage's calibration and of its method's measured numbers."""
    settings = [
        name
        for name in type(policy.stages[-1]).model_fields
        if name not in Stage.model_fields and any(_is_plain(getattr(stage, name, None)) for stage in policy.stages)
    ]
    figures = {model.name: model for model in policy.figures}
    rows = []
    for stage in policy.stages:
        fit, measured = stage.diagnostics, figures.get(stage.name)
        if fit is None:
            cells = ["–", "encoder"]
        else:
            error = "" if fit.standard_error is None else f" ± {fit.standard_error:.2g}"
            clamped = "" if fit.status == "converged" else f" ({fit.status})"
            calibration_error = f"{fit.calibration_error_before:.3f} → {fit.calibration_error_after:.3f}"
            cells = [f"{stage.temperature:.4g}{error}{clamped}", calibration_error]
        cells.append("–" if measured is None else number(measured.ranking))
        cells.append(
            "–"
            if measured is None or not measured.n_fixed + measured.n_broken
            else f"+{measured.n_fixed:,} -{measured.n_broken:,}"
        )
        rows.append((stage.name, *cells, *(_cell(getattr(stage, name, None)) for name in settings)))
    headings = ["stage", "T", "ECE", "AUROC", "fusion", *(name.replace("_", " ") for name in settings)]
    return Grid(f"fit{_CALIBRATED[policy.calibrator_kind]}", tuple(headings), tuple(rows))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if _is_plain(value) else "–"


def _detail_lines(policy: Policy) -> Iterator[str | Grid]:
    """Yield what else is known of the policy, a line each."""
    unit, choice = policy.cost_unit, policy.threshold_choice
    for stage in policy.stages:
        if stage.floor is not None:
            yield f"probabilities of {stage.name} below {stage.floor:.4g} count as {stage.floor:.4g}"
    if choice.certificate is not None:
        yield _certificate_text(choice.certificate)
        yield from _segment_lines(choice.certificate)
    if policy.expected is not None:
        n = policy.expected.n_labelled
        yield f"the interval of the expected accuracy is a 95 % prediction interval for {n:,} new examples"
    if policy.on_selection is not None:
        yield (
            "accuracy is that of each half with thresholds chosen on the other; on the rows that chose them it is "
            f"{share_text(policy.on_selection.accuracy)}"
        )
    for part in policy.offline or ():
        yield f"offline, {', '.join(policy.models[: part.stages])} alone: accuracy {share_text(part.accuracy)}"
    if policy.reference is None:
        yield "no drift reference at this threshold: later answers cannot be checked against it"
    if policy.curve:
        first, last, quality = policy.curve[0], policy.curve[-1], choice.objective or "accuracy"
        end = "" if len(policy.curve) == 1 else f" to {percent(last.quality)} at {number(last.cost)}"
        start = f"{quality} {percent(first.quality)} at {cost_text(first.cost, unit)}"
        yield f"curve of {count_text(len(policy.curve), 'point')}: {start}{end}"
    if policy.safe is not None:
        yield f"safe: {policy.safe.message}"
    if policy.noise is not None:
        moved = ", ".join(f"{name} {number(size)}" for name, size in policy.noise.logits.items())
        yield (
            f"noise: other rows of a call move a row's logits by up to {moved}; {policy.noise.may_flip:,} of "
            f"{policy.noise.n:,} answers on {policy.noise.split} may change"
        )
    for name, prompt in shared_prompts({stage.name: stage.prompt for stage in policy.stages}).items():
        yield f"{name}:\n{prompt}"


def shared_prompts(by_model: Mapping[str, str | None]) -> dict[str, str]:
    """Return the prompts of language models under their titles; once where all have the same."""
    prompts = {name: prompt for name, prompt in by_model.items() if prompt is not None}
    if len(prompts) > 1 and len(set(prompts.values())) == 1:
        return {"prompt": next(iter(prompts.values()))}
    return {f"prompt of {name}": prompt for name, prompt in prompts.items()}


def _search(search: ChainSearch, unit: str) -> Iterator[str | Grid]:
    """Yield what a search chose, and the alternatives."""
    within = "" if search.budget is None else f" within {cost_text(search.budget, unit, 6)}"
    title = (
        f"best {search.objective} on {search.split}{within}, of {search.n_chains:,} chains of {len(search.pool)} models"
    )
    named = {"chosen": search.chosen, "best pair": search.pair, "all models": search.full, "best model": search.single}
    rows = [
        (
            *(name, " → ".join(chain.models), percent(chain.quality), number(chain.cost)),
            *(percent(chain.holdout_quality), number(chain.holdout_cost)),
        )
        for name, chain in named.items()
        if chain is not None
    ]
    rows += [
        ("next best", " → ".join(chain.models), percent(chain.quality), number(chain.cost), "", "")
        for chain in search.runners_up
    ]
    headings = ("", "models", search.split, f"cost ({unit})", "held out", "held-out cost")
    notes = [f"{search.n_measured:,} chains measured; the best of so many looks better on {search.split} than it is"]
    if search.n_halves:
        notes.append(
            f"held out: chosen on one half of {search.split}, measured on the other, the mean of {search.n_halves}; "
            f"{search.n_same} of these halves chose the same chain"
        )
    yield Grid(title, headings, tuple(rows), tuple(notes), n_left=2)


def _segment_lines(certificate: RiskCertificate) -> Iterator[str | Grid]:
    """Yield what any rule must defer at the certified risk, and the certificate's segments."""
    if certificate.least_deferred is not None:
        yield f"any rule defers at least {percent(certificate.least_deferred)} of these examples for that risk"
    if certificate.segments:
        rows = [(of.name, f"{of.n:,}", f"{of.n_accepted:,}", f"{of.n_wrong:,}") for of in certificate.segments]
        note = "the limit holds in all segments, with the confidence of the certificate for all of them together"
        yield Grid("", (certificate.by or "", "examples", "early", "wrong of these"), tuple(rows), (note,))


def _certificate_text(certificate: RiskCertificate) -> str:
    """Return what is certified of early answers, and the coverage that the certificate costs."""
    answered, plug_in = certificate.n_accepted / certificate.n, certificate.plug_in_accepted / certificate.n
    return (
        f"certified with {100 * certificate.confidence:g} % confidence: at most {100 * certificate.risk:g} % of early "
        f"answers are wrong (bound {percent(certificate.upper_bound)}; {certificate.n_wrong:,} of "
        f"{certificate.n_accepted:,} were). {percent(answered)} are answered early, "
        f"{100 * (plug_in - answered):.1f} points less than at {certificate.plug_in_threshold:.6g}, which meets the "
        "limit on these examples without a guarantee"
    )
