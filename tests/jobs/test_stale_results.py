"""Results of finished jobs, and what they keep: of the inputs as they are now and of this version, or not shown."""

import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from job_cases import CALIBRATE, EVALUATE, PAPER, REPLAY, SWEEP, saved_stage, stripped, write_config, write_pool
from synthetic import write_table

import cauc_ray
from jobs.job import main
from jobs.schemas import job_named

MODELS = ["m0", "m1", "m2"]


@pytest.fixture
def home(tmp_path):
    """What jobs read, in files whose size is that of their numbers: two tables, a policy, a pool and its input."""
    for name in ("planted", "other"):
        write_table(tmp_path / "sets" / name, n=150)
        for file in (tmp_path / "sets" / name).rglob("*.parquet"):
            rewrite(file, pq.read_table(file, partitioning=None))
    write_policy(tmp_path, 8.0)
    write_pool(tmp_path / "pool.yaml", [saved_stage(model) for model in MODELS])
    ids = [f"test-2-{row:05d}" for row in range(150)]
    rewrite(tmp_path / "input.parquet", pa.table({"example_id": ids, "label": np.zeros(150, np.int32)}))
    return tmp_path


def write_policy(home, budget):
    policy = cauc_ray.fit(home / "sets" / "planted", models=MODELS, method="rf", budget=budget)
    (home / "policy.json").write_text(policy.to_json())
    return policy


def rewrite(file, table):
    pq.write_table(table, file, compression="none", use_dictionary=False, write_statistics=False)


def replace(file, table):
    """Put other rows in a file's place without a change of its size and date."""
    before = file.stat()
    rewrite(file, table)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def mix_up(table, model="m2", splits=("calibration", "validation", "test")):
    """Give the first sixty of a model's logits to the wrong examples."""
    order = np.concatenate([np.arange(60)[::-1], np.arange(60, 150)])
    for split in splits:
        (file,) = (table / f"model={model}" / f"split={split}").glob("*.parquet")
        rows = pq.read_table(file, partitioning=None)
        replace(file, rows.set_column(2, rows.schema.field(2), rows.column("logits").take(order)))


def run(name, path, capsys):
    """Run a job in this process; return its exit code, its results and what it said on standard error."""
    code = main(job_named(name), ["--config", str(path)])
    said = capsys.readouterr()
    return code, json.loads(said.out.splitlines()[-1]) if code < 2 else None, said.err


def warned(error):
    """Return the lines that say that something has changed."""
    return [line for line in error.splitlines() if " changed" in line]


@pytest.mark.slow
def test_a_replay_is_of_the_logits_and_the_policy_as_they_are(home, ray_session, capsys):
    path = write_config(home, "replay", REPLAY)
    code, first, error = run("evaluate", path, capsys)
    assert (code, warned(error)) == (0, [])
    assert run("evaluate", path, capsys) == (0, first, "")  # nothing has changed: no work
    mix_up(home / "sets" / "planted", splits=["calibration"])  # which a replay of test does not read
    assert run("evaluate", path, capsys) == (0, first, "")
    mix_up(home / "sets" / "planted", splits=["test"])
    code, second, error = run("evaluate", path, capsys)
    (line,) = warned(error)
    assert (code, line.startswith("jobs.evaluate: warning: "), "model=m2" in line) == (0, True, True)
    assert second["accuracy"] < first["accuracy"]
    assert (
        second["accuracy"] == cauc_ray.evaluate(home / "sets" / "planted", home / "policy.json").measures.accuracy.value
    )
    policy = write_policy(home, 4.0)
    code, third, error = run("evaluate", path, capsys)
    assert (code, third["policy_id"], third["threshold"]) == (0, policy.id, policy.threshold)
    assert "policy.json has changed" in error
    assert run("evaluate", path, capsys) == (0, third, "")


def test_a_sweep_measures_anew_what_has_changed_and_no_more(home, ray_session, capsys):
    sets = [{"name": name, "logits": f"sets/{name}", "chains": [["m0", "m2"]]} for name in ("planted", "other")]
    config = {**SWEEP, "sets": sets, "methods": ["base", "margin"], "seeds": [0]}
    path = write_config(home, "out", config)
    assert run("sweep", path, capsys)[0] == 0
    kept = {file: file.stat().st_mtime_ns for file in (home / "out" / "tasks").iterdir()}
    mix_up(home / "sets" / "planted")
    code, again, error = run("sweep", path, capsys)
    assert (code, len(warned(error))) == (0, 1)
    assert {file: file.stat().st_mtime_ns for file in kept} == kept
    assert len(list((home / "out" / "tasks").iterdir())) == len(kept) + 2  # a task for each method
    code, fresh, error = run("sweep", write_config(home, "fresh", config), capsys)
    assert (code, warned(error), fresh["n_rows"]) == (0, [], again["n_rows"])
    tables = [stripped(pq.read_table(home / name / "results.parquet")) for name in ("out", "fresh")]
    assert tables[0] == tables[1]


def test_nothing_that_is_kept_survives_an_upgrade(home, ray_session, capsys, monkeypatch):
    sets = [{"name": "planted", "logits": "sets/planted", "chains": [["m0", "m2"]]}]
    swept = write_config(home, "out", {**SWEEP, "sets": sets, "methods": ["margin"], "seeds": [0]})
    bench = write_config(home, "bench", {"parts": {"numbers": {"rows": 200, "options": 10, "repeats": 1}}})
    assert (run("sweep", swept, capsys)[0], run("bench", bench, capsys)[0]) == (0, 0)
    before = cauc_ray.__version__
    monkeypatch.setattr(cauc_ray, "__version__", "99.0")
    code, _, error = run("sweep", swept, capsys)
    assert (code, f"version of cauc-ray has changed from {before} to 99.0" in error) == (0, True)
    assert len(list((home / "out" / "tasks").glob("*.json"))) == 2
    code, _, error = run("bench", bench, capsys)
    assert (code, f"from {before} to 99.0" in error, error.count("\n")) == (2, True, 1)


@pytest.mark.slow
def test_a_calibration_is_of_the_logits_as_they_are(home, ray_session, capsys):
    path = write_config(home, "fit", CALIBRATE)
    assert run("calibrate", path, capsys)[0] == 0
    (home / "fit" / "result.json").unlink()  # as if it had been ended before its last step
    mix_up(home / "sets" / "planted")
    assert run("calibrate", path, capsys)[0] == 0
    expected = cauc_ray.fit(home / "sets" / "planted", models=MODELS, method="rf", budget=8.0)
    found = cauc_ray.Policy.load(home / "fit" / "policy.json")
    assert [stage.temperature for stage in found.stages] == pytest.approx([s.temperature for s in expected.stages])
    assert found.threshold == pytest.approx(expected.threshold)


@pytest.mark.slow
def test_a_live_evaluation_of_other_inputs_is_refused_with_a_remedy(home, ray_session, capsys):
    path = write_config(home, "live", EVALUATE)
    code, first, _ = run("evaluate", path, capsys)
    assert code == 0

    def require_refused(name, change):
        """Change an input, and put it back when the job has refused it."""
        shutil.copytree(home, untouched := home.with_name("untouched"))
        change(home / name)
        code, _, error = run("evaluate", path, capsys)
        assert (code, error.count("\n")) == (2, 1)
        assert f"{home / name} has changed since" in error
        assert "choose another output, or remove" in error
        for file in ("policy.json", "pool.yaml", "input.parquet"):
            shutil.copy2(untouched / file, home / file)
        shutil.rmtree(home / "sets")
        shutil.copytree(untouched / "sets", home / "sets")
        shutil.rmtree(untouched)

    small_batches = [{**saved_stage(model), "batch_size": 8} for model in MODELS]
    other_labels = pq.read_table(home / "input.parquet").set_column(1, "label", pa.array([1] * 150, pa.int32()))
    require_refused("policy.json", lambda file: write_policy(home, 4.0))
    require_refused("pool.yaml", lambda file: write_pool(file, small_batches))
    require_refused("input.parquet", lambda file: replace(file, other_labels))
    require_refused("sets/planted", lambda file: mix_up(file, splits=["test"]))  # the pool's models answer from there
    assert run("evaluate", path, capsys)[:2] == (0, first)
    for file in (home / "live" / "result.json", home / "live" / "run" / "summary.json"):
        file.unlink()  # as if it had been ended before its last steps
    require_refused("pool.yaml", lambda file: write_pool(file, small_batches))
    require_refused("sets/planted", lambda file: mix_up(file, splits=["test"]))


@pytest.mark.slow
def test_a_collection_goes_on_with_another_pool_and_not_with_other_rows(home, ray_session, capsys):
    rows = [
        {"id": f"q{row}", "question": f"{row}?", "choices": ["x" * (1 + (row + k) % 7) for k in range(4)], "label": 1}
        for row in range(40)
    ]
    data = home / "questions.jsonl"
    data.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    stages = [
        {
            "name": name,
            "model": {"kind": "python", "factory": "user_models:longest", "kwargs": {"exponent": exponent}},
            "batch_size": 16,
            "resources": {"num_cpus": 0.5},
            "cost": {"seconds": exponent},
        }
        for name, exponent in (("one", 1.0), ("two", 2.0))
    ]
    write_pool(home / "pool.yaml", stages[:1])
    path = write_config(home, "out", {"pool": "pool.yaml", "dataset": "questions.jsonl"})
    code, first, _ = run("collect", path, capsys)
    assert (code, [model["name"] for model in first["models"]]) == (0, ["one"])
    write_pool(home / "pool.yaml", stages)
    code, second, error = run("collect", path, capsys)
    assert (code, [model["name"] for model in second["models"]]) == (0, ["one", "two"])
    assert "pool.yaml has changed" in error
    before = data.stat()
    data.write_text(data.read_text().replace('"label": 1', '"label": 2'))
    os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
    code, _, error = run("collect", path, capsys)
    assert (code, "questions.jsonl has changed since" in error) == (2, True)


def test_a_papers_tables_follow_its_texts(home, ray_session, capsys):
    ids = [
        f"{split}-{place}-{row:05d}"
        for place, split in enumerate(("calibration", "validation", "test"))
        for row in range(150)
    ]
    rewrite(home / "sets" / "texts.parquet", pa.table({"example_id": ids, "question": ["?"] * len(ids)}))
    chain = {**PAPER["tables"]["two-model-image"][0], "texts": "texts.parquet"}
    config = {**PAPER, "tables": {"two-model-image": [chain]}}
    path = write_config(home, "paper", config)
    assert run("paper", path, capsys)[:2][0] == 0
    replace(
        home / "sets" / "texts.parquet",
        pa.table({"example_id": ["x" * len(ids[0]), *ids[1:]], "question": ["?"] * len(ids)}),
    )
    code, results, error = run("paper", path, capsys)
    assert (code, len(warned(error)), len(results["failed"])) == (1, 1, 1)
    assert ids[0] in results["failed"][0]


def test_a_folder_of_an_earlier_version_is_not_gone_on_with(home, capsys):
    path = write_config(home, "old", REPLAY)
    (home / "old").mkdir()
    config = yaml.safe_load(path.read_text())
    (home / "old" / "job.json").write_text(json.dumps({"format": "cauc-job/1", "job": "evaluate", "config": config}))
    code, _, error = run("evaluate", path, capsys)
    assert (code, "of another version of this program" in error) == (2, True)
