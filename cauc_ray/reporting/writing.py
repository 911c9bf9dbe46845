"""Write a report, one HTML page and a policy card: the Python side of `cauc report`."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cauc_ray import __version__
from cauc_ray.api.evaluated import evaluation_summary
from cauc_ray.api.offline import require_apart
from cauc_ray.api.options import FitOptions
from cauc_ray.api.tables import amount, number, percent
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError, require_packages
from cauc_ray.files.documents import write_text
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.curves import (
    Budgets,
    MethodCurve,
    find_budgets,
    read_curves,
    share_text,
    title_of,
    trace_methods,
)
from cauc_ray.reporting.drawing import SIZES, draw_confidences, draw_curves, draw_reliability, shortened
from cauc_ray.reporting.finding import Found, Run, class_names, find, read_part, read_run
from cauc_ray.reporting.measured import Measured, Verdict, find_mistakes, judge, measure_calibration, measure_policy

if TYPE_CHECKING:
    from jinja2 import Environment


PAGE, CARD = "report.html", "policy-card.md"


@dataclass(frozen=True, slots=True)
class Report:
    """A report that was written.   page: the HTML file.   card: the policy card, Markdown, in the same folder.

    checks: those made when the policy was fitted, and of its costs on test; those that fired are warnings.
    run: None where there is none.   labels: names of classes by index, where known.   left_out: why what lies in the
    folder is not shown.
    """

    page: Path
    card: Path
    folder: Path
    found: Found
    measured: Measured
    verdict: Verdict
    checks: tuple[Guard, ...]
    curves: tuple[MethodCurve, ...]
    budgets: Budgets | None
    run: Run | None
    labels: dict[int, str]
    left_out: tuple[str, ...]

    @property
    def comparison(self) -> AnyPath | None:
        """Return the comparison that lent curves, None without one."""
        return next((curve.source for curve in self.curves if curve.source is not None), None)

    def label(self, index: int) -> str:
        """Return the name of a class, its index where nobody has named it."""
        return self.labels.get(index, str(index))

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc report --json` prints: where the files are, the verdict, and what `evaluate` prints."""
        file, verdict = self.found.policy_file, self.verdict
        return {
            "page": str(self.page),
            "card": str(self.card),
            "policy": None if file is None else str(file),
            "logits": str(self.found.logits),
            "split": self.measured.split,
            "run": None if self.run is None else str(self.run.path),
            "comparison": None if self.comparison is None else str(self.comparison),
            "left_out": list(self.left_out),
            "tone": verdict.tone,
            "verdict": verdict.sentence,
            "consequence": verdict.consequence,
            "gain": verdict.gain.value,
            "gain_interval": [verdict.gain.low, verdict.gain.high],
            **evaluation_summary(self.measured.evaluation),
        }


def report(
    folder: str | Path = ".",
    *,
    policy: str | AnyPath | Policy | None = None,
    logits: str | AnyPath | None = None,
    run: str | AnyPath | None = None,
    comparison: str | AnyPath | None = None,
    split: str = "test",
    output: str | Path | None = None,
) -> Report:
    """Write one self-contained HTML page on a policy, and its policy card in the same folder.

    Args:
        folder: where the parts are that are not named, under the names that cauc's verbs and documents give them.
        policy: or its file; without it FOLDER/policy.json, or of FOLDER/policies the one that the run is of.
        logits: the table that it was fitted on; without it FOLDER/logits.
        run: the output of `cauc run` with this policy; without it FOLDER/run, where there is one.
        comparison: the output of `cauc compare -o` on this table; without it FOLDER/comparison, where there is one.
        split: where final figures are measured.
        output: the page; without it FOLDER/report.html.

    Raises:
        CaucError: DataError where a part is missing or does not belong to the policy, ConfigError where something
            must be named or a package is missing. What lies in the folder and is not named is left out instead.
    """
    require_packages("a report", "reports", "jinja2", "matplotlib")
    root = Path(folder)
    page = Path(output) if output is not None else root / PAGE
    card = page.with_name(CARD)
    if page.name == CARD:
        raise ConfigError(f"the policy card is written as {CARD} in the page's folder; give the page another name")
    found, left_out = find(root, policy, logits), list[str]()
    used = [found.policy_file, found.logits, run or root / "run", comparison or root / "comparison"]
    for path in (page, card):
        require_apart(path, *(each for each in used if each is not None))
    measured = measure_policy(found, split)
    own_run = read_part(run, root / "run", lambda path: read_run(path, found.policy), left_out)
    compared = read_part(comparison, root / "comparison", lambda path: read_curves(path, measured), left_out)
    written = Report(
        page=page,
        card=card,
        folder=root,
        found=found,
        measured=measured,
        verdict=judge(measured),
        checks=(*found.policy.guards, *measured.evaluation.guards),
        curves=(*trace_methods(measured), *(compared or ())),
        budgets=find_budgets(measured),
        run=own_run,
        labels=class_names(found.logits, own_run),
        left_out=tuple(left_out),
    )
    for path, text in zip((page, card), render(written), strict=True):
        write_text(path, text.encode("utf-8", "replace").decode())  # paths may hold bytes that are not text
    return written


def render(report: Report) -> tuple[str, str]:
    """Return the page, one HTML file that needs nothing else, and the policy card, in Markdown as GitHub has it."""
    found, measured, split = report.found, report.measured, report.measured.split
    models = list(enumerate(zip(found.policy.stages, measured.test.logits, strict=True)))[measured.n_encoders :]
    calibration = [measure_calibration(measured, *model) for _, model in models]
    mistakes = [find_mistakes(measured, stage) for stage, _ in models]
    policy = ["--policy", found.policy_name, *([] if split == "test" else ["--split", split])]
    commands = [
        _fit_command(found, for_budget=False),
        ["cauc", "evaluate", str(found.logits), *policy],
        ["cauc", "report", str(report.folder), "--logits", str(found.logits), *policy],
    ]
    known = {
        "report": report,
        "method": title_of(found.policy.method),
        "calibration": calibration,
        "mistakes": mistakes,
        "version": __version__,
        "fit_at_budget": shlex.join([*_fit_command(found, for_budget=True), "--budget"]),
        "commands": "\n".join(map(shlex.join, commands)),
    }
    drawn = {size: draw_curves(measured, report.curves, report.budgets, size) for size in SIZES}
    texts = {name: _read(f"{name}.{ending}") for name, ending in (("style", "css"), ("script", "js"))}
    page = _template("page.html", autoescape=True).render(
        **known,
        **texts,
        **{f"{name}_hash": _hash(text) for name, text in texts.items()},
        curves=[svg for svg, _ in drawn.values()],
        reliability=[draw_reliability(each, place) for place, each in enumerate(calibration)],
        confidences=[draw_confidences(stage.bars, place) for place, stage in enumerate(mistakes)],
        budgets=report.budgets and report.budgets.as_json() | {"at": {size: at for size, (_, at) in drawn.items()}},
    )
    return page, _template("card.md", autoescape=False, finalize=_escape_markdown).render(**known)


def _template(name: str, **options: Any) -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment: Environment = Environment(
        loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options
    )
    environment.filters |= {
        "amount": lambda value: "–" if value is None else amount(value),
        "commas": lambda value: f"{value:,}",
        "interval": share_text,
        "number": number,
        "percent": percent,
        "short": shortened,
    }
    return environment.get_template(name)


def _read(name: str) -> str:
    return files("cauc_ray.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the name of a text in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escape_markdown(value: Any) -> Any:
    """Return a value as Markdown (and the HTML within it) shows it; what is marked up already stays."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    text = " ".join(value.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}|~#!$@])", r"\\\1", text)


def _fit_command(found: Found, *, for_budget: bool) -> list[str]:
    """Return the command that fits the policy.   for_budget: its chain for another budget, which is to be added."""
    policy, choice = found.policy, found.policy.threshold_choice
    declared = LogitTable(found.logits).declared_costs
    given: dict[str, Any] = {
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
        given["models"] = policy.models
    if policy.method == "rf" and policy.schedule is not None:
        given["rule"] = "gain"
    if policy.costs == "per-model" and any(declared.get(stage.name, 0.0) != stage.cost for stage in policy.stages):
        given["costs"] = tuple(f"{stage.name}={stage.cost!r}" for stage in policy.stages)
    if not for_budget:
        if policy.search is not None:
            given |= {"models": policy.search.pool, "costs": None}
            given |= {"search": True} if policy.encoder is None else {"method": "auto"}
        elif policy.safe is not None:
            given |= {"models": policy.safe.models, "safe": True, "costs": None}
        if (at := choice.certificate) is not None:
            given["certify"] = f"risk<={at.risk:g}@{at.confidence:g}"
        elif choice.price is not None:
            given["price"] = choice.price
        else:
            same = policy.threshold if isinstance(policy.threshold, float) else max(policy.threshold, default=0.0)
            given |= {"threshold": same} if choice.rule == "given" else {"budget": policy.budget}
    words = ["cauc", "fit", str(found.logits), "-o", "policy.json" if for_budget else found.policy_name]
    for name, value in given.items():
        if value is not None and value != FitOptions.model_fields[name].get_default():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
