"""`cauc serve` and `cauc policy set` as processes of their own, as people and process managers run them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import synthetic
from hostile import Asked, post
from runs import MODELS, python_pool, saved_pool, two_model_policy

from cauc_ray.cli.command import main
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule

CAUC = Path(sys.executable).with_name("cauc")
TOKEN, POLICY_TOKEN = "infer-5f1c", "clé-politique-93ab"
DEADLINE_S = 120


def environment(ray_folder, **more):
    own = {name: value for name, value in os.environ.items() if not name.startswith("CAUC_")}
    return own | {"RAY_TMPDIR": str(ray_folder), **more}


@pytest.fixture(scope="module")
def ray_folder():
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets need a short path
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    chains = synthetic.write_table(folder / "LOGITS", n=100)
    saved_pool(folder)
    policies = {
        "rf": fit_rf(chains["calibration"], chains["validation"], ThresholdRule()),
        "base": fit_base(chains["calibration"], chains["validation"]),
        "two": two_model_policy(),
    }
    for name, policy in policies.items():
        (folder / f"{name}.json").write_text(policy.to_json())
    return folder


class Running:
    """A service in a process and a session of its own."""

    def __init__(self, home, ray_folder, *more):
        self.ray_folder = ray_folder
        command = [CAUC, "serve", "pool.yaml", "--policy", "rf.json", "--port", "0", "--name", "six", "--json", *more]
        tokens = {"CAUC_TOKEN": f"{TOKEN}\n", "CAUC_POLICY_TOKEN": POLICY_TOKEN}
        self.process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(ray_folder, **tokens),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said = self.process.stdout.readline()

    def kill(self):
        """Leave nothing, whatever a test has not ended."""
        if self.process.poll() is None:
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def running(home, ray_folder):
    one = Running(home, ray_folder)
    yield one
    one.kill()


@pytest.fixture(scope="module")
def local(home, ray_folder):
    one = Running(home, ray_folder, "--local")
    yield one
    one.kill()


def with_environment(name, value):
    """Return the live processes that have a variable in their environment."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and process.environ().get(name) == value:
                found.append(process)
        except psutil.Error:
            continue
    return found


def url_of(running):
    return json.loads(running.said)["url"]


def get(running, path):
    return post(url_of(running), path, Asked({}, b"", None), "GET")


def infer(running, **headers):
    """Ask for one row; return the status and the answer."""
    inputs = [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": ["test-2-00000"]}]
    asked = Asked({"inputs": inputs}, b"", None, headers).encode()
    status, _, body, _ = post(url_of(running), "/v2/models/six/infer", asked)
    return status, json.loads(body)


@pytest.fixture
def cauc(home, monkeypatch, capsys):
    """Return a function that runs the command in this process: exit code, standard output, errors."""
    monkeypatch.chdir(home)

    def run(*arguments, policy_token=None):
        monkeypatch.delenv("CAUC_POLICY_TOKEN", raising=False)
        if policy_token is not None:
            monkeypatch.setenv("CAUC_POLICY_TOKEN", policy_token)
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        assert said.err.count("\n") <= 1
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture
def set_policy(cauc, local):
    """Return a function that runs `cauc policy set` on the service."""
    return lambda *arguments, token=None: cauc("policy", "set", *arguments, "--url", url_of(local), policy_token=token)


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xe9", "Bearer " + "é" * 2000],
)
def test_without_a_valid_token_nothing_is_answered(local, given):
    status, answer = infer(local, **({} if given is None else {"Authorization": given}))
    assert status == 401
    assert list(answer) == ["error"]


def test_the_policy_changes_with_its_own_token_only(local, set_policy):
    for token in (None, TOKEN, "", f"{POLICY_TOKEN}x"):
        code, out, err = set_policy("base.json", token=token)
        assert (code, out) == (2, "")
        assert "401" in err
    code, out, _ = set_policy("base.json", "--json", token=f"{POLICY_TOKEN}\n")
    assert code == 0
    changed = json.loads(out)
    assert changed["previous"] == json.loads(local.said)["policy_id"]
    assert infer(local, Authorization=f"Bearer {TOKEN}")[1]["parameters"]["policy_id"] == changed["policy_id"]
    code, _, err = set_policy("two.json", token=POLICY_TOKEN)
    assert code == 2
    assert f"the service runs {', '.join(MODELS)}" in err
    code, _, err = set_policy("--budget", "0.01", token=POLICY_TOKEN)
    assert code == 2
    assert "cheapest operating point" in err


def test_a_token_that_no_header_can_carry_is_not_shown(set_policy):
    code, out, err = set_policy("base.json", token=f"{POLICY_TOKEN}\nmore")
    assert code == 2
    assert "CAUC_POLICY_TOKEN" in err
    assert "93ab" not in out + err


def test_a_port_is_taken_once(local, cauc):
    port = url_of(local).rpartition(":")[2]
    code, out, err = cauc("serve", "pool.yaml", "--policy", "rf.json", "--port", port)
    assert (code, out) == (2, "")
    assert err == f"cauc: error: cannot listen at 127.0.0.1:{port}: Address already in use\n"


def test_the_log_of_a_local_service_has_no_token(local):
    status, _ = infer(local, Authorization=f"Bearer {TOKEN}")
    assert status == 200
    local.process.send_signal(signal.SIGTERM)
    out, err = local.process.communicate(timeout=DEADLINE_S)
    assert (local.process.returncode, out) == (0, "")
    assert {json.loads(line)["status"] for line in err.splitlines() if line.startswith("{")} == {200, 401}
    assert TOKEN not in err
    assert POLICY_TOKEN not in err


@pytest.mark.slow
def test_a_service_on_ray_says_where_it_is_and_no_log_has_a_token(running):
    said = json.loads(running.said)
    assert infer(running)[0] == 401
    status, answer = infer(running, Authorization=f"Bearer {TOKEN}")
    assert (status, said["model"]) == (200, "six")
    assert answer["parameters"]["policy_id"] == said["policy_id"]
    schema = json.loads(get(running, "/openapi.json")[2])
    assert schema["paths"]["/v2/models/{name}/infer"]["post"]["security"]
    logs = [path for path in running.ray_folder.rglob("*") if path.is_file()]
    assert any("Router" in path.name for path in logs)
    for path in logs:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert POLICY_TOKEN.encode() not in content, path


def started(folder, ray_folder, *factories):
    """Start a service of python models in a process and a session of its own."""
    python_pool(folder, list(factories))
    (folder / "policy.json").write_text(two_model_policy().to_json())
    return subprocess.Popen(
        [CAUC, "serve", "pool.yaml", "--policy", "policy.json", "--port", "0", "--json"],
        cwd=folder,
        env=environment(ray_folder, STARTED_BY=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_what_models_print_is_logged_with_the_stages_name(tmp_path, ray_folder):
    process = started(tmp_path, ray_folder, *[("talkative", {"seconds": 0.0})] * 2)
    try:
        url = json.loads(process.stdout.readline())["url"]
        row = {"name": "x", "shape": [3], "datatype": "FP64", "data": [0.1] * 3}
        with urllib.request.urlopen(f"{url}/v2/models/test/infer", json.dumps({"inputs": [row]}).encode(), timeout=60):
            pass
        time.sleep(1.0)  # Ray passes on what processes print a few times a second
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=DEADLINE_S)
    for name in ("small", "large"):
        lines = [line for line in err.splitlines() if line.startswith(f"stage '{name}': ")]
        assert "loaded in process" in lines[0]
        assert lines[1:] == [f"stage '{name}': a batch of 3 rows"]


@pytest.mark.slow
def test_a_stage_that_cannot_load_ends_it_with_one_line(tmp_path, ray_folder):
    process = started(tmp_path, ray_folder, ("by_x", {}), ("cannot_load", {}))
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, out) == (2, "")
    assert err == "cauc: error: the service does not start: stage large: OSError: weights.pt is not there\n"
    assert with_environment("STARTED_BY", str(tmp_path)) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "nowhere.yaml", "--policy", "rf.json"], "there is no pool file nowhere.yaml"),
        (["serve", "pool.yaml", "--policy", "nowhere.json"], "there is no policy file nowhere.json"),
        (["serve", "rf.json", "--policy", "rf.json"], "rf.json"),
        (["serve", "pool.yaml", "--policy", "pool.yaml"], "pool.yaml is not a readable policy file"),
        (["serve", "pool.yaml", "--policy", "two.json"], "unknown stage 'small'"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--port", "65536"], "cannot listen at 127.0.0.1:65536"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--port", "-1"], "cannot listen at 127.0.0.1:-1"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--host", ""], "give a host to listen at"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--host", "no.invalid", "--port", "0"], "cannot listen at"),
        (["policy", "set"], "give a policy, a threshold or a budget"),
        (["policy", "set", "nowhere.json"], "there is no policy file nowhere.json"),
        (["policy", "set", "rf.json", "--url", "http://127.0.0.1:1"], "cannot be reached: Connection refused"),
        (["policy", "set", "rf.json", "--url", "file:///etc/hostname"], "is no http address"),
        (["policy", "set", "rf.json", "--url", "localhost"], "cannot be reached"),
        (["policy", "set", "rf.json", "--url", "http://[::1"], "cannot be reached"),
        (["policy", "set", "rf.json", "--url", "http://127.0.0.1:1/ a"], "cannot be reached"),
        (["policy", "set", "rf.json", "--url", "http://127.0.0.1:1/\u20ac"], "cannot be reached"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(cauc, arguments, says):
    code, out, err = cauc(*arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_a_cluster_that_does_not_exist_is_reported_in_one_line(home, ray_folder):
    # In a process of its own: this one may have a Ray session, which would be used instead.
    command = [CAUC, "serve", "pool.yaml", "--policy", "rf.json", "--port", "0", "--address", "localhost:1"]
    done = subprocess.run(command, cwd=home, env=environment(ray_folder), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cauc: error: no Ray cluster at 'localhost:1': Connection refused\n"


def test_what_is_not_one_of_our_services_is_reported(cauc):
    """Something that speaks no HTTP listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        code, out, err = cauc("policy", "set", "rf.json", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()
    assert (code, out) == (2, "")
    assert "cannot be reached" in err
