"""What a page installs has the packages that its snippets need, and is installed from a checkout."""

import re
import shlex
import tomllib

import pytest
from pages import PAGES, ROOT, snippets

from cauc_ray.policies.method import METHODS

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# By package: what in a page's snippets needs it.
NEEDS = {
    "ray[default]": r"\bray job ",
    "ray[serve]": r"\bserve (?:deploy|status)\b|\bcauc serve\b|\bcauc_ray\.serve\(",
    "scikit-learn": r"\bsklearn\b|\bCascadeClassifier\b|\bcauc demo\b",
    "pandas": r"\bimport pandas\b",
    "matplotlib": r"\.plot\(|-o \S+\.(?:pdf|png|svg)\b|\bcauc (?:demo|report)\b",
    "openai": r"\bimport openai\b",
    "gguf": r"\bgguf_file:",
}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}


def packages_of(extra):
    """Return the packages of an extra, with those of the extras that it includes."""
    packages = set()
    for requirement in EXTRAS[extra]:
        included = re.match(r"cauc-ray\[([\w,-]+)\]", requirement)
        packages |= packages_in(included[1]) if included else {re.match(r"[\w.-]+(?:\[\w+\])?", requirement)[0]}
    return packages


def packages_in(extras):
    return set().union(*(packages_of(extra) for extra in extras.split(",")))


def missing_packages(shell, code):
    """Return what a page's snippets need and its commands do not install; nothing if they do not install cauc-ray."""
    lines = [line for line in shell.splitlines() if re.search(r"pip install .*'\.\[", line)]
    if not lines:
        return set()
    words = {word for line in lines for word in shlex.split(line, comments=True)}
    installed = words.union(*(packages_in(word[2:-1]) for word in words if word.startswith(".[")))
    names = re.findall(r"--methods? ([\w,-]+)", code)
    methods = [METHODS[name] for listed in names for name in listed.split(",") if name in METHODS]
    needed = {package for method in methods for package in method.packages}
    needed = {DISTRIBUTIONS.get(package, package) for package in needed}
    return needed.union(package for package, pattern in NEEDS.items() if re.search(pattern, code)) - installed


def blocks(page):
    """Return a page's shell commands, and all of its code."""
    every = list(snippets(page))
    shell = "\n".join(snippet.text for snippet in every if snippet.language == "sh").replace("\\\n", " ")
    return shell, "\n".join(snippet.text for snippet in every).replace("\\\n", " ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_installs_what_its_snippets_need(page):
    assert missing_packages(*blocks(page)) == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_install_the_package_from_a_checkout(page):
    """It is not on PyPI."""
    assert not re.search(r"pip install[^`\n]* '?cauc[-_]ray(?!\S*\.whl)", page.read_text())


@pytest.mark.parametrize(
    ("page", "extra", "package"),
    [("roads/cluster", "jobs", "ray[default]"), ("roads/estimators", "serve", "ray[serve]")],
)
def test_a_missing_extra_is_reported(page, extra, package):
    shell, code = blocks(ROOT / "docs" / f"{page}.md")
    assert f",{extra}" in shell
    assert missing_packages(shell.replace(f",{extra}", ""), code) == {package}
