"""What a service does over tens of seconds, on real Ray Serve."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import yaml
from asking import http, infer
from ray.serve.exceptions import RayServeException
from replicas import replicas_of
from runs import python_pool, two_model_policy

import cauc_ray

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_session")]
DEADLINE_S = 90.0


def changed(path, change):
    """Change a pool file's content."""
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))
    return path


def ready(service):
    return http("GET", f"{service.url}/v2/health/ready")[0]


def ask(service):
    return infer(service.url, "six", {"x": [9.0]})[0]


def until(condition, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_first_request_after_a_long_start_is_answered(tmp_path):
    """Models that load for longer than rows wait for a replica; the service is asked as soon as it runs."""
    pool = python_pool(tmp_path, [("loads_slowly", {"seconds": 8.0}), ("by_x", {})], serving={"timeout_s": 4.0})
    with cauc_ray.serve(pool, two_model_policy(), port=0, name="six") as service:
        assert ask(service) == 200


def test_a_service_that_degrades_starts_without_a_later_stage_and_takes_it_in_once_it_loads(tmp_path):
    gone = tmp_path / "gone"
    gone.touch()
    pool = python_pool(tmp_path, [("by_x", {}), ("loads_unless", {"path": str(gone)})])
    changed(pool, lambda content: content.update(on_failure="degrade"))
    with cauc_ray.serve(pool, two_model_policy(), port=0, name="six") as service:
        status, content = infer(service.url, "six", {"x": [0.1]})
        assert (status, content["parameters"]["degraded"]) == (200, True)
        gone.unlink()
        until(lambda: not infer(service.url, "six", {"x": [0.1]})[1]["parameters"]["degraded"])


def test_a_replica_that_is_killed_while_another_stage_loads_does_not_end_the_start(tmp_path):
    pool = python_pool(tmp_path, [("by_x", {}), ("loads_slowly", {"seconds": 10.0})])
    killed = []

    def one_runs():
        with suppress(KeyError, RayServeException):  # Serve does not know of it yet
            killed.extend(replicas_of("stage:small"))
        return killed

    def kill():
        until(one_runs)
        os.kill(killed[0], signal.SIGKILL)

    with ThreadPoolExecutor(1) as killing:
        done = killing.submit(kill)
        with cauc_ray.serve(pool, two_model_policy(), port=0, name="six") as service:
            assert ask(service) == 200
            done.result()
            assert replicas_of("stage:small") != killed


@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # Ray's, of the window that it looks back
def test_a_stage_that_cannot_keep_up_gets_another_replica_and_gives_it_back(tmp_path):
    """Sixteen clients keep a stage busy that may have two replicas, and answers one row in a fifth of a second."""
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 0.2, "log": str(tmp_path / "log")}), ("by_x", {})])
    serving = {"batch_size": 1, "timeout_s": 60, "upscale_delay_s": 0, "downscale_delay_s": 2}
    changed(pool, lambda content: content["stages"][0].update(replicas={"min": 1, "max": 2}, serving=serving))
    with cauc_ray.serve(pool, two_model_policy(), port=0, name="six") as service:
        stop = threading.Event()

        def run():
            while not stop.is_set():
                ask(service)

        threads = [threading.Thread(target=run) for _ in range(16)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: len(replicas_of("stage:small")) == 2, deadline_s=60)
        finally:
            stop.set()
            for thread in threads:
                thread.join(90)
        assert len(replicas_of("stage:large")) == 1  # few rows come that far
        until(lambda: len(replicas_of("stage:small")) == 1, deadline_s=60)
