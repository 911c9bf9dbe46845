"""Joining a cluster with and without Ray's tokens: it connects, or one line names what to set."""

import os
import subprocess
import sys

import pytest
from local_head import local_head
from runs import numbered_input, python_pool, two_model_policy

pytestmark = pytest.mark.slow
TOKEN = "ab" * 32


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
    """Run `cauc run --address`. Returns its exit code and standard error."""
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_AUTH_MODE", "RAY_ADDRESS")}
    words = ["run", "pool.yaml", "--policy", "policy.json", "--input", "input.parquet"]
    words += ["-o", str(out), "--address", head.gcs_address]
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from cauc_ray.cli.command import main; main(sys.argv[1:])", *words],
        cwd=cascade, env={**env, "HOME": home, **environment}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    # These rows cost more than the policy expects; that warning is of another matter.
    said = [line for line in done.stderr.splitlines(keepends=True) if "cost-shift" not in line]
    return done.returncode, "".join(said)


def test_a_head_that_wants_a_token(cascade, home, tmp_path):
    with local_head(n_cpus=4, HOME=home(TOKEN), RAY_AUTH_MODE="token") as head:
        code, error = join(cascade, tmp_path / "out", head, home(TOKEN), RAY_AUTH_MODE="token")
        assert (code, error) == (0, "")
        for folder, variables, named in (
            (home(TOKEN), {}, ["asks for a token", "RAY_AUTH_MODE=token"]),
            (home(), {}, ["RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"]),
            (home(TOKEN), {"RAY_AUTH_MODE": "disabled"}, ["RAY_AUTH_MODE=token"]),
            (home(), {"RAY_AUTH_MODE": "token"}, ["no token is set", "RAY_AUTH_TOKEN_PATH"]),
            (home("cd" * 32), {"RAY_AUTH_MODE": "token"}, ["refuses this token", "RAY_AUTH_TOKEN"]),
        ):
            code, error = join(cascade, tmp_path / "new", head, folder, **variables)
            assert (code, error.count("\n")) == (2, 1), error
            assert all(word in error for word in named), error
            assert not (tmp_path / "new").exists()


def test_a_head_without_tokens(cascade, home, tmp_path):
    with local_head(n_cpus=4, HOME=home(), RAY_AUTH_MODE="disabled") as head:
        for number, variables in enumerate(({}, {"RAY_AUTH_MODE": "disabled"})):
            code, error = join(cascade, tmp_path / f"out{number}", head, home(TOKEN), **variables)
            assert (code, error) == (0, "")
        code, error = join(cascade, tmp_path / "new", head, home(TOKEN), RAY_AUTH_MODE="token")
        assert (code, error.count("\n")) == (2, 1), error
        assert "uses no tokens" in error
        assert "RAY_AUTH_MODE=disabled" in error
