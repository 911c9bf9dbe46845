"""Replicas of a stage on Serve: loaded again until they can be, and as many as routers need."""

import asyncio
import os
from types import SimpleNamespace

import pytest
from asking import until

from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.serving import scaling
from cauc_ray.serving.on_serve import AppVersion, StageServer
from cauc_ray.serving.stored import MemoryStore


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    """Replace Serve's process of the replica, whose environment it may set."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)


def test_a_model_that_can_wait_is_loaded_again_until_it_can_be(tmp_path, monkeypatch):
    version, store = AppVersion("life", 1), MemoryStore()
    monkeypatch.setattr("cauc_ray.serving.on_serve.RayStore", lambda: store)
    gone = tmp_path / "gone"
    gone.touch()
    model = {"kind": "python", "factory": "user_models:loads_unless", "kwargs": {"path": str(gone)}}
    spec = StageSpec.model_validate({"name": "one", "model": model})
    with pytest.raises(OSError, match="not now"):
        StageServer(spec, 0, version)
    server = StageServer(spec, 0, version, can_wait=True)
    name, why, _ = asyncio.run(server.facts("life"))
    assert "not now" in why
    gone.unlink()
    until(lambda: isinstance(asyncio.run(server.facts("life"))[1], ModelFacts))
    assert asyncio.run(server.facts("life"))[0] == name
    assert asyncio.run(server.facts("another version")) is None


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
