"""What a notebook shows of a policy and of what it answered: small HTML tables in which all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cauc_ray.policies.policy import Policy


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; the first column is text, the others are numbers.

    >>> html_table("2 < 3", ["model"], [["a&b"]])
    '<table><caption>2 &lt; 3</caption><tr><th>model</th></tr><tr><td style="text-align:left">a&amp;b</td></tr></table>'
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr>{''.join(_cell(text, is_first=place == 0) for place, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>"


def _cell(text: str, *, is_first: bool) -> str:
    return f'<td style="text-align:{"left" if is_first else "right"}">{escape(text)}</td>'


def share_text(share: float | None) -> str:
    """Return a share in percent, a dash for None.

    >>> share_text(0.914), share_text(None)
    ('91.4 %', '–')
    """
    return "–" if share is None else f"{100 * share:.1f} %"


def policy_html(policy: Policy) -> str:
    """Return a policy's chain, threshold and what validation expects of it."""
    budget = "" if policy.budget is None else f", budget {policy.budget:g} {policy.cost_unit}"
    expected = policy.expected
    says = ""
    if expected is not None:
        accuracy = share_text(None if expected.accuracy is None else expected.accuracy.value)
        says = f"; {accuracy} accuracy at {expected.cost:.4g} {policy.cost_unit} expected ({expected.split})"
    rows = []
    for place, stage in enumerate(policy.stages):
        answered = None if expected is None else expected.stages[place].answered / max(1, expected.n)
        rows.append([stage.name, f"{stage.cost:g}", f"{stage.temperature:.3f}", share_text(answered)])
    caption = f"Policy {policy.id}: {policy.method}, threshold {policy.threshold:.4f}{budget}{says}"
    return html_table(caption, ["stage", f"cost ({policy.cost_unit})", "temperature", "answers"], rows)
