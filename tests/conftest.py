"""What all tests share: Ray's environment, one Ray session, the folder of real data."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No test asserts speed, hypothesis' own neither. In CI the same examples are drawn every time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
# pytest --hypothesis-profile=thorough: hours, for who has changed what strangers send.
settings.register_profile("thorough", parent=settings.get_profile("local"), max_examples=5000)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# A shell that runs the tests in the background has them and all that they start ignore Ctrl-C, which some send.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="r", dir="/tmp"))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")  # ten times as often as Ray would
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Tests run where the repository is; user code of tests is found there too.
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_logits() -> Path:
    folder = SHARED_DATA / "logits"
    if not folder.is_dir():
        pytest.skip("the real saved logits (../shared/data/logits) are not here")
    return folder


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Return a function that runs `cauc` in an empty folder: its exit code, standard output and errors."""
    from cauc_ray.front.command import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


@pytest.fixture(scope="session")
def ray_session():
    """One Ray session of this machine for all tests that need no particular cluster."""
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
