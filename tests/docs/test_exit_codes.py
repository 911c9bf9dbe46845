"""The page on exit codes: its loops try again where infrastructure fails, and only there."""

import os
import subprocess
import sys
import types

import pytest
from pages import ROOT, snippets

PAGE = ROOT / "docs" / "how-to" / "exit-codes.md"
# By the exit codes of tries: how many there are, and the last code.
TRIES = [([0], 1, 0), ([2, 0], 1, 2), ([4, 4, 5, 0], 3, 5), ([4, 1, 0], 2, 1), ([4] * 9, 4, 4)]


def code_of(language):
    return next(snippet.text for snippet in snippets(PAGE) if snippet.language == language)


@pytest.mark.parametrize(("codes", "n_tries", "last"), TRIES)
def test_the_shell_loop_retries_on_4_alone(tmp_path, codes, n_tries, last):
    """Cauc is a script here that ends with the next of the codes, and sleep returns at once."""
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    next_code = 'echo "$@" >> tries; code=$(head -n 1 codes); sed -i 1d codes; exit $code'
    for name, text in (("cauc", next_code), ("sleep", "true")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", code_of("sh")], cwd=tmp_path, env=environment)
    assert (done.returncode, len((tmp_path / "tries").read_text().splitlines())) == (last, n_tries)


@pytest.mark.parametrize(("codes", "n_tries", "last"), [*TRIES, ([None, 0], 2, 0)])
def test_the_loop_over_jobs_retries_on_4_alone(monkeypatch, codes, n_tries, last):
    """Ray's client is a stand-in whose jobs end with the next of the codes; Ray's own details have the field."""
    from ray.job_submission import JobDetails, JobStatus

    jobs = []

    class Client:
        def __init__(self, address):
            pass

        def submit_job(self, entrypoint, runtime_env):
            jobs.append(entrypoint)
            return len(jobs) - 1

        def get_job_status(self, job):
            return JobStatus.FAILED if codes[job] else JobStatus.SUCCEEDED

        def get_job_info(self, job):
            return JobDetails(type="SUBMISSION", status="FAILED", entrypoint="cauc", driver_exit_code=codes[job])

    monkeypatch.setitem(sys.modules, "ray.job_submission", types.SimpleNamespace(JobSubmissionClient=Client))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(SystemExit) as end:
        exec(compile(code_of("python"), PAGE.name, "exec"), {})
    assert (end.value.code, len(jobs)) == (last, n_tries)
