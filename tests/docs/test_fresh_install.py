"""The README and the tutorial in new virtual environments, word for word; the package as it is published, and the
versions of its dependencies.

uv builds and installs the package, and has the other packages from the package index.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from pages import ROOT, snippets

from cauc_ray.cli.command import VERBS
from jobs.bench.processes import free_port

UV = Path(sys.executable).parent / "uv"
CORE = "demo,sklearn,serve,grpc,remote,openai,onnx"
# Without extras.
PLAIN = """
from cauc_ray import *

assert "CascadeClassifier" not in globals()
table = sample_logits()
policy = fit(table, method="rf", budget=4.0)
print(evaluate(table, policy), check(table, policy), compare(table))
"""
SMOKE = """
from importlib.util import find_spec
import cauc_ray
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

assert find_spec("jobs") is None  # of a checkout
members = [("small", DecisionTreeClassifier(max_depth=3)), ("large", LogisticRegression(max_iter=2000))]
X, y = load_digits(return_X_y=True)
assert cauc_ray.CascadeClassifier(members, costs=[1, 20], cv=0.5).fit(X, y).score(X, y) > 0.9
"""
EVERY_VERB = """
cauc demo -o made && mv made demo
cauc collect demo/pool.yaml --dataset demo/inputs --models small,large -o logits
cauc fit logits --method rf --budget 2 -o policy.json
cauc evaluate logits --policy policy.json --predictions answers.parquet
cauc check logits --policy policy.json || [ $? = 3 ]
cauc compare logits --methods single,base,rf,margin -o comparison
cauc run demo/pool.yaml --policy policy.json --input demo/inputs/test.parquet -o run
cauc plan demo/pool.yaml --policy policy.json --rate 5 --ledger run
cauc report demo -o report.html
cauc show .
cauc serve demo/pool.yaml --policy demo/policies/rf-20.json --local --port PORT &
trap 'kill $!' EXIT
until curl -sf http://127.0.0.1:PORT/v2/health/ready; do sleep 1; done
curl -sf http://127.0.0.1:PORT/v2/models/digits/infer -d @demo/request.json
cauc policy set demo/policies/rf-10.json --url http://127.0.0.1:PORT
"""


def shell(text, folder, environment, timeout=600):
    """Run commands as a person would who has activated an environment; return what they print."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    variables |= {"PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "MPLBACKEND": "Agg"}
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def environment_of(folder, requirements, *options, python=sys.executable):
    subprocess.run([UV, "venv", "-q", "--python", python, folder], check=True, timeout=120)
    install = [UV, "pip", "install", "-q", "--python", folder / "bin" / "python", *options, *requirements]
    subprocess.run(install, cwd=ROOT, check=True, timeout=900)
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Return the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([UV, "build", "-q", "-o", folder, ROOT], check=True, timeout=300)
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


def tracked_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if (ROOT / name).is_file()]


@pytest.mark.slow
def test_the_description_on_pypi_has_the_readmes_text_and_no_relative_link(dist):
    with ZipFile(dist[1]) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(path))
    description = metadata.get_payload(decode=True).decode()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert re.findall(r"\]\((?!https?:|mailto:|#)[^)]*", description) == []
    assert "[Ray](https://docs.ray.io)" in description
    assert "| a CSV file | Tutorial, to a served cascade |" in description
    systems = [name for name in metadata.get_all("Classifier") if name.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"]


@pytest.mark.slow
def test_the_source_distribution_has_all_files_of_the_repository(dist):
    with tarfile.open(dist[0]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {*tracked_files()} - names == set()


@pytest.mark.soak("pages")
@pytest.mark.timeout(1500)
def test_the_readmes_snippets_run_in_a_new_environment(tmp_path):
    """In a copy of the repository's tracked files."""
    checkout = tmp_path / "cauc-ray"
    environment = checkout / ".venv"
    for name in tracked_files():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    install, *later = snippets(ROOT / "README.md")
    assert install.language == "sh"
    shell(install.text, checkout, environment, timeout=1200)
    python, commands = (next(of.text for of in later if of.language == language) for language in ("python", "sh"))
    (checkout / "snippet.py").write_text(python)
    assert "cascade  94.3 %" in shell("python snippet.py", checkout, environment)
    shell(commands, checkout, environment, timeout=1200)
    assert (checkout / "cauc-demo" / "out" / "summary.json").exists()


@pytest.mark.soak("pages")
@pytest.mark.timeout(1800)
def test_the_tutorial_runs_in_a_new_environment(tmp_path):
    """What it prints has the numbers of the text."""
    environment = environment_of(tmp_path / "venv", ["pandas", f"{ROOT}[sklearn,serve]"])
    folder, printed = tmp_path / "cascade", ""
    folder.mkdir()
    service = None
    variables = {**os.environ, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    variables.pop("PYTHONPATH", None)
    try:
        for snippet in snippets(ROOT / "docs" / "tutorial.md"):
            titled = re.match(r"# (\S+\.(?:py|yaml))\n", snippet.text)
            if titled:
                (folder / titled[1]).write_text(snippet.text)
            elif snippet.how == "background":
                service = subprocess.Popen(["bash", "-c", f"exec {snippet.text}"], cwd=folder, env=variables)
                wait = "until curl -sf http://127.0.0.1:8000/v2/health/ready; do sleep 1; done"
                shell(wait, folder, environment, timeout=120)
            elif snippet.language == "sh" and not snippet.how:
                printed += shell(snippet.text, folder, environment)
    finally:
        if service is not None:
            service.terminate()
            assert service.wait(timeout=60) == 0
    for number in ("85.8", "93.0", "86.1", "93.7", "92.6", "4.75", "prediction [2, 8, 2]"):
        assert number in printed


def pythons(*minor):
    """Return interpreters of these versions that are installed here, None for others."""
    for version in minor:
        named = subprocess.run([UV, "python", "find", f"3.{version}"], capture_output=True, text=True)
        path = named.stdout.strip() if named.returncode == 0 else ""
        yield f"3.{version}", path or next(iter(Path.home().glob(f".pyenv/versions/3.{version}.*/bin/python")), None)


# Wheels of the lowest numpy exist up to Python 3.12.
CASES = [("lowest-direct", *case) for case in pythons(11, 12)] + [("highest", *case) for case in pythons(11, 12, 13)]


@pytest.mark.soak("versions")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("resolution", "version", "python"), CASES, ids=[f"{case[0]}-{case[1]}" for case in CASES])
def test_the_package_works_with_the_lowest_and_highest_dependencies(tmp_path, dist, resolution, version, python):
    if python is None:
        pytest.skip(f"Python {version} is not installed here")
    assert all(f"cauc {verb} " in EVERY_VERB for verb in VERBS)
    commands = EVERY_VERB.replace("PORT", str(free_port()))
    for name, extras, code, then in (("plain", "", PLAIN, ""), ("whole", f"[{CORE}]", SMOKE, commands)):
        package = [f"{dist[1]}{extras}"]
        environment = environment_of(tmp_path / name, package, "--resolution", resolution, python=python)
        (tmp_path / f"{name}.py").write_text(code)
        shell(f"python {name}.py\n{then}", tmp_path, environment, timeout=1200)
    assert (tmp_path / "report.html").exists()
