"""A replica of a stage by itself: when it has Serve replace it."""

import asyncio
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from asking import until
from completion_server import Fault, scripted_server
from synthetic import chain
from user_models import hanging

from cauc_ray.cascade.bundles import Part
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.fitting import ThresholdRule, fit_base
from cauc_ray.serving import scaling
from cauc_ray.serving.on_serve import StageServer
from cauc_ray.serving.request_state import StageCall

TIMEOUT_S = 0.02
DATA = chain(2, n=40)
POLICY = fit_base(DATA, DATA, ThresholdRule(threshold=0.5))


class EndedError(Exception):
    """The replica has ended its process."""


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    """Stand in for Serve's process of the replica, whose environment it may set and which it may end."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="one"))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)

    def ends(code):
        raise EndedError(code)

    monkeypatch.setattr("os._exit", ends)


def answered_while_asked_for_health(model, batch, entered, leave):
    """Have a replica answer; return what its health says once the call takes longer than twice its timeout."""
    spec = StageSpec.model_validate({"name": "one", "model": model, "serving": {"timeout_s": TIMEOUT_S}})

    async def main():
        server = StageServer(spec, 0, [])
        n = len(next(iter(batch.values())))
        call = asyncio.create_task(server.answer(StageCall(batch, [Part(0, slice(0, n))], {"": POLICY})))
        try:
            assert await asyncio.to_thread(entered.wait, 60)
            await asyncio.sleep(3 * TIMEOUT_S)
            server.check_health()
        finally:
            leave.set()
            await call

    asyncio.run(main())


def test_a_remote_server_that_does_not_answer_costs_no_replica():
    """Another replica would ask the same server: to replace it is an outage of its own."""
    entered, leave = threading.Event(), threading.Event()

    def script(prompt, before):
        entered.set()
        assert leave.wait(60)
        return Fault(400, {"error": {"message": "no"}})

    with scripted_server(script) as server:
        model = {"kind": "openai", "model": "m", "base_url": server.url, "max_retries": 0}
        batch = {"question": np.array(["which?"], dtype=object), "choices": np.array([["a", "b"]], dtype=object)}
        answered_while_asked_for_health(model, batch, entered, leave)


def python_model(name, **kwargs):
    return {"kind": "python", "factory": f"user_models:{name}", "kwargs": kwargs}


@pytest.mark.parametrize("model", [python_model("hanging"), python_model("prepared", factory="hanging")])
def test_a_model_of_our_own_that_hangs_does(model):
    entered, leave = hanging.entered, hanging.leave = threading.Event(), threading.Event()
    with pytest.raises(EndedError):
        answered_while_asked_for_health(model, {"x": np.zeros(1)}, entered, leave)


def test_a_model_that_can_wait_is_loaded_again_until_it_can_be(tmp_path):
    gone = tmp_path / "gone"
    gone.touch()
    model = {"kind": "python", "factory": "user_models:loads_unless", "kwargs": {"path": str(gone)}}
    spec = StageSpec.model_validate({"name": "one", "model": model})
    with pytest.raises(OSError, match="not now"):
        StageServer(spec, 1, [])
    server = StageServer(spec, 1, [], can_wait=True)
    name, why = asyncio.run(server.facts())
    assert "not now" in why
    gone.unlink()
    until(lambda: isinstance(asyncio.run(server.facts())[1], ModelFacts))
    assert asyncio.run(server.facts())[0] == name


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
