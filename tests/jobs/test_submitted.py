"""Jobs that are submitted to a real head through the Jobs API: they end as they should."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest
from job_cases import RUN, SWEEP, write_config, write_inputs
from local_head import local_head, wait_for
from ray.job_submission import JobSubmissionClient
from runs import answers_of, by_example

import cauc_ray

ROOT = Path(__file__).parents[2]
DEADLINE_S = 200


class Submitted:
    """A job that runs on a head."""

    def __init__(self, head, name, config, working_dir=ROOT):
        self._client = JobSubmissionClient(head.address)
        command = f"{Path(sys.executable).with_name('cauc')} {name} --config {config} --json"
        options = {"entrypoint": command, "runtime_env": {"working_dir": str(working_dir)}}
        self._id = wait_for(lambda: self._submitted(options), 60, "an agent that takes jobs")

    def _submitted(self, options):
        """Return its id; None as long as the head, which has just started, has no agent."""
        try:
            return self._client.submit_job(**options)
        except RuntimeError as error:
            if "No available agent" in str(error):
                return None
            raise

    def ended(self):
        """Wait for its end; return its driver's exit code, None where it was stopped, and its log."""
        wait_for(lambda: self._client.get_job_status(self._id).is_terminal(), DEADLINE_S, "the end")
        return self._client.get_job_info(self._id).driver_exit_code, self._client.get_job_logs(self._id)


@pytest.fixture(scope="module")
def head():
    with local_head(n_cpus=2) as started:
        yield started


@pytest.mark.soak("full")
def test_a_submitted_run_shows_its_progress_and_ends_with_the_rows_of_the_replay(head, tmp_path):
    write_inputs(tmp_path)
    replayed = cauc_ray.evaluate(tmp_path / "sets" / "planted", tmp_path / "policy.json")
    config, out = write_config(tmp_path, "run", {**RUN, "pool": "slow.yaml", "output": "out"}), tmp_path / "out"
    job = Submitted(head, "run", config)
    metric = wait_for(lambda: metrics(head, "ray_cauc_job_total{", 'job="run"', 'unit="rows"'), 60, "a metric")
    assert float(metric.split()[-1]) == 600
    code, log = job.ended()
    assert code == 0, log
    assert answers_of(out) == by_example(replayed.to_arrow())
    assert json.loads(log.splitlines()[-1])["accuracy"]["value"] == replayed.measures.accuracy.value


def metrics(head, *parts):
    """Return the line of the head's metrics that has some parts."""
    with urllib.request.urlopen(f"http://127.0.0.1:{head.metrics_port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return next((line for line in lines if all(part in line for part in parts)), None)


@pytest.mark.slow
def test_a_config_travels_with_the_working_directory_and_data_stay(head, tmp_path):
    """A folder with what a job imports, its config, and the .rayignore; its output would be in its copy."""
    for name in ("jobs", "cauc_ray", ".rayignore"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").mkdir()
    for name in ("data/big.bin", "table.parquet"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    write_config(tmp_path, "mine", {**SWEEP, "output": "out"})
    code, log = Submitted(head, "compare", "mine.yaml", tmp_path).ended()
    assert code == 2
    assert "out lies in the copy of the working directory" in log
    (package,) = (path.parent for path in Path(head.folder).rglob("_ray_pkg_*/mine.yaml"))
    assert not {"data", "table.parquet"} & {path.name for path in package.iterdir()}
    assert list(package.rglob("samples/digits/**/*.parquet"))  # the package's own
