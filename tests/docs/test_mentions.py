"""Files, modules, flags, verbs, extras and keys that pages, help texts, schemas and configs mention exist."""

import json
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from pages import BLOCK, PAGES, ROOT

from cauc_ray.cli.command import VERBS as SUMMARIES
from cauc_ray.cli.command import spellings_of
from cauc_ray.cli.verbs import VERBS
from cauc_ray.schemas import SCHEMAS

# Flags of other programs' commands that pages show or name.
OTHER_FLAGS = {
    *("--help", "--version", "--completion", "--config", "--json", "--debug"),  # every verb's
    *("--no-deps", "--compile-bytecode", "--only-binary", "--require-hashes", "--extra", "--upgrade"),  # pip and uv
    *(
        "--set",
        "--reuse-values",
        "--from-literal",
        "--now",
        "--config.file",
        "--storage.tsdb.path",
    ),  # helm, kubectl, systemctl, Prometheus
    "--device",  # of vLLM's and Docker's commands
}
# Files that a reader has or makes, and which no page shows whole.
READERS_FILES = {"examples/models", "mine.yaml", "old.json", "examples.csv"}
SOURCE = re.compile(r"\.(?:py|toml|md|sh|yaml|yml|json|txt|in|service|jinja|html|css)$")
FILE = re.compile(r"[\w.{}*-]+(?:/[\w.{}*-]+)*/?")
MODULE = re.compile(r"(?<![\w./-])((?:cauc_ray|jobs)(?:\.[A-Za-z_]\w*)+)|-m (examples\.\w+)")


@cache
def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(listed.stdout.split("\n"))


@cache
def sources():
    """Return the text of the code, and of what is deployed."""
    folders = ("cauc_ray/", "jobs/", "examples/", "deployments/", "pyproject.toml")
    kinds = (".py", ".yaml", ".toml", ".json", ".in", ".txt", "Dockerfile", ".service", ".tpl")
    paths = [path for path in tracked() if path.startswith(folders) and path.endswith(kinds)]
    return "\n".join((ROOT / path).read_text() for path in paths)


@cache
def words():
    return frozenset(re.findall(r"\w+", sources()))


@cache
def flags():
    from ray.scripts.scripts import cli

    fields = [(name, field) for verb in VERBS.values() for name, field in verb.options.model_fields.items()]
    spelled = {flag for name, field in fields for flag in spellings_of(name, field) if flag.startswith("--")}
    scripts = set(re.findall(r"\"(--[\w-]+)\"", sources()))
    for path in (ROOT / "jobs" / "bench").glob("*.py"):  # whose flags are parameters of functions
        names = re.findall(r"\b(\w+): (?:bool|int|float|str)\b", path.read_text())
        scripts |= {f"--{name.replace('_', '-')}" for name in names}
    waiting, ray = [cli], set()
    while waiting:
        command = waiting.pop()
        waiting += list(getattr(command, "commands", {}).values())
        ray |= {flag for parameter in command.params for flag in parameter.opts}
    return spelled | scripts | ray | OTHER_FLAGS


@cache
def extras():
    return set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def ghosts(text, code="", folder=ROOT):
    """Yield what a text mentions and does not exist.

    Args:
        text: Prose, with code between backticks.
        code: Other code of the same page, which may make files and name columns.
        folder: Where relative paths start, besides the repository and its rooms.
    """
    spans = re.findall(r"`([^`\n]+)`", text)
    for match in MODULE.finditer(f"{text}\n{code}"):
        name = match[1] or match[2]
        if not exists_in_code(name) and not is_file(name, folder):
            yield name
    for flag in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", f"{text}\n{code}"):
        if flag not in flags():
            yield flag
    for names in re.findall(r"(?:cauc-ray|'\.)\[([\w,-]+)\]", f"{text}\n{code}"):
        yield from set(names.split(",")) - extras()
    for variable in re.findall(r"\bCAUC_[A-Z_]+\b", f"{text}\n{code}"):
        if variable not in words():
            yield variable
    for verb in re.findall(r"`cauc ([a-z]+(?: set)?)\b", text):
        if verb not in SUMMARIES and verb != "policy":
            yield f"cauc {verb}"
    for span in spans:
        for token in span.split():
            token = token.strip(",;:()'\"")
            if FILE.fullmatch(token) and (
                SOURCE.search(token) or re.match(r"(?:cauc_ray|jobs|docs|tests|examples)/", token)
            ):
                is_made = token in code or token in READERS_FILES or Path(token).name in sources()
                if not is_made and not is_file(token, folder):
                    yield token
        if re.fullmatch(r"[a-z]+(?:_[a-z0-9]+)+", span) and span not in words() and span not in code:
            if re.match(r"(?:ray_)?cauc_", span):  # a metric, whose name is put together; the dashboard's test has it
                continue
            yield span
    for path in re.findall(r"(?<![\w/`.-])((?:jobs|examples|docs|cauc_ray|deployments|tests)/[\w./*-]*\w)", text):
        if path not in READERS_FILES and not is_file(path, folder):
            yield path


def is_file(name, folder):
    """Return whether a path, of which a part in capitals stands for any name, is one of the repository's or its end."""
    pattern = re.sub(
        r"\\\*|\{\w+\}|\b[A-Z]{3,}\b(?!\.md)",
        r"[^/]+",
        re.escape(name.rstrip("/")).replace(r"\{", "{").replace(r"\}", "}"),
    )
    near = (folder / name).exists() and folder != ROOT
    return near or any(re.search(rf"(?:^|/){pattern}(?:/|$)", path) for path in tracked())


def exists_in_code(name):
    """Return whether a dotted name is a module, a member of one, or a text such as a logger's name."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        homes = [f"{'/'.join(parts[:n])}.py", f"{'/'.join(parts[:n])}/__init__.py"]
        home = next((home for home in homes if home in tracked()), None)
        if home is not None:
            return (
                n == len(parts)
                or re.search(
                    rf'^ *(?:def |class |from .*|import .*|")?{parts[n]}\b', (ROOT / home).read_text(), re.MULTILINE
                )
                or f'"{name}"' in sources()
            )
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_mention_only_what_exists(page):
    text = page.read_text()
    code = "\n".join(match[3] for match in BLOCK.findall(text))
    assert set(ghosts(BLOCK.sub("", text), code, page.parent)) == set()


CONFIGS = [
    path
    for path in tracked()
    if path.startswith(("jobs/", "examples/", "deployments/")) and path.endswith(".yaml") and "chart/" not in path
]


@pytest.mark.parametrize("path", CONFIGS)
def test_comments_of_configs_mention_only_what_exists(path):
    text = "\n".join(re.findall(r"(?:^|\s)#\s(.*)", (ROOT / path).read_text()))
    assert set(ghosts(text, folder=(ROOT / path).parent)) == set()


def test_help_texts_mention_only_what_exists():
    texts = [*SUMMARIES.values(), *(verb.example for verb in VERBS.values())]
    texts += [str(field.description) for verb in VERBS.values() for field in verb.options.model_fields.values()]
    assert set(ghosts("\n".join(texts))) == set()


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_mention_only_what_exists(name):
    texts = re.findall(r'"description": "((?:[^"\\]|\\.)*)"', json.dumps(SCHEMAS[name]()))
    assert set(ghosts("\n".join(texts))) == set()


PLANTED = {
    "a file": ("As `jobs/rayjob.yaml` shows.", "jobs/rayjob.yaml"),
    "a file of a room": ("Tasks read blocks (`reader.py`).", "reader.py"),
    "a path without backticks": ("see jobs/nightly.yaml for it", "jobs/nightly.yaml"),
    "a module": ("`python -m jobs.benchmarks` prints ratios.", "jobs.benchmarks"),
    "a function": ("Call `cauc_ray.forecast(...)`.", "cauc_ray.forecast"),
    "a flag": ("Give `--slo-p98` as well.", "--slo-p98"),
    "a verb": ("`cauc inspect FILE` shows it.", "cauc inspect"),
    "an extra": ("Install `cauc-ray[tpu]`.", "tpu"),
    "an extra of a checkout": ("`pip install '.[cloud]'`", "cloud"),
    "a variable": ("Set `CAUC_SECRET`.", "CAUC_SECRET"),
    "a key": ("A pool has `max_retries_here`.", "max_retries_here"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_mistake_is_reported(kind, tmp_path):
    sentence, mistake = PLANTED[kind]
    page = tmp_path / "README.md"
    page.write_text(f"{PAGES[0].read_text()}\n{sentence}\n")
    assert mistake in set(ghosts(BLOCK.sub("", page.read_text())))
