"""Reports: what they say and refuse, against `fit`, `evaluate` and slow loops."""

import json
import os
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from reported import MODELS, at_budget, fitted, require_evaluated, write_run
from synthetic import write_chains, write_table

import cauc_ray
from cauc_ray.errors import CaucError, CaucWarning, DataError
from cauc_ray.policies.policy import Policy


def data_of(page):
    """Return what the slider's script reads, and the labels of its figures."""
    text = page.read_text()
    labels = re.findall(r'<tr><th scope="row">([^<]*)</th><td><data class="shown"', text)
    return json.loads(re.search(r'id="points">(.*?)</script>', text)[1]), labels


@pytest.mark.parametrize("name", ["rf", "per-call"])
def test_the_page_holds_what_fitting_and_evaluating_at_a_budget_give(homes, name):
    folder = homes[name]
    policy = Policy.load(folder / "policy.json")
    data, labels = data_of(folder / "report.html")
    assert len(data["points"]) > 20
    assert np.all(np.diff([point["cost"] for point in data["points"]]) > 0)
    cost = data["points"][len(data["points"]) // 2]["cost"]
    # Exactly at a point, by as little below it as rounding may be, and by what is more than that.
    for budget in (data["low"], 1.2 * data["high"], cost, cost * (1 - 0.9e-9), cost * (1 - 2e-9)):
        within = [point for point in data["points"] if point["cost"] <= budget + data["tolerance"] * abs(budget)]
        figures = dict(zip(labels, within[-1]["figures"], strict=True))
        require_evaluated(figures, *at_budget(folder / "LOGITS", policy, budget))


def test_equal_input_gives_equal_pages_that_load_nothing(homes, tmp_path):
    import matplotlib as mpl

    settings, folder = dict(mpl.rcParams), homes["rf"]
    odd = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.html"))  # a name that is not text
    report = cauc_ray.report(folder, output=odd)
    assert report.page.read_bytes() == (folder / "report.html").read_bytes()
    assert report.card.read_bytes() == (folder / "policy-card.md").read_bytes()
    assert dict(mpl.rcParams) == settings
    evaluation = cauc_ray.evaluate(folder / "LOGITS", folder / "policy.json").as_json()
    require_evaluated(report.budgets.current.figures, Policy.load(folder / "policy.json"), evaluation)
    assert report.as_json().items() >= evaluation.items()
    text = report.page.read_text()
    assert not re.search(r"(?:src|href)\s*=\s*(?![\"']?(?:#|data:))", text)
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest|WebSocket|import\(", text)
    assert "default-src 'none'" in text


SAFE, COSTS = {"method": "rf", "safe": True, "objective": "macro-f1", "budget": 5.0}, {"costs": [1.0, 2.5, 7.0]}


@pytest.mark.parametrize(
    "options",
    [
        SAFE,
        *(pytest.param({**of, **COSTS}, marks=pytest.mark.soak("full")) for of in (SAFE, {"threshold": 0.625})),
    ],
    ids=str,
)
def test_the_commands_make_the_policy_and_the_page_again(homes, command, tmp_path, options):
    folder = tmp_path / "again"
    shutil.copytree(homes["rf"] / "LOGITS", folder / "LOGITS")
    cauc_ray.fit(folder / "LOGITS", models=MODELS, **options).save(folder / "policy.json")
    report = cauc_ray.report(folder)
    before = {path: path.read_bytes() for path in (report.page, report.card, folder / "policy.json")}
    tokens = MarkdownIt("commonmark").parse(report.card.read_text())
    for line in next(token.content for token in tokens if token.type == "code_block").splitlines():
        assert command(*shlex.split(line)[1:])[0] == 0
    assert {path: path.read_bytes() for path in before} == before


def test_names_are_text_in_the_card_and_the_page(hostile):
    report, names = hostile
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(report.card.read_text())
    flat = [*tokens, *(child for token in tokens for child in token.children or ())]
    assert not [token for token in flat if token.type in ("html_block", "html_inline", "image", "link_open")]
    assert len([token for token in tokens if token.type == "tr_open"]) >= 15
    assert "".join(child.content for child in tokens[1].children).endswith(" → ".join(names))
    page = report.page.read_text()
    assert page.count("<script") == page.count("</script") == 2
    assert not re.search(r"<(img|i|u|b)[ >]", page)


def test_mistakes_add_up_to_a_loop_over_the_answers(homes):
    measured = cauc_ray.report(homes["rf"]).measured
    chain, replay = measured.test, measured.evaluation.replay
    tables = re.search("Mistakes by the stage.*?</table>", (homes["rf"] / "report.html").read_text(), re.DOTALL)[0]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall("<tr>.*?</tr>", tables)[1:]]
    alone = [logits.argmax(axis=1) for logits in chain.logits]
    for stage, row in enumerate(rows):
        counts = [0] * 7
        for example in np.flatnonzero(replay.stages == stage):
            label, right = chain.labels[example], [model[example] == chain.labels[example] for model in alone]
            is_wrong = replay.predictions[example] != label
            last, model, some = right[-1], right[stage], any(right)
            whats = (True, is_wrong, is_wrong and last, is_wrong and some and not last, is_wrong and not some)
            counts = [
                n + bool(what)
                for n, what in zip(counts, (*whats, is_wrong and model, not is_wrong and not model), strict=True)
            ]
        assert [*map(int, row[1:])] == counts
    assert len(rows) == len(MODELS)


def test_each_part_may_lie_anywhere(homes, command, tmp_path):
    shutil.copytree(homes["rf"] / "LOGITS", tmp_path / "table")
    policy = Policy.load(homes["rf"] / "policy.json")
    policy.save(tmp_path / "chosen.json")
    write_run(tmp_path / "monday", policy)
    compared = cauc_ray.compare(tmp_path / "table", models=MODELS, methods=["stacked", "single"])
    compared.save(tmp_path / "methods")
    paths = {"policy": "chosen.json", "logits": "table", "run": "monday", "comparison": "methods"}
    paths = {part: str(tmp_path / name) for part, name in paths.items()}
    (tmp_path / "out").mkdir()
    flags = [word for part, path in paths.items() for word in (f"--{part}", path)]
    code, out, _ = command("report", tmp_path / "out", *flags, "--json")
    report = json.loads(out)
    assert code == 0
    assert {part: report[part] for part in paths} == paths
    assert report["left_out"] == []
    text = (tmp_path / "out" / "report.html").read_text()
    assert ">stacked<" in text
    assert "20260101T000000-abcdef" in text
    assert report["worth"]["answer"] in text


def moved_table(folder, chain, change):
    """Write the table of a folder anew as another prompt's may be, of the same models and as many examples."""
    table = folder.with_name(f"{folder.name}-{change}")
    shutil.copytree(folder / "LOGITS", table)
    if change == "labels":
        chain = replace(chain, labels=(chain.labels + 1) % 5)
    elif change == "logits":
        chain = replace(chain, logits=(chain.logits[0], chain.logits[1][:, ::-1], chain.logits[2]))
    write_chains(table, {"test": chain}, logit_kind="raw")
    return table


@pytest.mark.soak("full")
def test_parts_of_another_policy_are_left_out_and_refused_where_named(tmp_path):
    chain = fitted(tmp_path, table={"n": 120}, method="rf")["test"]
    policy = Policy.load(tmp_path / "policy.json")
    cheaper = cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, method="rf", budget=6.0)
    for name, of, models in (("strange", policy, ["x", "y", "z"]), ("run", cheaper, MODELS)):
        write_run(tmp_path / name, of, models=models)
        with pytest.raises(DataError, match="is a run of another policy"):
            cauc_ray.report(tmp_path, run=tmp_path / name)
    options = {"models": MODELS, "methods": ["stacked", "single"]}
    for change, words in (("labels", "other examples"), ("logits", "other logits"), ("costs", "other costs")):
        costs = {"costs": [1.0, 4.0, 16.0]} if change == "costs" else {}
        compared = cauc_ray.compare(moved_table(tmp_path, chain, change), **options, **costs)
        compared.save(tmp_path / f"of-{change}")
        with pytest.raises(DataError, match=words):
            cauc_ray.report(tmp_path, comparison=tmp_path / f"of-{change}")
    (tmp_path / "of-costs").rename(tmp_path / "comparison")
    report = cauc_ray.report(tmp_path)
    assert report.run is None
    assert report.comparison is None
    of_run, of_comparison = sorted(report.as_json()["left_out"], key=lambda why: "other costs" in why)
    assert "is a run of another policy" in of_run
    assert "other costs" in of_comparison
    assert all(why in report.page.read_text() for why in (of_run, of_comparison))


@pytest.mark.parametrize(
    "change", [{"run_id": ...}, {"stages": ["m0"]}, {"stages": []}, {"n": "many"}, {"accuracy": {"value": 1}}], ids=str
)
def test_what_is_no_summary_of_a_run_is_refused(homes, command, tmp_path, change):
    write_run(tmp_path / "run", Policy.load(homes["rf"] / "policy.json"))
    file = tmp_path / "run" / "summary.json"
    content = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
    with pytest.raises(DataError, match="is not the summary of a run"):
        cauc_ray.report(homes["rf"], run=tmp_path / "run", output=tmp_path / "page.html")
    code, out, error = command("show", tmp_path / "run")
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert "is not the summary of a run" in error


def test_only_unlabelled_test_examples_are_refused(tmp_path):
    chains, few = fitted(tmp_path, table={"n": 120}), np.arange(120) < 20
    fitting = {split: chains[split] for split in ("calibration", "validation")}
    gappy = {split: replace(chain, labels=np.where(few, -1, chain.labels)) for split, chain in fitting.items()}
    write_chains(tmp_path / "LOGITS", gappy, logit_kind="raw")
    with pytest.warns(CaucWarning, match="20 of 120 examples have no label"):
        cauc_ray.fit(tmp_path / "LOGITS", models=MODELS, budget=9.0).save(tmp_path / "policy.json")
    assert cauc_ray.report(tmp_path).page.is_file()
    write_chains(tmp_path / "LOGITS", {"test": replace(chains["test"], labels=np.full(120, -1))}, logit_kind="raw")
    with pytest.raises(DataError, match="has no label; a report needs labels"):
        cauc_ray.report(tmp_path)


def test_a_report_names_the_extra_that_it_needs(homes, monkeypatch):
    monkeypatch.setattr("cauc_ray.errors.find_spec", lambda name: None)
    with pytest.raises(CaucError, match=r"pip install 'cauc-ray\[reports\]'"):
        cauc_ray.report(homes["rf"])


def test_warnings_are_on_the_page_and_the_card(tmp_path):
    with pytest.warns(cauc_ray.CaucWarning):  # the first model adds nothing but its cost
        fitted(tmp_path, table={"n": 300, "strengths": (0.1, 2.6)}, models=MODELS[:2], method="rf")
    report = cauc_ray.report(tmp_path)
    fired = [check.name.replace("-", " ") for check in report.checks if check.fired]
    assert fired
    assert report.verdict.tone == "bad"
    assert all(f"**{name}**" in report.card.read_text() and name in report.page.read_text() for name in fired)


@pytest.mark.parametrize("options", [{"costs": [1e-9, 1.0, 1e6]}, {"threshold": 0.7}, {"models": ["m2"]}], ids=str)
@pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
def test_odd_costs_tables_without_validation_and_single_models_have_a_page(tmp_path, options):
    write_table(tmp_path / "LOGITS", n=60)
    if "threshold" in options:
        shutil.rmtree(tmp_path / "LOGITS" / "model=m0" / "split=validation")
    cauc_ray.fit(tmp_path / "LOGITS", **{"models": MODELS, **options}).save(tmp_path / "policy.json")
    page = cauc_ray.report(tmp_path).page.read_text()
    assert ('id="budget"' in page) == ("costs" in options)
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert drawn
    assert not re.search(r"\b(nan|NaN|inf|Infinity|undefined|None)\b", "".join(drawn))
