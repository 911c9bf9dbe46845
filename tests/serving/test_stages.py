"""Replicas of a stage on Serve: loaded again until they can be, and as many as routers need."""

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from asking import until

from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving import scaling
from cauc_ray.serving.on_serve import ROUTER, AppVersion, StageServer, stage_deployment
from cauc_ray.serving.request_state import FactsCall
from cauc_ray.serving.stored import MemoryStore


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    """Replace Serve's process of the replica, whose environment it may set."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)


VERSION = AppVersion("life", (ROUTER, stage_deployment("one")))


@pytest.fixture
def version(monkeypatch):
    """Return a version whose router has started, in a store of this process."""
    store = MemoryStore()
    monkeypatch.setattr("cauc_ray.serving.on_serve.RayStore", lambda: store)
    VERSION.note_loaded(ROUTER)
    return VERSION


@pytest.fixture
def server_of():
    """Return a function that starts a replica of a stage; all are ended as Serve ends them."""
    servers = []

    def server_of(spec, version, **options):
        servers.append(StageServer(spec, 0, version, **options))
        return servers[-1]

    yield server_of
    for server in servers:
        server.__del__()


def stage_of(factory, **kwargs):
    model = {"kind": "python", "factory": f"user_models:{factory}", "kwargs": kwargs}
    return StageSpec.model_validate({"name": "one", "model": model})


def test_a_model_that_can_wait_is_loaded_again_until_it_can_be(tmp_path, version, server_of):
    gone = tmp_path / "gone"
    gone.touch()
    spec = stage_of("loads_unless", path=str(gone))
    with pytest.raises(OSError, match="not now"):
        server_of(spec, version)
    server = server_of(spec, version, can_wait=True)
    why, _ = asyncio.run(server.facts(FactsCall("life", "one")))
    assert "not now" in why
    gone.unlink()
    until(lambda: isinstance(asyncio.run(server.facts(FactsCall("life", "one")))[0], ModelFacts))
    assert asyncio.run(server.facts(FactsCall("another version", "one"))) is None


def test_a_replica_runs_once_a_router_of_its_version_has_started(monkeypatch, server_of):
    store = MemoryStore()
    monkeypatch.setattr("cauc_ray.serving.on_serve.RayStore", lambda: store)
    with ThreadPoolExecutor(1) as threads:
        started = threads.submit(server_of, stage_of("by_x"), VERSION)
        until(lambda: store.get(f"loaded:life:{stage_deployment('one')}"))
        with pytest.raises(TimeoutError):
            started.result(0.5)
        VERSION.note_loaded(ROUTER)
        started.result(10.0)


def test_a_replica_goes_on_for_the_routers_of_its_version_until_they_release_it(version, server_of):
    server = server_of(stage_of("by_x"), version)

    async def holds():
        first, second = (asyncio.create_task(server.hold("life", router, ["one"])) for router in "ab")
        await asyncio.sleep(0)
        assert await server.hold("another version", "a", []) is None
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in (first, second))
        again = asyncio.create_task(server.hold("life", "a", ["one"]))  # replaces the first
        await asyncio.wait_for(first, 1.0)
        await server.hold("life", "b", ["another"])
        await asyncio.wait_for(second, 1.0)
        assert not again.done()
        await server.hold("life", "a", [])
        await asyncio.wait_for(again, 1.0)

    asyncio.run(holds())


def test_the_time_to_load_is_that_of_the_whole_process(version, server_of, monkeypatch):
    """On a busy machine, a replica takes longer to import what it needs than to load its model."""
    monkeypatch.setattr("cauc_ray.serving.on_serve.IMPORTED_AT", time.monotonic() - 20.0)
    _, load_s = asyncio.run(server_of(stage_of("by_x"), version).facts(FactsCall("life", "one")))
    assert load_s > 20.0


@pytest.mark.parametrize("loads", [True, False])
def test_a_replica_that_has_ended_is_collected_in_any_thread(tmp_path, version, loads):
    """Also in one that is just starting another, and holds the locks of executors."""
    servers = []
    if loads:
        servers.append(StageServer(stage_of("by_x"), 0, version))
        servers[0].__del__()  # as Serve ends it
    else:
        (tmp_path / "gone").touch()
        with pytest.raises(OSError, match="not now"):
            StageServer(stage_of("loads_unless", path=str(tmp_path / "gone")), 0, version)

    class Name:
        def __str__(self):
            servers.clear()
            gc.collect()
            return "thread"

    def starts_another():
        with ThreadPoolExecutor(1, Name()) as threads:
            threads.submit(int).result()

    thread = threading.Thread(target=starts_another, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()


def test_a_stage_gets_the_replicas_that_its_routers_need_together(monkeypatch):
    now = 100.0
    monkeypatch.setattr(scaling, "time", SimpleNamespace(monotonic=lambda: now))
    needs = scaling.Needs()
    needs.note("a", 1.2)
    needs.note("b", 0.9)
    metrics = {scaling.NEEDED: {"replica-1": needs.total(), "replica-2": 0.4}}
    assert scaling.replicas_for(SimpleNamespace(aggregated_metrics=metrics))[0] == 3
    assert scaling.replicas_for(SimpleNamespace(aggregated_metrics=None))[0] == 1
    now += scaling.FRESH_S  # neither router has called since
    assert needs.total() == 0
