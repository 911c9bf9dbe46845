"""The wheel alone, without a checkout: every verb works."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

import pytest

from cauc_ray.cli.command import VERBS

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "demo": "-o demo",
    "collect": "demo/pool.yaml --dataset demo/inputs --models small,large -o logits",
    "fit": "logits --method rf --budget 2 -o policy.json",
    "evaluate": "logits --policy policy.json --predictions answers.parquet",
    "check": "logits --policy policy.json",
    "compare": "logits --methods single,base,rf,margin -o comparison",
    "run": "demo/pool.yaml --policy policy.json --input demo/inputs/test.parquet -o run",
    "plan": "demo/pool.yaml --policy policy.json --rate 5 --ledger run",
    "report": "--policy policy.json --logits logits --run run --comparison comparison -o report.html",
    "show": ".",
}


# Runs verbs in one process with one Ray session. Prints where the package lies, then each verb's exit code and output.
IN_TURN = """
import io, json, sys
from contextlib import redirect_stdout
import ray
import cauc_ray
from cauc_ray.cli.command import main
print(json.dumps(cauc_ray.__file__))
ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
for words in json.loads(sys.argv[1]):
    try:
        with redirect_stdout(io.StringIO()) as output:
            main(words)
    except SystemExit as end:
        print(json.dumps([end.code, output.getvalue()]))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return an empty folder, and the environment in which the wheel is found and the checkout is not."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--wheel", "-q", "-o", folder / "dist", ROOT], check=True, timeout=240)
    (wheel,) = (folder / "dist").glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "installed")
    assert not any(name.startswith(("jobs/", "tests/")) for name in zipfile.ZipFile(wheel).namelist())
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    # Not by a virtual environment of its own: its packages would be installed for minutes.
    paths = os.pathsep.join([str(folder / "installed"), packages])
    (folder / "here").mkdir()
    return folder / "here", {**os.environ, "PYTHONPATH": paths, "MPLBACKEND": "Agg"}


def alone(code, *words):
    """Return a command that runs code without the packages of this environment's site, so without the checkout."""
    return [sys.executable, "-S", "-c", code, *words]


def cauc(*words):
    return alone("from cauc_ray.cli.command import main; main()", *words)


@pytest.mark.soak("versions")
@pytest.mark.timeout(600)
def test_every_verb_works_without_a_checkout(home):
    workdir, env = home
    assert COMMANDS.keys() | {"serve", "policy set"} == VERBS.keys()
    commands = [[verb, *words.split(), "--json"] for verb, words in COMMANDS.items()]
    done = subprocess.run(
        alone(IN_TURN, json.dumps(commands)), cwd=workdir, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    package, *results = map(json.loads, done.stdout.splitlines())
    assert Path(package).is_relative_to(workdir.parent / "installed")
    outputs = {}
    for verb, (code, output) in zip(COMMANDS, results, strict=True):
        assert code in ((0, 3) if verb == "check" else (0,)), (verb, done.stderr)
        outputs[verb] = json.loads(output)
        assert outputs[verb], verb
    assert {"policy.json: policy", "run: run", "comparison: comparison"} <= set(outputs["show"]["holds"])


@pytest.mark.soak("versions")
def test_a_service_and_its_policy_without_a_checkout(home):
    workdir, env = home
    words = ["demo/pool.yaml", "--policy", "demo/policies/rf-20.json", "--local", "--port", "0", "--json"]
    with subprocess.Popen(cauc("serve", *words), cwd=workdir, env=env, stdout=subprocess.PIPE, text=True) as service:
        try:
            about = json.loads(service.stdout.readline())
            body = (workdir / "demo" / "request.json").read_bytes()
            with urllib.request.urlopen(f"{about['url']}/v2/models/{about['model']}/infer", body, timeout=60) as answer:
                assert "prediction" in {output["name"] for output in json.load(answer)["outputs"]}
            change = ["set", "demo/policies/rf-10.json", "--url", about["url"], "--json"]
            done = subprocess.run(
                cauc("policy", *change), cwd=workdir, env=env, capture_output=True, text=True, timeout=60
            )
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["previous"] == about["policy_id"]
        finally:
            service.send_signal(signal.SIGINT)
            service.wait(timeout=30)
