"""The page and the card of a report, from templates."""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cauc_ray import __version__
from cauc_ray.api.options import FitOptions
from cauc_ray.api.tables import amount, number, percent
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError
from cauc_ray.reporting.budgets import share_text
from cauc_ray.reporting.curves import title_of
from cauc_ray.reporting.drawing import SIZES, draw_confidences, draw_curves, draw_reliability, shortened
from cauc_ray.reporting.finding import Found
from cauc_ray.reporting.measured import find_mistakes, measure_calibration

if TYPE_CHECKING:
    from jinja2 import Environment

    from cauc_ray.reporting.writing import Report


def require_packages() -> None:
    """Raise ConfigError with the install command where a package that reports need is missing."""
    missing = [package for package in ("jinja2", "matplotlib") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"a report needs {' and '.join(missing)}; install with: pip install 'cauc-ray[reports]'")


def render(report: Report) -> tuple[str, str]:
    """Return the page, one HTML file that needs nothing else, and the policy card, in Markdown as GitHub has it."""
    found, measured, split = report.found, report.measured, report.measured.split
    models = list(enumerate(zip(found.policy.stages, measured.test.logits, strict=True)))
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
        "models": policy.models,
        "method": policy.method,
        "calibrator": getattr(policy, "calibrator", None),
        "calibration_split": policy.calibration.split,
        "validation_split": policy.validation and policy.validation.split,
        "objective": choice.objective,
    }
    if policy.costs == "per-model" and any(declared.get(stage.name) != stage.cost for stage in policy.stages):
        given["costs"] = tuple(repr(stage.cost) for stage in policy.stages)
    if not for_budget:
        if policy.search is not None:
            given |= {"models": policy.search.pool, "search": True, "costs": None}
        elif policy.safe is not None:
            given |= {"models": policy.safe.models, "safe": True, "costs": None}
        if (at := choice.certificate) is not None:
            given["certify"] = f"risk<={at.risk:g}@{at.confidence:g}"
        else:
            given |= {"threshold": policy.threshold} if choice.rule == "given" else {"budget": policy.budget}
    words = ["cauc", "fit", str(found.logits), "-o", "policy.json" if for_budget else found.policy_name]
    for name, value in given.items():
        if value is not None and value != FitOptions.model_fields[name].get_default():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, ",".join(value) if isinstance(value, tuple) else str(value)]
    return words
