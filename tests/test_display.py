"""Results display themselves: the same sheet in terminals of any width and in notebooks."""

import os
import pty
import subprocess
import sys

import numpy as np
import pytest

import cauc_ray
from cauc_ray.api.worth import SingleModel, judge
from cauc_ray.display import Grid, Sheet
from cauc_ray.numbers.intervals import paired_difference, share
from cauc_ray.policies.evidence import Measures

NAMES = ("model", "mean cost of a call", "accuracy", "note")
TABLE = Grid("costs", NAMES, (("small", "1.5", "90.0 %", "a b c " * 9), ("<large>", "10", "95.0 %", "x")), texts=(3,))


@pytest.mark.parametrize("width", [24, 40, 80, None])
def test_no_cell_is_cut_at_any_width(width):
    lines = list(TABLE.lines(width))
    text = " ".join(" ".join(lines).split())
    for cell in ("small", "<large>", "1.5", "10", "90.0 %", "95.0 %", "cost", "accuracy"):
        assert cell in text
    assert text.count("a") >= 9
    assert width is None or max(map(len, lines)) <= max(width, len("<large>") + 2 + 24)


def test_html_escapes_text_masks_secrets_and_folds_details_away():
    sheet = Sheet("<b>", ["s3://user:password@bucket", TABLE], ["later"])
    html = sheet.html()
    assert "&lt;b&gt;" in html
    assert "&lt;large&gt;" in html
    assert "password" not in html + sheet.text()
    assert html.index("<details>") < html.index("later")


def test_titles_are_bold_in_terminals_alone():
    show = [sys.executable, "-c", "from cauc_ray.display import Sheet; Sheet('title', ['line']).print()"]
    assert subprocess.run(show, capture_output=True, check=True).stdout == b"title\nline\n"
    outer, inner = pty.openpty()
    subprocess.run(show, stdout=inner, env={**os.environ, "TERM": "xterm"}, check=True)
    os.close(inner)
    assert b"\x1b[1mtitle\x1b[0m" in os.read(outer, 1000)
    os.close(outer)


def measures(accuracy, cost, largest, n=1000):
    return Measures(
        split="test", n=n, accuracy=share(accuracy * n, n), cost=cost, relative_cost=cost / largest, stages=(),
        cost_deviation=0.0,
    )  # fmt: skip


def single(name, cost, accuracy, of_policy, n=1000):
    ranks = np.arange(n)
    gain = paired_difference(ranks < of_policy * n, ranks < accuracy * n)
    return SingleModel(name, cost, share(accuracy * n, n), gain)


@pytest.mark.parametrize(
    ("accuracy", "cost", "tone", "words"),
    [
        (0.95, 4.0, "good", "Worth it: saves 60.0 % of the cost of large"),
        (0.93, 4.0, "trade", "A trade: saves 60.0 %"),
        (0.97, 11.0, "trade", "A trade: costs 10.0 % more than large"),
        (0.94, 11.0, "bad", "Not worth it: large alone is as accurate"),
        (0.79, 4.0, "bad", "Not worth it: small alone is as accurate (80.0 %)"),
    ],
)
def test_a_verdict_says_whether_a_policy_is_worth_it(accuracy, cost, tone, words):
    models = [single("small", 1.0, 0.8, accuracy), single("large", 10.0, 0.95, accuracy)]
    verdict = judge(measures(accuracy, cost, 10.0), models, "GFLOPs")
    assert (verdict.tone, verdict.answer[: len(words)]) == (tone, words)


@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
def test_an_evaluation_fits_a_narrow_terminal_and_is_judged_by_its_labels(monkeypatch):
    """Its figures are the README's, which prints it."""
    monkeypatch.setenv("COLUMNS", "80")
    policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
    evaluation = cauc_ray.evaluate(cauc_ray.sample_logits(), policy)
    text = str(evaluation)
    assert max(map(len, text.splitlines())) <= 80
    assert evaluation.verdict.answer in " ".join(text.split())
    assert evaluation.as_json()["worth"]["tone"] == evaluation.verdict.tone == "good"
    assert policy.id in str(policy)
    unlabelled = {name: np.eye(4) for name in policy.models}
    assert cauc_ray.evaluate(unlabelled, policy).verdict is None
