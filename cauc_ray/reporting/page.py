"""The page and the card of a report, from templates."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cauc_ray import __version__
from cauc_ray.api.tables import amount, number, percent
from cauc_ray.comparison.quoted import paper_name
from cauc_ray.errors import ConfigError
from cauc_ray.reporting import panels
from cauc_ray.reporting.content import Content
from cauc_ray.reporting.figures import SIZES, draw_curves
from cauc_ray.reporting.labels import shortened
from cauc_ray.reporting.provenance import METHOD_NAMES, temperature_in_words
from cauc_ray.reporting.showing import budget_rows, point_within, points_for_script, with_interval
from cauc_ray.reporting.wording import Verbatim, escape_markdown, fenced

if TYPE_CHECKING:
    from jinja2 import Environment

# What the paper has no name for, or one for two things, in plain words.
METHOD_WORDS: Mapping[str, str] = {
    **METHOD_NAMES,
    "max-probability": "uncalibrated confidence",
    "random": "single models by lot",
    "shuffled": "CAUC-RF, confidences shuffled",
}


def require_jinja() -> None:
    """Raise ConfigError with the install command where the template engine is missing."""
    if find_spec("jinja2") is None:
        raise ConfigError("a report needs jinja2; install it with: pip install 'cauc-ray[reports]'")


def render_page(content: Content) -> str:
    """Return the page, one HTML file that needs nothing else."""
    environment = _environment(autoescape=True)
    style, script = (_read(name) for name in ("style.css", "script.js"))
    figures = tuple(draw_curves(content.curves, content.budgets, content.verdict, size) for size in SIZES)
    return environment.get_template("page.html").render(
        **_known(content),
        figures=figures,
        panels=[panels.draw_reliability(each) for each in content.calibration],
        frame=panels,
        points=None if content.budgets is None else points_for_script(content.budgets, figures),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def render_card(content: Content) -> str:
    """Return the policy card, in Markdown as GitHub has it."""
    environment = _environment(autoescape=False, finalize=escape_markdown)
    environment.filters["fenced"] = fenced
    return environment.get_template("card.md").render(**_known(content))


def _known(content: Content) -> dict[str, Any]:
    policy, budgets = content.measured.policy, content.budgets
    validation = None if policy.validation is None else policy.validation.split
    rows, start = [], None
    if budgets is not None:
        assert validation is not None
        start = point_within(budgets, budgets.places[budgets.start])
        rows = budget_rows(budgets, start, policy.models, content.measured.split, validation)
    return {
        "content": content,
        "policy": policy,
        "verdict": content.verdict,
        "origin": content.origin,
        "split": content.measured.split,
        "n": len(content.measured.test),
        "rows": rows,
        "start": start,
        "version": __version__,
    }


def _environment(**options: Any) -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_read), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **options
    )
    # What stands in a script element may not end it, whatever a model is called.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.filters |= {
        "amount": lambda value: "–" if value is None else amount(value),
        "bars": panels.draw_bars,
        "commas": lambda value: f"{value:,}",
        "interval": with_interval,
        "method": lambda name: METHOD_WORDS.get(name) or paper_name(name),
        "number": number,
        "percent": percent,
        "short": shortened,
        "stack": panels.draw_stack,
        "temperature": temperature_in_words,
        "verbatim": Verbatim,
    }
    return environment


def _read(name: str) -> str:
    return files("cauc_ray.reporting").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return what a content security policy calls a text by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
