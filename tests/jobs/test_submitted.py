"""Jobs that are submitted to a real head through the Jobs API: they end as they should, also where they are killed."""

import http.server
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from job_cases import CALIBRATE, CASES, EVALUATE, N_ROWS, N_TASKS, REPLAY, SWEEP, stripped, write_config, write_inputs
from local_head import local_head, wait_for
from runs import by_example, read_all

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.front import submitting
from cauc_ray.policies.policy import Policy

ROOT = Path(__file__).parents[2]
CAUC = [sys.executable, "-c", "from cauc_ray.front.command import main; main()"]


@pytest.fixture(scope="module")
def head():
    with local_head(n_cpus=2) as started:
        yield started


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    write_inputs(folder)
    return folder


def submit_command(name, config, address, *words, **environment):
    """Start `cauc submit` in a process of its own."""
    env = {name: value for name, value in os.environ.items() if not name.endswith("_ADDRESS")}
    return subprocess.Popen(
        [*CAUC, "submit", name, "--config", str(config), *(["--address", address] if address else []), *words],
        cwd=ROOT, env={**env, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def undisturbed(head, inputs):
    """Return what came of every job that was submitted once: exit code, output, errors."""
    processes = {
        name: submit_command(name, write_config(inputs, f"{name}-once", content), head.address)
        for name, (content, _) in CASES.items()
    }
    return {name: ended(process) for name, process in processes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_submitted_job_succeeds_and_ends_with_its_results(undisturbed, inputs, name):
    code, out, err = undisturbed[name]
    assert code == 0, out + err
    results = json.loads(out.splitlines()[-1])
    assert results == json.loads((inputs / f"{name}-once" / "result.json").read_text())["results"]
    assert results["output"] == str(inputs / f"{name}-once")
    assert results["failed"] == []
    assert CASES[name][1](results)
    assert f"{name}: " in out  # its progress
    assert f"python -m jobs.{name} --config {inputs / f'{name}-once.yaml'}" in out
    assert "submitted as raysubmit_" in err


@pytest.mark.slow
def test_a_live_evaluation_is_the_replay(undisturbed, inputs):
    live = by_example(read_all(inputs / "evaluate-once" / "run" / "predictions"))
    policy = cauc_ray.Policy.load(inputs / "policy.json")
    assert live == by_example(cauc_ray.evaluate(inputs / "sets" / "planted", policy).to_arrow())


@pytest.mark.slow
def test_a_calibration_by_shards_is_the_fit_of_one_process(undisturbed, inputs):
    """The policy file of the inputs is that fit."""
    by_shards, alone = (
        Policy.load(path) for path in (inputs / "calibrate-once" / "policy.json", inputs / "policy.json")
    )
    assert by_shards.threshold == alone.threshold
    for one, other in zip(by_shards.stages, alone.stages, strict=True):
        assert one.temperature == pytest.approx(other.temperature, rel=1e-9)
        if one.alpha is not None:
            assert (one.alpha, one.beta) == pytest.approx((other.alpha, other.beta), rel=1e-9)


@pytest.mark.slow
def test_an_evaluation_on_saved_logits_is_the_replay(head, inputs):
    config = write_config(inputs, "replayed", REPLAY)
    assert submitting.submit("evaluate", config, address=head.address, working_dir=ROOT).follow().exit_code == 0
    expected = cauc_ray.evaluate(inputs / "sets" / "planted", Policy.load(inputs / "policy.json"))
    assert pq.read_table(inputs / "replayed" / "predictions.parquet").equals(expected.to_arrow())
    results = json.loads((inputs / "replayed" / "result.json").read_text())["results"]
    assert (results["accuracy"], results["cost"]) == (expected.measures.accuracy.value, expected.measures.cost)


@pytest.mark.slow
def test_a_calibration_whose_driver_is_killed_gives_the_same_policy_when_it_runs_again(undisturbed, head, inputs):
    config = write_config(inputs, "calibrate-killed", CALIBRATE)
    job = submitting.submit("calibrate", config, address=head.address, working_dir=ROOT)
    driver = wait_for(lambda: driver_of(config), 60, "the driver")
    wait_for(lambda: shard_at_work(head), 60, "a question to a shard", every_s=0.002)
    driver.kill()
    assert job.follow().exit_code not in (0, 1, 2)
    assert not (inputs / "calibrate-killed" / "policy.json").exists()
    again = submitting.submit("calibrate", config, address=head.address, working_dir=ROOT)
    assert again.follow().exit_code == 0
    policies = [(inputs / name / "policy.json").read_text() for name in ("calibrate-killed", "calibrate-once")]
    assert policies[0] == policies[1]


def shard_at_work(head):
    """Say whether some shard's process on a head computes an answer, which is its title then."""
    for process in psutil.Process(head.pid).children(recursive=True):
        with suppress(psutil.Error):
            if any("ShardActor.ask" in word for word in process.cmdline()[:1]):
                return True
    return False


def driver_of(config):
    """Return the process of a job's driver."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(config) in words and "-m" in words and any(word.startswith("jobs.") for word in words):
            return process
    return None


def kept(folder):
    return list((folder / "tasks").glob("*.json")) if (folder / "tasks").is_dir() else []


@pytest.mark.slow
def test_a_sweep_whose_driver_is_killed_goes_on_to_the_same_table(undisturbed, head, inputs):
    config = write_config(inputs, "sweep-killed", SWEEP)
    job = submitting.submit("sweep", config, address=head.address, working_dir=ROOT)
    wait_for(lambda: len(kept(inputs / "sweep-killed")) > 3, 60, "a task's rows")
    driver_of(config).kill()
    before = job.follow()
    assert before.exit_code not in (0, 1, 2)
    assert not (inputs / "sweep-killed" / "results.parquet").exists()
    done = {path: path.stat().st_mtime_ns for path in kept(inputs / "sweep-killed")}
    assert len(done) < N_TASKS
    again = submitting.submit("sweep", config, address=head.address, working_dir=ROOT)
    assert again.follow().exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in done} == done  # not measured again
    for table in ("results", "summary"):
        whole, other = (pq.read_table(inputs / name / f"{table}.parquet") for name in ("sweep-killed", "sweep-once"))
        assert whole.schema == other.schema
        timed = [column for column in whole.column_names if column.startswith("setup_s")]
        assert whole.drop_columns(timed).to_pylist() == other.drop_columns(timed).to_pylist()


@pytest.mark.slow
def test_a_sweep_that_is_stopped_by_a_second_ctrl_c_goes_on_to_the_same_table(undisturbed, head, inputs):
    config = write_config(inputs, "sweep-stopped", SWEEP)
    command = submit_command("sweep", config, head.address)
    wait_for(lambda: len(kept(inputs / "sweep-stopped")) > 3, 60, "a task's rows")
    command.send_signal(signal.SIGINT)
    said = wait_for(lambda: first_with("the job goes on", command.stderr), 20, "a word")
    assert "ray job logs --follow" in said
    command.send_signal(signal.SIGINT)
    code, _, err = ended(command)
    assert code == 130
    assert "the job is being stopped" in err
    job = re.search(r"raysubmit_\w+", said).group()
    before = submitting.Submitted(job, head.address, submitting._client(head.address)).follow()
    assert before.exit_code is None
    assert "jobs.sweep: stopped; the same command goes on from here" in before.log
    code, out, _ = ended(submit_command("sweep", config, head.address))
    assert code == 0
    assert json.loads(out.splitlines()[-1])["n_rows"] == N_ROWS
    tables = (pq.read_table(inputs / name / "results.parquet") for name in ("sweep-stopped", "sweep-once"))
    assert len({json.dumps(stripped(table)) for table in tables}) == 1


def first_with(text, stream):
    """Return the next line of a stream that has a text."""
    return next((line for line in stream if text in line), None)


@pytest.mark.slow
def test_an_evaluation_that_is_left_and_killed_goes_on_to_the_same_rows(undisturbed, head, inputs):
    config = write_config(inputs, "evaluate-killed", {**EVALUATE, "pool": "slow.yaml"})
    command = submit_command("evaluate", config, head.address)
    wait_for((inputs / "evaluate-killed" / "run").is_dir, 60, "a run")
    command.send_signal(signal.SIGINT)  # once: the job goes on
    metric = wait_for(lambda: metrics(head, "ray_cauc_job_total{", 'job="evaluate"', 'unit="rows"'), 30, "a metric")
    assert float(metric.split()[-1]) == 600
    code, _, err = ended(command)
    assert code == 130
    assert "the job goes on" in err
    driver = driver_of(config)
    assert driver.is_running()
    driver.kill()
    assert not (inputs / "evaluate-killed" / "result.json").exists()
    code, out, err = ended(submit_command("evaluate", config, head.address))
    assert code == 0, out + err
    rows, whole = (
        by_example(read_all(inputs / f"evaluate-{name}" / "run" / "predictions")) for name in ("killed", "once")
    )
    assert rows == whole
    assert (
        json.loads(out.splitlines()[-1])["accuracy"]
        == json.loads(undisturbed["evaluate"][1].splitlines()[-1])["accuracy"]
    )


def metrics(head, *parts):
    """Return the line of the head's metrics that has some parts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{head.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next((line for line in lines if all(part in line for part in parts)), None)


@pytest.mark.slow
def test_a_config_of_the_working_directory_goes_with_it_and_bad_input_is_code_2(head, tmp_path):
    """A copy of jobs/ that holds its config; the output would be in the job's own copy."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "jobs").symlink_to(ROOT / "jobs", target_is_directory=True)
    (folder / "cauc_ray").symlink_to(ROOT / "cauc_ray", target_is_directory=True)
    (folder / "data").mkdir()
    (folder / "data" / "big.bin").write_bytes(b"x" * 1000)
    (folder / "table.parquet").write_bytes(b"x" * 1000)
    config = write_config(folder, "mine", SWEEP)
    command = submit_command("sweep", config, head.address, "--working-dir", str(folder))
    code, out, _ = ended(command)
    assert code == 2
    assert "python -m jobs.sweep --config mine.yaml" in out
    assert "output mine lies in the copy of the working directory" in out
    packages = list(Path(head.folder).rglob("_ray_pkg_*/mine.yaml"))
    assert len(packages) == 1
    assert not (packages[0].parent / "data").exists()
    assert not (packages[0].parent / "table.parquet").exists()


@pytest.mark.parametrize(
    ("name", "config", "working_dir", "says"),
    [
        ("sweeep", "sweep.yaml", ROOT, "unknown job 'sweeep'; did you mean 'sweep'?"),
        ("../sweep", "sweep.yaml", ROOT, "unknown job '../sweep'"),
        ("schema; ls", "sweep.yaml", ROOT, "unknown job 'schema; ls'"),
        ("sweep", "nowhere.yaml", ROOT, "there is no config"),
        ("sweep", "sweep.yaml", ROOT / "docs", "has no folder jobs"),
        ("sweep", "sweep.yaml", ROOT / "nowhere", "has no folder jobs"),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_anything_is_asked(name, config, working_dir, says):
    with pytest.raises(ConfigError, match=r"[^\n]") as told:
        submitting.submit(name, ROOT / "jobs" / config, address="http://127.0.0.1:1", working_dir=working_dir)
    assert says in str(told.value)
    assert "\n" not in str(told.value)


def test_a_head_that_is_not_there_is_one_line_and_code_2():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        code, out, err = ended(submit_command("sweep", "jobs/sweep.yaml", address))
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert f"no Ray cluster at '{address}'" in err
        # As Ray's own command: by the environment, where nothing is named.
        code, _, err = ended(submit_command("sweep", "jobs/sweep.yaml", None, RAY_API_SERVER_ADDRESS=address))
        assert code == 2
        assert f"no Ray cluster at '{address}'" in err


def test_a_head_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(submitting, "ANSWER_DEADLINE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(ExecutionError, match="has not answered for 1 s"):
            submitting.submit("sweep", ROOT / "jobs" / "sweep.yaml", address=address, working_dir=ROOT)
        assert time.monotonic() - started < 60
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(ExecutionError) as told:
            submitting.submit("sweep", ROOT / "jobs" / "sweep.yaml", address=address, working_dir=ROOT)
        assert "\n" not in str(told.value)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_head_with_a_token_takes_it_as_rays_own_command_gives_it(inputs, tmp_path):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"output": str(tmp_path / "out"), "parts": CASES["bench"][0]["parts"]}))
    with local_head(n_cpus=1, **token) as head:
        code, out, err = ended(submit_command("bench", config, head.address))
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        path = tmp_path / "token"
        path.write_text("a" * 64)
        by_file = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
        code, out, err = ended(submit_command("bench", config, head.address, "--json", **by_file))
        assert code == 0, out + err
        assert out.count("\n") == 1
        assert json.loads(out)["numbers"]["rows"] == 200
