"""Joining a cluster with and without Ray's tokens: it connects, or one line names what to set."""

import os
import re

import pytest
from local_head import local_head
from runs import cauc, numbered_input, python_pool, two_model_policy

TOKEN = "ab" * 32
# Ray gives a busy head a minute to take a connection.
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "200"}


@pytest.fixture(scope="module")
def cascade(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cascade")
    python_pool(folder)
    two_model_policy().save(folder / "policy.json")
    numbered_input(folder)
    return folder


@pytest.fixture
def home(tmp_path):
    """Return a function that makes a home folder, with a token in it or without."""

    def make(token=""):
        path = tmp_path / f"home-{token}" / ".ray" / "auth_token"
        path.parent.mkdir(parents=True, exist_ok=True)
        if token:
            path.write_text(token)
        return str(path.parents[1])

    return make


def join(cascade, out, head, home, **environment):
    """Run `cauc run --address`. Returns its exit code and standard error without the warning of unexpected costs."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    words = ["run", "pool.yaml", "--policy", "policy.json", "--input", "input.parquet"]
    words += ["-o", str(out), "--address", head.gcs_address]
    process = cauc(*words, cwd=cascade, env={**inherited, **PATIENT, "HOME": home, **environment})
    return process.returncode, [
        line for line in process.stderr.splitlines() if not re.search("data-shift|cauc: starting", line)
    ]


@pytest.mark.soak("full")
@pytest.mark.timeout(900)
def test_a_head_that_requires_a_token(cascade, home, tmp_path):
    with local_head(n_cpus=4, HOME=home(TOKEN), RAY_AUTH_MODE="token") as head:
        assert join(cascade, tmp_path / "out", head, home(TOKEN), RAY_AUTH_MODE="token") == (0, [])
        for folder, variables, words in (
            (home(TOKEN), {}, ["asks for a token", "RAY_AUTH_MODE=token"]),
            (home(), {"RAY_AUTH_MODE": "token"}, ["no token is set", "RAY_AUTH_TOKEN_PATH"]),
            (home("cd" * 32), {"RAY_AUTH_MODE": "token"}, ["refuses this token", "RAY_AUTH_TOKEN"]),
        ):
            code, (error,) = join(cascade, tmp_path / "new", head, folder, **variables)
            assert code == 2
            assert all(word in error for word in words), error
            assert not (tmp_path / "new").exists()


@pytest.mark.soak("full")
@pytest.mark.timeout(900)
def test_a_head_without_tokens(cascade, home, tmp_path):
    with local_head(n_cpus=4, HOME=home(), RAY_AUTH_MODE="disabled") as head:
        assert join(cascade, tmp_path / "out", head, home(TOKEN)) == (0, [])
        code, (error,) = join(cascade, tmp_path / "new", head, home(TOKEN), RAY_AUTH_MODE="token")
        assert code == 2
        assert "RAY_AUTH_MODE=disabled" in error
