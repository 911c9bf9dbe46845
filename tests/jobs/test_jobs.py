"""What all jobs have in common: their configs, their folders, how they are stopped and go on."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import psutil
import pyarrow as pa
import pytest
import yaml
from job_cases import CASES, N_TASKS, SWEEP, write_config, write_inputs
from synthetic import write_table

import cauc_ray
from cauc_ray.api.config import read_config
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.files.paths import path_inside, path_of
from jobs.folder import LOCK
from jobs.job import main
from jobs.progress import Progress
from jobs.schemas import JOBS, job_named, schema_of, schema_path

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    write_inputs(folder)
    return folder


def run(name, path, capsys):
    """Run a job in this process; return its exit code, what it printed and what it said of errors."""
    code = main(job_named(name), ["--config", str(path)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", JOBS)
def test_schemas_are_current_and_take_the_shipped_configs(name):
    schema = json.loads(schema_path(name).read_text())
    assert schema == schema_of(job_named(name))
    shipped = ROOT / "jobs" / f"{name}.yaml"
    jsonschema.validate(yaml.safe_load(shipped.read_text()), schema)
    config = read_config(shipped, job_named(name).forms)
    assert config.output.is_absolute()
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**yaml.safe_load(shipped.read_text()), "outptu": "x"}, schema)


def test_every_job_has_a_case_and_every_module_with_a_config_is_a_job():
    assert set(CASES) == set(JOBS) == {path.stem for path in (ROOT / "jobs").glob("*.yaml")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"outptu": "x"}, "unknown key 'outptu'"),
        ({"output": 3}, "output: "),
        ({"output": "sets"}, "exists and is not an empty folder"),
        ({"output": "policy.json"}, "exists and is not an empty folder"),
        ({"output": "/proc/nowhere"}, "cannot be made"),
    ],
)
def test_a_bad_config_is_one_line_and_leaves_nothing(inputs, tmp_path, capsys, name, change, says):
    content = {"output": str(tmp_path / "out"), **CASES[name][0], **change}
    code, out, error = run(name, write_config(inputs, f"bad-{name}", content), capsys)
    assert (code, out) == (2, "")
    assert error.startswith(f"jobs.{name}: error: ")
    assert error.count("\n") == 1
    assert says in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("collect", {"pool": "nowhere.yaml"}, "no pool file"),
        ("collect", {"dataset": "nowhere"}, "unknown dataset"),
        ("evaluate", {"policy": "nowhere.json"}, "no policy file"),
        ("evaluate", {"input": "nowhere"}, "nowhere"),
        ("evaluate", {"pool": None}, "pool: "),
        ("paper", {"logits": "nowhere"}, "there is no folder"),
        ("bench", {"parts": {"numbrs": {}}}, "parts.numbrs"),
        ("bench", {"parts": {"numbers": {"rwos": 3}}}, "parts.numbers: unrecognized arguments: --rwos 3"),
        ("bench", {"parts": {"numbers": {"rows": "many"}}}, "invalid int value: 'many'"),
        ("sweep", {"sets": [{"name": "a", "logits": "nowhere", "chains": [["m0"]]}]}, "no logit table"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(inputs, tmp_path, capsys, name, change, says):
    content = {**CASES[name][0], **change, "output": str(tmp_path / "a" / "out")}
    code, out, error = run(name, write_config(inputs, f"bad-{name}", content), capsys)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert says in error
    assert not list(tmp_path.iterdir())


def test_what_is_done_is_said_again_at_once_and_belongs_to_its_config(inputs, ray_session, capsys):
    path = write_config(inputs, "once", {**SWEEP, "seeds": [0]})
    code, out, _ = run("sweep", path, capsys)
    assert code == 0
    *said, last = out.splitlines()
    files = {file: file.stat().st_mtime_ns for file in (inputs / "once").rglob("*") if file.name != LOCK}
    code, again, _ = run("sweep", path, capsys)
    assert code == 0
    assert again.splitlines()[-1] == last
    assert set(again.splitlines()) <= set(said) | {last}
    assert {file: file.stat().st_mtime_ns for file in files} == files
    elsewhere = inputs / "deeper" / "once.yaml"  # the same config, said from another folder
    elsewhere.parent.mkdir()
    sets = [{**SWEEP["sets"][0], "logits": "../sets/planted"}]
    elsewhere.write_text(yaml.safe_dump({**SWEEP, "seeds": [0], "sets": sets, "output": "../once"}))
    assert run("sweep", elsewhere, capsys)[1] == again
    code, _, error = run("sweep", write_config(inputs, "once", {**SWEEP, "seeds": [1]}), capsys)
    assert code == 2
    assert "of another config, whose 'seeds' differs" in error
    code, _, error = run("evaluate", write_config(inputs, "once", CASES["evaluate"][0]), capsys)
    assert (code, "is of a job 'sweep'" in error) == (2, True)


def test_one_job_at_a_time_works_in_a_folder(inputs, ray_session, capsys):
    path = write_config(inputs, "held", {**SWEEP, "seeds": [0]})
    (inputs / "held").mkdir()
    with (inputs / "held" / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, error = run("sweep", path, capsys)
    assert (code, "another job is at work in" in error) == (2, True)
    (inputs / "held" / ".cauc-1-abc.part").write_text("half")
    assert run("sweep", path, capsys)[0] == 0  # what a job that was killed as it began may leave
    assert not (inputs / "held" / ".cauc-1-abc.part").exists()


def test_a_folder_that_was_there_is_as_empty_as_it_was_after_bad_input(inputs, ray_session, capsys):
    (inputs / "empty").mkdir()
    sets = [{**SWEEP["sets"][0], "logits": "nowhere"}]
    assert run("sweep", write_config(inputs, "empty", {**SWEEP, "sets": sets}), capsys)[0] == 2
    assert list((inputs / "empty").iterdir()) == []
    assert run("sweep", write_config(inputs, "empty", {**SWEEP, "seeds": [0]}), capsys)[0] == 0


def test_what_failed_is_told_by_the_exit_code_and_tried_again(inputs, ray_session, tmp_path, capsys):
    table = tmp_path / "L"
    write_table(table, n=60)
    file = next((table / "model=m1" / "split=test").glob("*.parquet"))
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    sets = [{"name": "planted", "logits": str(table), "chains": [["m0", "m1"], ["m0", "m2"]]}]
    path = write_config(tmp_path, "out", {**SWEEP, "methods": ["rf"], "seeds": [0], "sets": sets})
    code, out, _ = run("sweep", path, capsys)
    results = json.loads(out.splitlines()[-1])
    assert code == 1
    assert (len(results["failed"]), results["n_missing"]) == (1, 3)
    assert f"failed: {results['failed'][0]}" in out.splitlines()
    file.write_bytes(whole)
    code, out, _ = run("sweep", path, capsys)
    assert (code, json.loads(out.splitlines()[-1])["failed"]) == (0, [])


def test_a_relative_output_in_a_jobs_copy_of_the_working_directory_is_refused(tmp_path, capsys, inputs):
    package = tmp_path / "_ray_pkg_0123456789abcdef"
    package.mkdir()
    code, _, error = run("sweep", write_config(package, "out", SWEEP), capsys)
    assert code == 2
    assert "give it as an absolute path" in error


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_job_that_is_stopped_without_a_cluster_ends_its_own_and_goes_on(inputs, tmp_path, number, code):
    name = f"stopped-{number}"
    path = write_config(inputs, name, {**SWEEP, "seeds": list(range(20))})
    job = start(path, tmp_path / "log")
    tasks = inputs / name / "tasks"
    try:
        while not (tasks.is_dir() and len(list(tasks.glob("*.json"))) > 2):
            assert job.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        children = psutil.Process(job.pid).children(recursive=True)
        assert len(children) > 3  # Ray's
        job.send_signal(number)
        assert job.wait(timeout=60) == code, (tmp_path / "log").read_text()
        assert psutil.wait_procs(children, timeout=20)[1] == []
    finally:
        job.kill()
    said = (tmp_path / "log").read_text()
    assert "jobs.sweep: stopped; the same command goes on from here" in said
    assert "Traceback" not in said
    assert not (inputs / name / "results.parquet").exists()
    n_kept = len(list(tasks.glob("*.json")))
    assert 2 < n_kept < 10 * N_TASKS


def start(path, log, name="sweep"):
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("w") as out:
        words = [sys.executable, "-m", f"jobs.{name}", "--config", str(path)]
        return subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out, env=env)


@pytest.mark.slow
def test_jobs_read_pools_and_tables_by_uri(inputs, s3, tmp_path):
    """In processes of their own, whose Ray sessions have the environment's endpoint."""
    bucket = path_of(f"{s3}/{tmp_path.name}")
    for file in (path for path in inputs.rglob("*") if path.is_file()):
        (bucket / path_inside(file, inputs)).write_bytes(file.read_bytes())
    live = {name: f"{bucket}/{file}" for name, file in CASES["evaluate"][0].items()} | {"output": f"{bucket}/live"}
    paper = {**CASES["paper"][0], "logits": f"{bucket}/sets"}
    for name, content in (("evaluate", live), ("paper", paper)):
        path = write_config(tmp_path, f"{name}-out", content)
        job = start(path, tmp_path / "log", name)
        assert job.wait(timeout=200) == 0, (tmp_path / "log").read_text()
        assert CASES[name][1](json.loads((tmp_path / "log").read_text().splitlines()[-1]))
    expected = cauc_ray.evaluate(inputs / "sets" / "planted", inputs / "policy.json").to_arrow()
    found = pa.concat_tables(map(read_parquet, parquet_files(bucket / "live" / "run" / "predictions")))
    assert found.sort_by("example_id").column("prediction").equals(expected.sort_by("example_id").column("prediction"))


def test_a_job_of_ones_own_is_as_the_page_says(tmp_path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jobs.md").read_text(), re.DOTALL)
    said = {"__name__": "count"}
    exec(compile(example, "docs/jobs.md", "exec"), said)
    path = write_config(tmp_path, "count", {"up_to": 3})
    assert main(said["JOB"], ["--config", str(path)]) == 0
    first, *_, shown, last = capsys.readouterr().out.splitlines()
    assert (first, shown) == ("count: 1 of 3 numbers", "counted")
    assert json.loads(last) == {"n": 3, "output": str(tmp_path / "count"), "failed": []}


def test_progress_is_seldom_said_and_counts_this_attempt_alone(capsys, monkeypatch):
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("jobs.progress.time.monotonic", lambda: next(clock))
    progress = Progress("count")
    for done in range(40, 101, 10):  # one look every two seconds; an earlier attempt had done 40
        progress.report(done, 100, "rows")
    progress.report(0, None, "tasks")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "count: 40 of 100 rows",
        "count: 70 of 100 rows, 5 a second, 6 s left",
        "count: 100 of 100 rows, 5 a second",
    ]


def paths_of(content):
    """Return what a config's content names by a relative path."""
    if isinstance(content, dict):
        return [path for value in content.values() for path in paths_of(value)]
    if isinstance(content, list):
        return [path for value in content for path in paths_of(value)]
    return [content] if isinstance(content, str) and content.startswith("..") else []


@pytest.mark.parametrize("name", JOBS)
def test_shipped_configs_read_nothing_outside_the_repository(name):
    path = ROOT / "jobs" / f"{name}.yaml"
    for each in paths_of(yaml.safe_load(path.read_text())):
        found = (path.parent / each).resolve()
        assert found.is_relative_to(ROOT / "out")  # which git ignores
        if found.is_relative_to(ROOT / "out" / "demo"):
            assert "cauc demo -o out/demo" in path.read_text()


@pytest.mark.slow
def test_shipped_configs_run_on_what_the_demo_makes(tmp_path, ray_session, capsys):
    from cauc_ray.demo import run_demo

    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    run_demo(str(tmp_path / "out" / "demo"))
    for name in ("calibrate", "collect", "evaluate", "sweep"):
        code, out, error = run(name, tmp_path / "jobs" / f"{name}.yaml", capsys)
        assert (code, json.loads(out.splitlines()[-1])["failed"]) == (0, []), error
