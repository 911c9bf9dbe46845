"""`cauc serve` and `cauc policy set` as processes of their own, as people and process managers run them."""

import json
import shutil
import signal
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
from asking import Chain, Command, edit_pool, http, infer
from runs import MODELS, two_model_policy
from tritonclient.utils import InferenceServerException

TOKEN, POLICY_TOKEN = "infer-5f1c", "clé-politique-93ab"


@pytest.fixture(scope="module")
def ray_folder():
    folder = tempfile.mkdtemp(prefix="r", dir="/tmp")  # sockets need a short path
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    chain = Chain(folder)
    edit_pool(chain.pool, serving={})
    for name, policy in {**chain.policies, "two": two_model_policy()}.items():
        policy.save(folder / f"{name}.json")
    return folder


def served(home, ray_folder, *more):
    tokens = {"CAUC_TOKEN": f"{TOKEN}\n", "CAUC_POLICY_TOKEN": POLICY_TOKEN}
    return Command(home, "--port", "0", "--name", "six", *more, policy="rf.json", RAY_TMPDIR=str(ray_folder), **tokens)


@pytest.fixture(scope="module")
def running(home, ray_folder):
    with closing(served(home, ray_folder, "--host", "0.0.0.0", "--grpc-port", "0")) as service:
        yield service


@pytest.fixture(scope="module")
def local(home, ray_folder):
    with closing(served(home, ray_folder, "--local", "--grpc-port", "0")) as service:
        yield service


def ask(running, **headers):
    """Ask for one row; return the status and the answer."""
    return infer(running.url, "six", {"example_id": ["test-2-00000"]}, **headers)


def require_token_over_grpc(service):
    ids = over_grpc.InferInput("example_id", [1], "BYTES")
    ids.set_data_from_numpy(np.array([b"test-2-00000"], dtype=object))
    with over_grpc.InferenceServerClient(service.said["grpc"]) as client:
        assert client.is_model_ready("six")
        for headers in (None, {"authorization": f"Bearer {TOKEN}x"}):
            for call, asked in ((client.infer, [ids]), (client.get_model_metadata, "")):
                with pytest.raises(InferenceServerException) as error:
                    call("six", asked, headers=headers)
                assert error.value.status() == "StatusCode.UNAUTHENTICATED"
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert client.get_model_metadata("six", headers=headers).name == "six"
        assert client.infer("six", [ids], headers=headers).as_numpy("prediction").shape == (1,)


@pytest.fixture
def cauc(home, command, monkeypatch):
    """Return a function that runs the command there: exit code, standard output, errors."""
    monkeypatch.chdir(home)

    def run(*arguments, policy_token=None):
        monkeypatch.delenv("CAUC_POLICY_TOKEN", raising=False)
        if policy_token is not None:
            monkeypatch.setenv("CAUC_POLICY_TOKEN", policy_token)
        code, out, err = command(*arguments)
        assert err.count("\n") <= 1
        return code, out, err

    return run


@pytest.fixture
def set_policy(cauc, local):
    """Return a function that runs `cauc policy set` on the service."""
    return lambda *arguments, token=None: cauc("policy", "set", *arguments, "--url", local.url, policy_token=token)


def test_all_addresses_but_those_of_health_ask_for_the_token(local):
    for path in ("/v2", "/v2/models/six", "/v2/models/six/policy", "/v2/models/six/watch", "/metrics", "/openapi.json"):
        status, text, _ = http("GET", f"{local.url}{path}")
        assert (status, "CAUC_TOKEN" in text.decode()) == (401, True), path
        assert http("GET", f"{local.url}{path}", Authorization=f"Bearer {TOKEN}")[0] == 200, path
    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/six/ready"):
        assert http("GET", f"{local.url}{path}")[0] == 200, path
    for token in (None, f"{TOKEN}x"):
        status, answer = ask(local, **({} if token is None else {"Authorization": f"Bearer {token}"}))
        assert (status, list(answer)) == (401, ["error"])
    require_token_over_grpc(local)


def test_the_policy_changes_with_its_own_token_only(local, set_policy):
    for token in (None, TOKEN, "", f"{POLICY_TOKEN}x"):
        code, out, err = set_policy("base.json", token=token)
        assert (code, out) == (2, "")
        assert "401" in err
    code, out, _ = set_policy("base.json", "--json", token=f"{POLICY_TOKEN}\n")
    assert code == 0
    changed = json.loads(out)
    assert changed["previous"] == local.said["policy_id"]
    assert ask(local, Authorization=f"Bearer {TOKEN}")[1]["parameters"]["policy_id"] == changed["policy_id"]
    code, _, err = set_policy("two.json", token=POLICY_TOKEN)
    assert code == 2
    assert f"the service runs {', '.join(MODELS)}" in err
    code, _, err = set_policy("--budget", "0.01", token=POLICY_TOKEN)
    assert code == 2
    assert "cheapest operating point" in err


def test_a_local_service_keeps_its_port_to_itself_and_tokens_out_of_its_log(local, cauc, set_policy):
    assert ask(local, Authorization=f"Bearer {TOKEN}")[0] == 200
    port = local.url.rpartition(":")[2]
    _, _, err = cauc("serve", "pool.yaml", "--policy", "rf.json", "--port", port)
    assert err == f"cauc: error: cannot listen at 127.0.0.1:{port}: Address already in use\n"
    code, out, err = set_policy("base.json", token=f"{POLICY_TOKEN}\nmore")  # which no header can carry
    assert (code, "CAUC_POLICY_TOKEN" in err, "93ab" in out + err) == (2, True, False)
    code, out, err = local.ended(signal.SIGTERM)
    assert (code, out) == (0, "")
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert {line["status"] for line in lines if line["event"] != "policy"} == {200, 401}
    assert TOKEN not in err
    assert POLICY_TOKEN not in err


@pytest.mark.soak("full")
def test_a_service_on_ray_asks_for_its_token_over_http_and_grpc_and_logs_none(running, ray_folder):
    assert ask(running)[0] == 401
    status, answer = ask(running, Authorization=f"Bearer {TOKEN}")
    assert (status, running.said["model"]) == (200, "six")
    assert answer["parameters"]["policy_id"] == running.said["policy_id"]
    token = {"Authorization": f"Bearer {TOKEN}"}
    schema = json.loads(http("GET", f"{running.url}/openapi.json", **token)[1])
    assert schema["paths"]["/v2/models/{name}/infer"]["post"]["security"]
    require_token_over_grpc(running)
    logs = [path for path in ray_folder.rglob("*") if path.is_file()]
    of_routers = [path for path in logs if "Router" in path.name]
    lines = [json.loads(line) for path in of_routers for line in path.read_text().splitlines()]
    assert {line["cauc"]["status"] for line in lines if "cauc" in line} == {200, 401}
    for path in logs:
        content = path.read_bytes()
        assert TOKEN.encode() not in content, path
        assert POLICY_TOKEN.encode() not in content, path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "pool.yaml", "--policy", "two.json"], "unknown stage 'small'"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--name", "a/b"], "part of URLs"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--port", "65536"], "cannot listen at 127.0.0.1:65536"),
        (["serve", "pool.yaml", "--policy", "rf.json", "--local", "--address", "auto"], "local"),
        (["policy", "set"], "a policy, a threshold or a budget"),
        (["policy", "set", "rf.json", "--url", "http://[::1"], "is not an http address"),
        (["policy", "set", "rf.json", "--url", "file:///etc/hostname"], "is not an http address"),
    ],
)
def test_invalid_arguments_end_with_one_line_and_exit_code_2(cauc, arguments, reason):
    code, out, err = cauc(*arguments)
    assert (code, out) == (2, "")
    assert reason in err
