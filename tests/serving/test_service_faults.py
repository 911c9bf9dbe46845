"""Starts, restarts and faults of a service on real Ray Serve that take tens of seconds."""

import os
import signal
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import poisoned
import pytest
import ray
import yaml
from asking import Chain, ask, clients, edit_pool, in_force, infer, put_policy, until
from ray.serve.exceptions import RayServeException
from replicas import replicas_of
from runs import python_pool, two_model_policy

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError, PolicyError
from cauc_ray.serving import ServingArgs, build_app

pytestmark = pytest.mark.usefixtures("ray_session")
FAULTS = pytest.mark.soak("faults")


def serve(pool, **changes):
    """Serve a pool file of two python models, with some keys changed."""
    return cauc_ray.serve(edit_pool(pool, **changes), two_model_policy(), port=0, name="six")


def status_of(service, x=9.0):
    return infer(service.url, "six", {"x": [x]})[0]


@pytest.mark.parametrize(
    ("stage", "serving", "error", "reason"),
    [
        ({}, {"policy_every_s": 1.0}, ConfigError, "--local"),
        ({}, {"candidate": {"file": "nowhere.json", "share": 0.1}}, PolicyError, "nowhere.json"),
        ({"resources": {"num_cpus": 10_000}}, {}, ExecutionError, "10,000 CPUs"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_any_replica_stops(tmp_path, stage, serving, error, reason):
    pool = edit_pool(python_pool(tmp_path, **stage), serving=serving)
    with pytest.raises(error, match=reason):
        build_app(ServingArgs(pool=yaml.safe_load(pool.read_text()), policy=two_model_policy().model_dump(mode="json")))


@FAULTS
def test_a_version_that_has_no_room_next_to_the_running_one_is_refused(tmp_path):
    pool = python_pool(tmp_path, resources={"num_cpus": 0.3 * ray.cluster_resources()["CPU"]})
    content, policy = yaml.safe_load(pool.read_text()), two_model_policy().model_dump(mode="json")
    build_app(ServingArgs(pool=content, policy=policy))
    with serve(pool):
        with pytest.raises(ExecutionError, match="surge: false"):
            build_app(ServingArgs(pool=content, policy=policy))
        build_app(ServingArgs(pool=content, policy=policy, surge=False))


@FAULTS
@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # Ray's, of the window that it looks back
def test_a_version_that_cannot_load_a_stage_does_not_take_over_and_another_replaces_it(tmp_path):
    """Also where the service degrades, and where there is just room for one more version next to both."""
    n_cpus = 0.09 * ray.cluster_resources()["CPU"]
    gone, policy = tmp_path / "gone", two_model_policy()
    models = [("by_x", {}), ("loads_unless", {"path": str(gone)})]
    pool = edit_pool(
        python_pool(tmp_path, models, resources={"num_cpus": n_cpus}, replicas={"min": 2, "max": 4}),
        on_failure="degrade",
        serving={"router": {"resources": {"num_cpus": 0}}},
    )

    def deploy(batch_size):
        content = yaml.safe_load(pool.read_text())
        content["stages"][0]["batch_size"] = batch_size
        app = build_app(ServingArgs(pool=content, policy=policy.model_dump(mode="json"), name="six"))
        ray.serve.run(app, name="six", route_prefix="/")

    with serve(pool) as service:
        gone.touch()
        with pytest.raises(RuntimeError):  # Serve's, of a version that does not start
            deploy(batch_size=3)
        assert not infer(service.url, "six", {"x": [0.1]})[1]["parameters"].get("degraded")
        gone.unlink()
        deploy(batch_size=4)
        assert not infer(service.url, "six", {"x": [0.1]})[1]["parameters"].get("degraded")


@FAULTS
def test_a_token_that_routers_do_not_have_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUC_TOKEN", "s3cret")
    with pytest.raises(ConfigError, match="CAUC_TOKEN is set here, but not on the nodes"):
        serve(python_pool(tmp_path))


@FAULTS
def test_a_service_that_degrades_starts_without_a_later_stage_and_is_whole_once_it_loads(tmp_path):
    gone = tmp_path / "gone"
    gone.touch()
    pool = python_pool(tmp_path, [("by_x", {}), ("loads_unless", {"path": str(gone)})])
    with serve(pool, on_failure="degrade") as service:
        status, content = infer(service.url, "six", {"x": [0.1]})
        assert (status, content["parameters"]["degraded"]) == (200, True)
        gone.unlink()
        until(lambda: not infer(service.url, "six", {"x": [0.1]})[1]["parameters"]["degraded"])


@FAULTS
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
        kill_done = killing.submit(kill)
        with serve(pool) as service:
            assert status_of(service) == 200
            kill_done.result()
            assert replicas_of("stage:small") != killed


@FAULTS
def test_a_router_that_hangs_delays_a_change_of_policy_and_answers_by_no_other(tmp_path):
    chain = Chain(tmp_path)
    body = {"policy": chain.policies["base"].model_dump(mode="json")}
    with cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, name="six") as service:
        stopped = replicas_of("Router")[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            for _ in range(10):  # one of these may wait at the router that hangs
                with suppress(TimeoutError, urllib.error.URLError):
                    status, content, _ = put_policy(service, body)
                    break
            assert (status, content["policy_id"]) == (200, chain.policies["base"].id)
            # More than one only where Serve has replaced the one that hangs meanwhile.
            assert content["replicas"] in (None, 1) or stopped not in replicas_of("Router")
        finally:
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(lambda _: ask(service, chain.ids[:2])[1]["policy_id"], range(40)))
        assert set(answers) == {in_force(service)} == {chain.policies["base"].id}


@FAULTS
def test_a_row_that_hangs_its_process_harms_no_other(tmp_path):
    # Rows wait while a replica starts, which takes a busy machine long.
    with poisoned.poisoned(tmp_path, 2, timeout_s=100.0, call_timeout_s=2.0) as service:
        for turn in range(20):
            assert poisoned.infer(service.url, [[float(turn) + 1] * 2])[0] == 200
        poisoned.require_harmless(service.url, 200, [([[671.0, 0.0]], {})])


@pytest.mark.soak("full")
@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")  # Ray's, of the window that it looks back
def test_a_stage_that_cannot_keep_up_gets_another_replica_and_gives_it_back(tmp_path):
    """Sixteen clients keep a stage busy that may have two replicas, and answers one row in a fifth of a second."""
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 0.2, "log": str(tmp_path / "log")}), ("by_x", {})])
    stages = yaml.safe_load(pool.read_text())["stages"]
    serving = {"batch_size": 1, "timeout_s": 60, "upscale_delay_s": 0, "downscale_delay_s": 2}
    stages[0] |= {"replicas": {"min": 1, "max": 2}, "serving": serving}
    with serve(pool, stages=stages) as service:
        with clients(lambda rng: status_of(service), 16):
            until(lambda: len(replicas_of("stage:small")) == 2)
        assert len(replicas_of("stage:large")) == 1  # few rows come that far
        until(lambda: len(replicas_of("stage:small")) == 1)
