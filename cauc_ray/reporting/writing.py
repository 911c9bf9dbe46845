"""Write a report: the Python side of `cauc report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauc_ray.api.offline import require_apart
from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import write_text
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.content import Content, gather
from cauc_ray.reporting.finding import find
from cauc_ray.reporting.page import render_card, render_page, require_jinja

PAGE, CARD = "report.html", "policy-card.md"


@dataclass(frozen=True, slots=True)
class Report:
    """A report that was written.   page: the HTML file.   card: the policy card, Markdown, beside it."""

    page: Path
    card: Path
    content: Content

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc report --json` prints: where the files are, what they are of, what they say first."""
        found, verdict = self.content.found, self.content.verdict
        return {
            "page": str(self.page),
            "card": str(self.card),
            "policy": None if found.policy_file is None else str(found.policy_file),
            "policy_id": found.policy.id,
            "logits": str(found.logits),
            "split": self.content.measured.split,
            "run": None if found.run is None else str(found.run),
            "comparison": None if found.comparison is None else str(found.comparison),
            "sweep": None if found.sweep is None else str(found.sweep),
            "left_out": [*found.runs_left_out, *found.left_out, *found.unreadable],
            "tone": verdict.tone,
            "verdict": verdict.sentence,
            "consequence": verdict.consequence,
            "accuracy": verdict.accuracy.value,
            "cost": verdict.cost,
            "relative_cost": verdict.relative_cost,
            "gain": verdict.gain.value,
            "gain_interval": [verdict.gain.low, verdict.gain.high],
        }


def report(
    folder: str | Path,
    *,
    policy: str | Path | Policy | None = None,
    logits: str | Path | None = None,
    split: str = "test",
    output: str | Path | None = None,
) -> Report:
    """Write one self-contained HTML page on a policy, and its policy card beside it.

    folder: where somebody worked: what lies in it and down to two levels below is found by what it is.   policy:
    or its file, needed where there are several and no run says which is meant.   logits: the table that it was fitted
    on, needed where there are several or it lies elsewhere.   split: where final figures are measured.
    output: the page, FOLDER/report.html without one.
    Raises CaucError: DataError where something is missing or is not what the policy was fitted on, ConfigError where
    something must be named or a package is missing.
    """
    require_jinja()
    root = Path(folder)
    page = Path(output) if output is not None else root / PAGE
    card = page.with_name(CARD)
    if page.name == CARD:
        raise ConfigError(f"the policy card is written as {CARD} beside the page; give the page another name")
    found = find(root, policy, logits, split=split)
    for path in (page, card):
        read = [file.path for file in found.curve_files] + ([] if found.run is None else [found.run])
        files = [] if found.policy_file is None else [found.policy_file]
        require_apart(path, *files, found.logits, *read)
    content = gather(root, found, split)
    # Both are there before either is written.
    pages = {page: render_page(content), card: render_card(content)}
    for path, text in pages.items():
        write_text(path, text.encode("utf-8", "replace").decode())  # paths may hold bytes that are no text
    return Report(page, card, content)
