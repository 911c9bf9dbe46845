"""Replicas of a stage on Serve: how long they take to load, how they end, and how many routers need."""

import asyncio
import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

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


@pytest.fixture
def version(monkeypatch):
    """Return a version whose router has started, in a store of this process."""
    store = MemoryStore()
    monkeypatch.setattr("cauc_ray.serving.on_serve.RayStore", lambda: store)
    version = AppVersion("life", (ROUTER, stage_deployment("one")), replaces=False)
    version.note_loaded(ROUTER)
    return version


def stage_of(factory, **kwargs):
    model = {"kind": "python", "factory": f"user_models:{factory}", "kwargs": kwargs}
    return StageSpec.model_validate({"name": "one", "model": model})


def test_the_time_to_load_is_that_of_the_whole_process(version, monkeypatch):
    """On a busy machine, a replica takes longer to import what it needs than to load its model."""
    monkeypatch.setattr("cauc_ray.serving.on_serve.IMPORTED_AT", time.monotonic() - 20.0)
    server = StageServer(stage_of("by_x"), 0, version)
    _, load_s = asyncio.run(server.facts(FactsCall("life", "one")))
    server.__del__()  # as Serve ends it
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
