"""Reports: what they say and refuse, against `fit`, `evaluate` and slow loops."""

import json
import os
import random
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markdown_it import MarkdownIt
from reported import MODELS, at_budget, fitted, require_evaluated, write_run
from synthetic import write_table

import cauc_ray
from cauc_ray.api.evaluated import evaluation_summary
from cauc_ray.comparison.comparing import save_comparison
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.policies.policy import Policy


def data_of(page):
    """Return what the slider's script reads, and the labels of its figures."""
    text = page.read_text()
    labels = re.findall(r'<tr><th scope="row">([^<]*)</th><td><data class="shown"', text)
    return json.loads(re.search(r'id="points">(.*?)</script>', text)[1]), labels


@pytest.mark.parametrize("name", ["base", "rf", "ragged", "per-call", "macro-f1"])
def test_the_page_holds_what_fitting_and_evaluating_at_every_budget_give(homes, name):
    folder = homes[name]
    own = Policy.load(folder / "policy.json")
    data, labels = data_of(folder / "report.html")
    assert len(data["points"]) > 20
    assert np.all(np.diff([point["cost"] for point in data["points"]]) > 0)
    rng = random.Random(name)
    # Exactly at a point, by as little below it as rounding may be, and by what is more than that.
    cost = rng.choice(data["points"][1:])["cost"]
    budgets = [data["low"], rng.uniform(data["low"], 1.3 * data["high"]), cost, cost * (1 - 0.9e-9), cost * (1 - 2e-9)]
    for budget in budgets:
        within = [point for point in data["points"] if point["cost"] <= budget + data["tolerance"] * abs(budget)]
        found = dict(zip(labels, within[-1]["figures"], strict=True))
        require_evaluated(found, *at_budget(folder / "LOGITS", own, budget))


def test_equal_input_gives_equal_pages_that_load_nothing(homes, tmp_path):
    import matplotlib as mpl

    settings, folder = dict(mpl.rcParams), homes["rf"]
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.html"))  # a name that is no text
    report = cauc_ray.report(folder, output=odd)
    assert report.page.read_bytes() == (folder / "report.html").read_bytes()
    assert report.card.read_bytes() == (folder / "policy-card.md").read_bytes()
    assert dict(mpl.rcParams) == settings
    evaluation = evaluation_summary(cauc_ray.evaluate(folder / "LOGITS", folder / "policy.json"))
    require_evaluated(report.budgets.own.figures, Policy.load(folder / "policy.json"), evaluation)
    assert report.as_json().items() >= evaluation.items()
    text = report.page.read_text()
    assert not re.search(r"(?:src|href)\s*=\s*(?![\"']?(?:#|data:))", text)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(|\sstyle=", text)
    assert "default-src 'none'" in text


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0.625, "costs": [1.0, 2.5, 7.0]},
        *(
            pytest.param(options, marks=pytest.mark.soak("full"))
            for options in (
                {"objective": "macro-f1", "budget": 8.0},
                {"search": True, "method": "rf", "budget": 6.0},
                {"safe": True},
                {"certify": "risk<=0.4@0.9"},
            )
        ),
    ],
    ids=str,
)
def test_the_commands_make_the_policy_and_the_page_again(homes, command, tmp_path, options):
    folder = tmp_path / "again"
    shutil.copytree(homes["base"], folder)
    cauc_ray.fit(folder / "LOGITS", models=MODELS, **options).save(folder / "policy.json")
    report = cauc_ray.report(folder)
    before = {path: path.read_bytes() for path in (report.page, report.card, folder / "policy.json")}
    tokens = MarkdownIt("commonmark").parse(report.card.read_text())
    for line in next(token.content for token in tokens if token.type == "code_block").splitlines():
        assert command(*shlex.split(line)[1:])[0] == 0
    assert {path: path.read_bytes() for path in before} == before


def test_the_card_is_markdown_in_which_names_are_text(hostile, homes):
    report, names = hostile
    for card, own in ((report.card, names), (homes["base"] / "policy-card.md", MODELS)):
        tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.read_text())
        flat = [*tokens, *(child for token in tokens for child in token.children or ())]
        assert not [token for token in flat if token.type in ("html_block", "html_inline", "image", "link_open")]
        assert len([token for token in tokens if token.type == "tr_open"]) >= 15
        assert "".join(child.content for child in tokens[1].children).endswith(" → ".join(own))
        assert len([token for token in tokens if token.type == "heading_open"]) == 8


def test_mistakes_add_up_to_a_loop_over_the_answers(homes):
    measured = cauc_ray.report(homes["ragged"]).measured
    chain, replay = measured.test, measured.evaluation.replay
    tables = re.search("Mistakes by the stage.*?</table>", (homes["ragged"] / "report.html").read_text(), re.DOTALL)[0]
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in re.findall("<tr>.*?</tr>", tables)[1:]]
    alone = [logits.argmax(axis=1) for logits in chain.logits]
    for stage, row in enumerate(rows):
        counts = [0] * 7
        for example in np.flatnonzero(replay.stages == stage):
            label, right = chain.labels[example], [model[example] == chain.labels[example] for model in alone]
            is_wrong = replay.predictions[example] != label
            last, own, some = right[-1], right[stage], any(right)
            whats = (True, is_wrong, is_wrong and last, is_wrong and some and not last, is_wrong and not some)
            counts = [
                n + bool(what)
                for n, what in zip(counts, (*whats, is_wrong and own, not is_wrong and not own), strict=True)
            ]
        assert [int(row[0]), *map(int, row[2:])] == counts
    assert len(rows) == len(MODELS)


def test_classes_have_their_names_where_they_are_known(tmp_path):
    fitted(tmp_path, table={"n": 200}, method="rf")
    policy = Policy.load(tmp_path / "policy.json")
    names = ["wren", "robin", "finch", "swift", "lark & co"]
    write_run(tmp_path / "run", policy)
    answers = {"example_id": list("abcde"), "prediction": range(5), "prediction_label": names}
    (tmp_path / "run" / "predictions").mkdir()
    pq.write_table(pa.table(answers), tmp_path / "run" / "predictions" / "part.parquet")
    assert '<td class="words">lark &amp; co</td>' in cauc_ray.report(tmp_path).page.read_text()
    info = json.loads((tmp_path / "LOGITS" / "pool.json").read_text())
    (tmp_path / "LOGITS" / "pool.json").write_text(json.dumps({**info, "labels": [f"{n}!" for n in names]}))
    assert '<td class="words">lark &amp; co!</td>' in cauc_ray.report(tmp_path).page.read_text()


def test_a_policy_that_wastes_money_is_told_so(homes, tmp_path):
    wasteful = cauc_ray.fit(homes["base"] / "LOGITS", models=MODELS, threshold=2.0)
    options = {"logits": homes["base"] / "LOGITS", "output": tmp_path / "page.html"}
    better = cauc_ray.report(tmp_path, policy=wasteful, **options).budgets.better
    assert better.quality >= wasteful.expected.accuracy.value
    assert better.cost < wasteful.expected.cost
    assert "wastes money" in (tmp_path / "page.html").read_text()
    best = cauc_ray.fit(homes["base"] / "LOGITS", models=MODELS, budget=9.0)
    assert cauc_ray.report(tmp_path, policy=best, **options).budgets.better is None


def test_each_part_may_lie_anywhere(homes, command, tmp_path):
    shutil.copytree(homes["rf"] / "LOGITS", tmp_path / "table")
    policy = Policy.load(homes["rf"] / "policy.json")
    policy.save(tmp_path / "chosen.json")
    write_run(tmp_path / "monday", policy)
    compared = cauc_ray.compare(tmp_path / "table", models=MODELS, methods=["frugalgpt", "oracle", "single"])
    save_comparison(compared, tmp_path / "methods")
    paths = {"policy": "chosen.json", "logits": "table", "run": "monday", "comparison": "methods"}
    paths = {part: str(tmp_path / name) for part, name in paths.items()}
    (tmp_path / "out").mkdir()
    flags = [word for part, path in paths.items() for word in (f"--{part}", path)]
    code, out, _ = command("report", tmp_path / "out", *flags, "--json")
    said = json.loads(out)
    assert code == 0
    assert {part: said[part] for part in paths} == paths
    assert said["left_out"] == []
    text = (tmp_path / "out" / "report.html").read_text()
    assert "FrugalGPT" in text
    assert ">oracle<" not in text
    assert "20260101T000000-abcdef" in text
    assert said["verdict"] in text


@pytest.mark.parametrize("how", ["own", "logits", "labels", "costs"])
def test_curves_of_another_table_are_never_drawn(tmp_path, how):
    """Another prompt's table, say: of the same models and as many examples."""
    chains = fitted(tmp_path, table={"n": 150}, method="rf")
    other, options = tmp_path.with_name(f"{tmp_path.name}-other"), {}
    shutil.copytree(tmp_path / "LOGITS", other)
    chain = chains["test"]
    ids = [f"test-{example}" for example in chain.example_ids]
    labels = (chain.labels + 1) % 5 if how == "labels" else chain.labels
    for model, logits in zip(MODELS, chain.logits, strict=True):
        moved = logits[:, ::-1].copy() if how == "logits" and model == "m1" else logits
        write_logits(other, model, "test", example_ids=ids, labels=labels, logits=moved)
    if how == "costs":
        options = {"costs": [1.0, 4.0, 16.0]}
    comparison = tmp_path / "comparison"
    save_comparison(cauc_ray.compare(other, models=MODELS, methods=["frugalgpt", "single"], **options), comparison)
    report = cauc_ray.report(tmp_path)
    assert ("frugalgpt" in [curve.name for curve in report.curves]) == (how == "own")
    if how == "own":
        assert report.as_json()["left_out"] == []
        return
    (why,) = report.as_json()["left_out"]
    assert {"labels": "other examples"}.get(how, f"other {how}") in why
    assert why in report.page.read_text()
    with pytest.raises(DataError, match=re.escape(why)):
        cauc_ray.report(tmp_path, comparison=comparison)


def test_a_run_counts_where_it_is_of_the_policy(tmp_path):
    fitted(tmp_path, table={"n": 150}, method="rf")
    policy = Policy.load(tmp_path / "policy.json")
    other = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", budget=6.0)
    for name, of, models in (("run", other, MODELS), ("strange", policy, ["x", "y", "z"])):
        write_run(tmp_path / name, of, models=models)
        with pytest.raises(DataError, match="is a run of another policy"):
            cauc_ray.report(tmp_path, run=tmp_path / name)
    report = cauc_ray.report(tmp_path)
    assert report.run is None
    assert "is a run of another policy" in report.page.read_text()
    # Of several policies the run's is meant.
    (tmp_path / "policies").mkdir()
    (tmp_path / "policy.json").rename(tmp_path / "policies" / "own.json")
    other.save(tmp_path / "policies" / "other.json")
    report = cauc_ray.report(tmp_path)
    assert report.found.policy.id == other.id
    assert report.run.summary["run_id"] in report.page.read_text()
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"holds 2 policies .*policies/other.json.*name one with --policy"):
        cauc_ray.report(tmp_path)


def test_unlabelled_test_examples_are_refused(tmp_path):
    chain = fitted(tmp_path, table={"n": 120})["test"]
    for model, logits in zip(MODELS, chain.logits, strict=True):
        ids = [f"test-{example}" for example in chain.example_ids]
        write_logits(tmp_path / "LOGITS", model, "test", example_ids=ids, labels=None, logits=logits)
    with pytest.raises(DataError, match="has no label; a report needs labels"):
        cauc_ray.report(tmp_path)


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_report_needs_packages_and_says_how_to_install_them(homes, monkeypatch, package):
    from importlib import util

    monkeypatch.setattr("cauc_ray.errors.find_spec", lambda name: None if name == package else util.find_spec(name))
    with pytest.raises(CaucError, match=rf"{package}; .*pip install 'cauc-ray\[reports\]'"):
        cauc_ray.report(homes["rf"])


def test_a_table_without_validation_has_a_page(tmp_path):
    write_table(tmp_path / "LOGITS", n=200)
    shutil.rmtree(tmp_path / "LOGITS" / "model=m0" / "split=validation")
    cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", threshold=0.7).save(tmp_path / "policy.json")
    text = cauc_ray.report(tmp_path).page.read_text()
    assert "nothing to choose a threshold on" in text
    assert 'id="budget"' not in text


def test_warnings_are_on_the_page_and_the_card(tmp_path):
    with pytest.warns(cauc_ray.CaucWarning):  # the second model adds nothing but its cost, and its noise
        fitted(tmp_path, table={"n": 300, "strengths": (2.6, 0.2)}, models=MODELS[:2], method="rf")
    report = cauc_ray.report(tmp_path)
    fired = [check for check in report.checks if check.fired]
    assert fired
    assert report.verdict.tone == "bad"
    assert all(f"**{check.name.replace('-', ' ')}**" in report.card.read_text() for check in fired)
    assert all(check.name.replace("-", " ") in report.page.read_text() for check in fired)


@pytest.mark.parametrize(
    "options", [{"costs": [0.0, 0.0, 0.0]}, {"costs": [1e-9, 1.0, 1e6]}, {"models": ["m2"]}], ids=str
)
@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
def test_odd_costs_and_single_models_have_a_page(tmp_path, options):
    fitted(tmp_path, table={"n": 60}, **options)
    page = cauc_ray.report(tmp_path).page.read_text()
    assert ('id="budget"' in page) == ("models" not in options)
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert drawn
    assert not re.search(r"\b(nan|NaN|inf|Infinity|undefined|None)\b", "".join(drawn))
