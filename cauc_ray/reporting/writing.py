"""Write a report, one HTML page and a policy card: the Python side of `cauc report`."""

from __future__ import annotations

import base64
import hashlib
import inspect
import shlex
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

from cauc_ray import __version__
from cauc_ray.api.offline import fit, require_apart
from cauc_ray.api.options import Common, Flag, InputPath, Output
from cauc_ray.api.summaries import RunSummary
from cauc_ray.api.worth import Verdict
from cauc_ray.comparison.result import Comparison
from cauc_ray.data.logits import LogitTable
from cauc_ray.display import Grid, Sheet, Shown, decimals, markdown_text, number, percent, share_text
from cauc_ray.errors import ConfigError, require_packages
from cauc_ray.files.documents import write_text
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.budgets import Budgets, find_budgets
from cauc_ray.reporting.drawing import draw_comparison, draw_curve, draw_reliability, shortened
from cauc_ray.reporting.finding import Inputs, find, read_part, read_run
from cauc_ray.reporting.measured import (
    Measured,
    find_mistakes,
    measure_calibration,
    measure_policy,
    mistakes_grid,
    read_comparison,
)

if TYPE_CHECKING:
    from jinja2 import Environment


PAGE, CARD = "report.html", "policy-card.md"


@dataclass(frozen=True, slots=True, repr=False)
class Report(Shown):
    """A report that was written.

    Attributes:
        page: The HTML file.
        card: The policy card, Markdown, in the same folder.
        folder: The folder of the parts that were not named.
        inputs: The policy and its table.
        measured: The policy on its splits.
        checks: Checks of the fit, and of the costs on test; those that fired are warnings.
        budgets: All operating points, None without a labelled validation split.
        run: A run of the policy and its folder, if there is one.
        comparison: A comparison on the table and its folder, if there is one.
        left_out: Reasons for which parts in the folder are not shown.
    """

    page: AnyPath
    card: AnyPath
    folder: AnyPath
    inputs: Inputs
    measured: Measured
    checks: tuple[Guard, ...]
    budgets: Budgets | None
    run: tuple[AnyPath, RunSummary] | None
    comparison: tuple[AnyPath, Comparison] | None
    left_out: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Return the verdict of the evaluation."""
        verdict = self.measured.evaluation.verdict
        assert verdict is not None  # the split has labels
        return verdict

    def sheet(self) -> Sheet:
        """Return the verdict, and where the page and the card are."""
        left_out = [f"left out: {reason}" for reason in self.left_out]
        files = f"written to {self.page}, its policy card to {self.card}"
        return Sheet(f"policy {self.inputs.policy.id}: {self.verdict.answer}", [*left_out, files])

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc report --json` prints: where the files are, and what `evaluate` prints."""
        file = self.inputs.policy_file
        return {
            "page": str(self.page),
            "card": str(self.card),
            "policy": None if file is None else str(file),
            "logits": str(self.inputs.logits),
            "split": self.measured.split,
            "run": None if self.run is None else str(self.run[0]),
            "comparison": None if self.comparison is None else str(self.comparison[0]),
            "left_out": list(self.left_out),
            **self.measured.evaluation.as_json(),
        }


def report(
    folder: Annotated[InputPath, Flag("DIR", is_positional=True)] = ".",
    *,
    policy: str | AnyPath | Policy | None = None,
    logits: Common[InputPath | None] = None,
    run: Common[InputPath | None] = None,
    comparison: Common[InputPath | None] = None,
    split: Common[str] = "test",
    output: Common[Output | None] = None,
) -> Report:
    """Write one self-contained HTML page on a policy, and its policy card in the same folder.

    Args:
        folder: Folder of the parts that are not named, which have the names that the verbs give them.
        policy: A policy file (default: policy.json in the folder; of several in policies/ that of the run). In Python
            also a Policy.
        logits: The table that the policy was fitted on (default: logits in the folder).
        run: Output of `cauc run` with the policy (default: run in the folder, if any).
        comparison: Output of `cauc compare` on the table (default: comparison in the folder, if any).
        split: Split to measure on.
        output: The page to write (default: report.html in the folder).

    Raises:
        CaucError: DataError if a part is missing or does not belong to the policy, ConfigError if something must be
            named or a package is missing. Parts in the folder that do not belong to the policy are left out instead.
    """
    require_packages("a report", "reports", "jinja2", "matplotlib")
    root = path_of(folder)
    page = root / PAGE if output is None else path_of(output)
    card = page.parent / CARD
    if page.name == CARD:
        raise ConfigError(f"the policy card is written as {CARD} in the page's folder; give the page another name")
    inputs, left_out = find(root, policy, logits), list[str]()
    sources = [inputs.policy_file, inputs.logits, run or root / "run", comparison or root / "comparison"]
    for path in (page, card):
        require_apart(path, *(source for source in sources if source is not None))
    measured = measure_policy(inputs, split)
    written = Report(
        page=page,
        card=card,
        folder=root,
        inputs=inputs,
        measured=measured,
        checks=(*inputs.policy.guards, *measured.evaluation.guards),
        budgets=find_budgets(measured),
        run=read_part(run, root / "run", lambda path: read_run(path, inputs.policy), left_out),
        comparison=read_part(comparison, root / "comparison", lambda path: read_comparison(path, measured), left_out),
        left_out=tuple(left_out),
    )
    for path, text in zip((page, card), render(written), strict=True):
        write_text(path, text.encode("utf-8", "replace").decode())  # paths may hold bytes that are not text
    return written


def render(report: Report) -> tuple[str, str]:
    """Return the page, one HTML file that needs nothing else, and the policy card, in Markdown as GitHub has it."""
    inputs, measured, split = report.inputs, report.measured, report.measured.split
    policy, test, evaluation = inputs.policy, measured.test, measured.evaluation
    calibration = [measure_calibration(measured, policy.stages[at], test.logits[at]) for at in measured.answering]
    mistakes = find_mistakes(measured)
    flags = ["--policy", inputs.policy_name, *([] if split == "test" else ["--split", split])]
    commands = [
        _fit_command(inputs, for_budget=False),
        ["cauc", "evaluate", str(inputs.logits), *flags],
        ["cauc", "report", str(report.folder), "--logits", str(inputs.logits), *flags],
    ]
    contents = {
        "report": report,
        "policy": policy,
        "split": split,
        "measures": evaluation.measures,
        "last": evaluation.models[-1],
        "verdict": report.verdict,
        "warnings": [check for check in report.checks if check.fired],
        "passed": [check for check in report.checks if not check.fired],
        "evaluated": evaluation.sheet(),
        "fit": policy.sheet(),
        "calibration": calibration,
        "mistakes": mistakes,
        "mistakes_grid": mistakes_grid(mistakes),
        "splits": _splits_grid(measured),
        "version": __version__,
        "fit_at_budget": shlex.join([*_fit_command(inputs, for_budget=True), "--budget"]),
        "commands": "\n".join(map(shlex.join, commands)),
    }
    curve, places = draw_curve(evaluation, report.budgets)
    script = _read("script.js")
    page = _template("page.html", autoescape=True).render(
        **contents,
        style=_read("style.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        curve=curve,
        methods=report.comparison and draw_comparison(report.comparison[1]),
        reliability=[draw_reliability(model, place) for place, model in enumerate(calibration)],
        budgets=report.budgets and report.budgets.as_json(places),
    )
    return page, _template("card.md", autoescape=False, finalize=_plain).render(**contents)


def _splits_grid(measured: Measured) -> Grid:
    """Return a table of the splits that the policy was fitted, chosen and measured on."""
    policy, test = measured.policy, measured.test
    uses = [(policy.calibration, "temperatures and fusion"), (policy.validation, "thresholds")]
    rows = [(of.split, f"{of.n:,}", use, of.examples_fingerprint) for of, use in uses if of is not None]
    rows.append((measured.split, f"{len(test):,}", "these figures", test.examples_fingerprint()))
    notes = ["a fingerprint is a digest of example ids and labels"]
    return Grid("Splits", ("split", "examples", "used for", "fingerprint"), tuple(rows), tuple(notes))


def _template(name: str, **options: Any) -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment: Environment = Environment(
        loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options
    )
    environment.filters |= {
        "commas": "{:,}".format,
        "interval": share_text,
        "number": number,
        "percent": percent,
        "ratio": decimals,
        "short": shortened,
        "titled": lambda grid, title: replace(grid, title=grid.title or title),
    }
    return environment.get_template(name)


def _read(name: str) -> str:
    return files("cauc_ray.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Return a value as Markdown shows it; what is marked up already stays."""
    return markdown_text(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _budget_text(policy: Policy) -> float | str | None:
    confidence = policy.threshold_choice.confidence
    return policy.budget if confidence is None else f"{policy.budget!r}@{confidence!r}"


def _fit_command(inputs: Inputs, *, for_budget: bool) -> list[str]:
    """Return the command that fits the policy.   for_budget: its chain for another budget, which is to be added."""
    policy, choice = inputs.policy, inputs.policy.threshold_choice
    declared = LogitTable(inputs.logits).declared_costs
    options: dict[str, Any] = {
        "models": tuple(stage.name for stage in sorted(policy.answering, key=lambda stage: stage.cost)),
        "method": f"single:{policy.models[0]}" if policy.method == "single" else policy.method,
        "embedding": policy.encoder,
        "seed": getattr(policy, "seed", None),
        "calibrator": getattr(policy, "calibrator", None),
        "calibration_split": policy.calibration.split,
        "validation_split": policy.validation and policy.validation.split,
        "objective": choice.objective,
    }
    if not policy.scored:
        options["models"] = policy.models
    if policy.method == "rf" and policy.schedule is not None:
        options["rule"] = "gain"
    if not for_budget:
        if policy.search is not None:
            options["models"] = policy.search.pool
            options |= {"search": True} if policy.encoder is None else {"method": "auto"}
        elif policy.safe is not None:
            options |= {"models": policy.safe.models, "safe": True}
        if (at := choice.certificate) is not None:
            options |= {"certify": f"risk<={at.risk:g}@{at.confidence:g}", "by": at.by}
        elif choice.price is not None:
            options["price"] = choice.price
        else:
            same = policy.threshold if isinstance(policy.threshold, float) else max(policy.threshold, default=0.0)
            options |= {"threshold": same} if choice.rule == "given" else {"budget": _budget_text(policy)}
    costs = declared | {stage.name: stage.cost for stage in policy.stages}
    if policy.costs == "per-model" and any(declared.get(name, 0.0) != costs[name] for name in policy.models):
        names = dict.fromkeys((*policy.models, *options["models"]))
        options["costs"] = tuple(f"{name}={costs[name]!r}" for name in names if name in costs)
    defaults = inspect.signature(fit).parameters
    words = ["cauc", "fit", str(inputs.logits), "-o", "policy.json" if for_budget else inputs.policy_name]
    for name, value in options.items():
        if value is not None and value != defaults[name].default:
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
