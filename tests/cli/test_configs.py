"""Verbs with a config file: what `ray job submit` runs."""

import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml
from job_cases import SWEEP, write_config
from synthetic import write_table

import cauc_ray
from cauc_ray.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]
# The verbs whose names are not those of their configs.
VERBS = {"calibrate": "fit", "sweep": "compare"}
SHIPPED = sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml"))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    write_table(folder / "sets" / "planted", n=600)
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_fit_their_schemas_and_read_nothing_outside_the_repository(name):
    text = (ROOT / "jobs" / f"{name}.yaml").read_text()
    content = yaml.safe_load(text)
    schema = SCHEMAS[VERBS.get(name, name)]()
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "outptu": "x"}, schema)
    for location in re.findall(r"(?<=[ \[])\.\.[\w./-]*", text):
        named = Path(os.path.normpath(ROOT / "jobs" / location))  # a link there may lead to where the data is
        assert named.is_relative_to(ROOT / "out")  # which git ignores


def test_paths_are_of_the_configs_folder_and_flags_come_first(inputs, tmp_path, command):
    config = write_config(inputs, "plain", {"logits": "sets/planted", "models": ["m0", "m2"], "output": "plain.json"})
    code, out, _ = command("fit", "--config", config, "--method", "rf", "-o", tmp_path / "mine.json", "--json")
    assert code == 0
    assert not (inputs / "plain.json").exists()
    policy = cauc_ray.Policy.load(tmp_path / "mine.json")
    assert (policy.method, policy.models, policy.id) == ("rf", ("m0", "m2"), json.loads(out)["policy_id"])
    assert command("fit", "--config", config)[0] == 0
    assert (inputs / "plain.json").is_file()


def test_what_failed_is_told_by_the_exit_code_and_tried_again(ray_session, tmp_path, command):
    table = tmp_path / "L"
    write_table(table, n=60)
    file = next((table / "model=m1" / "split=test").glob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    sets = [{"name": "planted", "logits": "L", "chains": [["m0", "m1"], ["m0", "m2"]]}]
    content = {**SWEEP, "methods": ["rf"], "seeds": [0], "sets": sets, "output": "out"}
    path = write_config(tmp_path, "config", content)
    words = ["compare", "--config", path, "--json", "--address", "local"]
    code, out, error = command(*words)
    results = json.loads(out)
    (absent,) = results["not_run"]
    assert (code, absent["chain"], {row["status"] for row in results["rows"]}) == (5, "m0,m1", {"ok", "failed"})
    assert f"rf, seed 0: {absent['why'].removeprefix('failed: ')}" in error
    file.write_bytes(whole)
    code, out, _ = command(*words)
    assert (code, json.loads(out)["not_run"]) == (0, [])


def test_a_folder_is_of_one_run_at_a_time(inputs, command):
    sweep = write_config(inputs, "once", {**SWEEP, "methods": ["margin"], "seeds": [0], "output": "once"})
    assert command("compare", "--config", sweep)[0] == 0
    held = os.open(inputs / "once", os.O_RDONLY)  # as another process does
    fcntl.flock(held, fcntl.LOCK_EX)
    code, out, error = command("compare", "--config", sweep)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "is being written by another run" in error
    os.close(held)
    assert command("compare", "--config", sweep)[0] == 0


def test_nothing_that_is_kept_survives_an_upgrade_or_other_logits(tmp_path, command, monkeypatch):
    write_table(tmp_path / "L", n=60)
    sets = [{"name": "planted", "logits": "L", "chains": [["m0", "m2"]]}]
    path = write_config(
        tmp_path, "config", {**SWEEP, "sets": sets, "methods": ["margin"], "seeds": [0], "output": "out"}
    )
    for n, change in enumerate(
        (
            lambda: None,
            lambda: monkeypatch.setattr(cauc_ray, "__version__", "99.0"),
            lambda: write_table(tmp_path / "L", n=70),
        ),
        start=1,
    ):
        change()
        for _ in range(2):  # the second time nothing is measured
            assert command("compare", "--config", path)[0] == 0
            assert len(list((tmp_path / "out" / "tasks").glob("*.json"))) == 2 * n  # a method, and the chain
    for file in (tmp_path / "out" / "tasks").glob("*.json"):
        file.write_text("{ half")  # what cannot be read is measured again
    assert command("compare", "--config", path)[0] == 0


def test_cells_in_this_process_and_on_ray_have_the_same_figures(inputs, ray_session, command):
    flags = ["--chains", "m0+m2,m1+m2", "--relative-budgets", "0.5,0.9", "--seeds", "0,1", "--methods", "rf,random"]
    rows = []
    for cluster in ([], ["--address", "local"]):
        code, out, _ = command("compare", inputs / "sets" / "planted", *flags, *cluster, "--json")
        result = json.loads(out)["rows"]
        rows.append([{key: value for key, value in row.items() if not key.startswith("setup_")} for row in result])
        assert code == 0
    assert rows[0] == rows[1]


@pytest.mark.soak("pages")
def test_shipped_configs_run_on_what_the_demo_makes(tmp_path, ray_session, command):
    from cauc_ray.demo.pipeline import run_demo

    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run_demo(str(tmp_path / "out" / "demo"))
    for name in SHIPPED:
        code, _, error = command(VERBS.get(name, name), "--config", tmp_path / "jobs" / f"{name}.yaml")
        assert code == 0, error
