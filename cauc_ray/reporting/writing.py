"""Write a report: the Python side of `cauc report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauc_ray.api.evaluated import evaluation_summary
from cauc_ray.api.offline import require_apart
from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import write_text
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy
from cauc_ray.reporting.budgets import Budgets, find_budgets
from cauc_ray.reporting.curves import MethodCurve, read_curves, trace_methods
from cauc_ray.reporting.finding import Found, Run, class_names, find, read_part, read_run
from cauc_ray.reporting.measured import Measured, measure_policy
from cauc_ray.reporting.page import render, require_packages
from cauc_ray.reporting.verdict import Verdict, judge

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
    require_packages()
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
