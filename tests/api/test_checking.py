"""`cauc check`: its words, figures and exit codes."""

import json

import pytest
from synthetic import write_table

import cauc_ray

MODELS = ["m0", "m1", "m2"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    write_table(folder / "same", n=1500)
    write_table(folder / "other", n=1500, strengths=(0.2, 0.9, 2.4))
    cauc_ray.fit(folder / "same", models=MODELS, method="rf").save(folder / "p.json")
    return folder


@pytest.fixture
def cauc(tables, tmp_path, command):
    for path in tables.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return command


def test_a_policy_holds_on_new_rows_and_not_where_models_have_changed(cauc):
    for table, code, words in (("same", 0, "the policy is valid"), ("other", 3, "the policy has drifted: ")):
        ended, out, err = cauc("check", table, "--policy", "p.json")
        assert (ended, err, out.splitlines()[1][: len(words)]) == (code, "", words)
        figures = json.loads(cauc("check", table, "--policy", "p.json", "--json")[1])
        assert figures == cauc_ray.check(table, cauc_ray.Policy.load("p.json")).as_json()
        assert figures == cauc_ray.check(table, "p.json").as_json()
        assert figures["valid"] == (code == 0)
    measures = cauc_ray.evaluate("same", "p.json").measures
    figures = cauc_ray.check("same", "p.json").as_json()
    assert figures["cost"][0] == pytest.approx(measures.cost)
    for stage, expected in zip(figures["stages"], measures.stages, strict=True):
        share = expected.accepted_accuracy
        assert stage["n"] == expected.answered
        assert stage["accepted_accuracy"] == pytest.approx([share.value, share.low, share.high])
