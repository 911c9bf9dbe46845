"""Limits of deferral and of money in services and runs: what is beyond them keeps the best answer so far, or fails."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sums
from asking import answered, infer, outputs_of

import cauc_ray
from cauc_ray.cascade.allowance import HOUR_S, Allowance
from cauc_ray.errors import ConfigError, PolicyError
from cauc_ray.serving.shared_allowance import SharedAllowance
from cauc_ray.serving.stored import Log, MemoryStore

QUESTIONS, RIGHT = sums.questions(150, seed=5)
PRICE = sums.PRICES["large"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return sums.policy(tmp_path_factory.mktemp("answers"))


def test_a_service_degrades_beyond_its_deferral_rate(tmp_path, policy):
    path = sums.pool(tmp_path, on_failure="degrade", limits={"max_deferral_rate": 0.2})
    with cauc_ray.serve(path, policy, port=0, name="sums", local=True) as service:
        content = answered(service.url, "sums", {"question": QUESTIONS}, ("answer", "stage", "degraded"))
    outputs = outputs_of(content)
    assert (outputs["stage"] == 1).sum() == 0.2 * len(QUESTIONS)
    assert outputs["degraded"].sum() > 10
    assert not outputs["stage"][outputs["degraded"]].any()
    assert "limits" in content["parameters"]["reason"]
    assert all(outputs["answer"])


def test_a_service_refuses_beyond_its_money_where_the_pool_says_so(tmp_path, policy):
    path, spent, statuses = sums.pool(tmp_path, limits={"max_usd": 30 * PRICE}), 0.0, set()
    with cauc_ray.serve(path, policy, port=0, name="sums", local=True) as service:
        for question in QUESTIONS:
            status, content = infer(service.url, "sums", {"question": [question]}, ("cost",))
            statuses.add(status)
            spent += outputs_of(content)["cost"].sum() if status == 200 else 0.0
            assert status == 200 or "limits" in content["error"]
    # The first stage's calls are always made.
    assert 20 * PRICE < spent <= 30 * PRICE + len(QUESTIONS) * sums.PRICES["small"]
    assert statuses == {200, 503}


class Router:
    def __init__(self, store, clock, limit, n=2):
        self.stages = [SimpleNamespace(cost=0.0, n_open=0) for _ in range(2)]
        self.allowance = Allowance((0.0, 1.0), max_usd=limit, clock=clock)
        self.shared = SharedAllowance(self.allowance, n, Log(store, "spent:"), lambda: self.stages)
        self.spends = 0

    def spend(self):
        if may := self.allowance.left_usd(self.stages) >= 1.0:
            self.stages[1].cost += 1.0
            self.spends += 1
        return may

    def settle(self):
        asyncio.run(self.shared.settle())


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.95, 0.05), (1.0, 0.0)])
def test_routers_keep_the_money_of_each_hour_together(shares):
    now, store, rng, limit = 5.0, MemoryStore(), np.random.default_rng(0), 200.0
    routers = [Router(store, lambda: now, limit) for _ in shares]
    for hour in range(3):
        now, before = hour * HOUR_S + 5.0, sum(router.spends for router in routers)
        for step in range(1500):
            router = routers[rng.choice(len(shares), p=shares)]
            router.spend()
            if step % 5 == 0:
                router.settle()
        spent = sum(router.spends for router in routers) - before
        assert spent <= limit
        assert spent >= (0.9 if min(shares) else 0.7) * limit  # the base of an idle router is its own
    # Routers in place of those that have died take what is left, at most.
    late = [Router(store, lambda: now, limit) for _ in range(2)]
    for router in late:
        router.settle()
    assert all(router.allowance.reserved_usd <= limit / 100 for router in late)


def test_a_run_keeps_its_money_and_marks_the_rest(tmp_path, policy, ray_session):
    table = pa.table({"example_id": [f"q{row}" for row in range(len(QUESTIONS))], "question": QUESTIONS})
    pq.write_table(table, tmp_path / "input.parquet")
    limit = len(QUESTIONS) * sums.PRICES["small"] + 20 * PRICE
    path = sums.pool(tmp_path, on_failure="degrade", limits={"max_usd": limit, "per": "run"})
    cauc_ray.run(path, policy, tmp_path / "input.parquet", tmp_path / "out")
    rows = pq.read_table(tmp_path / "out" / "predictions").to_pandas()
    assert len(rows) == len(QUESTIONS)
    assert rows.cost.sum() <= limit * (1 + 1e-6)
    assert (rows.stage == 1).sum() == 20
    assert rows.degraded.sum() > 10
    assert set(rows.source) == {"small: self", "large: self"}
    assert rows.answer.str.len().min() > 0


def test_limits_that_cannot_hold_are_refused_in_one_line(tmp_path, policy):
    for limits, error, names in (
        ({"max_usd": 1.0, "per": "run"}, ConfigError, "per: hour"),
        ({}, ConfigError, "max_usd or max_deferral_rate"),
        ({"max_deferral_rate": 2}, ConfigError, "max_deferral_rate"),
    ):
        with pytest.raises(error, match=names), cauc_ray.serve(sums.pool(tmp_path, limits=limits), policy, local=True):
            pass
    in_gflops = policy.model_copy(update={"cost_unit": "GFLOPs"})
    pool = cauc_ray.models.pool.load_pool(sums.pool(tmp_path, limits={"max_usd": 1.0}))
    with pytest.raises(PolicyError, match="USD"):
        Allowance.of(pool, in_gflops)
