"""`cauc plan`: figures that add up, warnings where the pool falls short, and one line for what cannot be planned."""

import json
import subprocess
import sys

import pytest
import yaml
from earlier_runs import call, write_run
from runs import MODELS, saved_model
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import CaucWarning

RATE = 200.0
# Seconds of a call and of a row, and what a replica occupies.
TAKES = {"m0": (0.01, 0.001), "m1": (0.02, 0.005), "m2": (0.05, 0.02)}
RESOURCES = {
    "m0": {"num_cpus": 0.5},
    "m1": {"num_cpus": 1, "num_gpus": 0.25, "labels": {"tier": "gpu"}},
    "m2": {"num_cpus": 2, "num_gpus": 1, "custom": {"licence": 1}},
}


def pool_content(most=64, **stage):
    return {
        "name": "planned",
        "task": "multiple-choice",
        "serving": {"router": {"replicas": {"max": 500}}},
        "stages": [
            {
                "name": name,
                "model": saved_model(name, seconds_per_call=call_s, seconds_per_row=row_s),
                "batch_size": 16,
                "replicas": {"min": 1, "max": most},
                "resources": RESOURCES[name],
                **stage,
            }
            for name, (call_s, row_s) in TAKES.items()
        ],
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a table, a policy with what it expects, one without, and pools."""
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=400)
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", budget=9.0)
    (folder / "policy.json").write_text(policy.to_json())
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool_content()))
    (folder / "few.yaml").write_text(yaml.safe_dump(pool_content(most=1)))
    write_run(folder / "run", calls_of(MODELS), policy.id)
    return folder


def calls_of(stages):
    """Return calls that take three times what the pool says, of which a quarter was deferred."""
    return [
        call(stage, place % 2, 60.0 * place, n, 3 * (TAKES[stage][0] + n * TAKES[stage][1]), n - n // 4)
        for stage in stages
        for place, n in enumerate([16, 8, 12, 4, 16, 8])
    ]


@pytest.fixture(scope="module")
def planned(home):
    return cauc_ray.plan(home / "pool.yaml", home / "policy.json", RATE)


def test_a_plan_says_for_each_stage_what_reaches_it_and_what_it_takes(planned, home):
    policy = cauc_ray.Policy.load(home / "policy.json")
    assert json.loads(json.dumps(planned, allow_nan=False)) == planned
    reach = 1.0
    for stage, expected, own in zip(planned["stages"], policy.expected.stages, policy.stages, strict=True):
        call, row = TAKES[stage["name"]]
        assert stage["reach"] == pytest.approx(expected.reached / policy.expected.n)
        assert stage["reach"] == pytest.approx(reach)
        assert stage["requests_per_s"] == pytest.approx(RATE * stage["reach"])
        assert stage["batch_s"] == pytest.approx(call + 16 * row)
        assert stage["load"] == pytest.approx(RATE * reach * (call / 16 + row) / stage["replicas"])
        assert stage["load"] <= planned["most_load"] + 1e-9
        assert stage["cost"] == pytest.approx(reach * own.cost)
        assert stage["replicas"] == stage["least_replicas"]
        reach *= stage["deferral"]
    assert planned["holds"]
    assert planned["requests_per_s"] == pytest.approx(RATE, rel=0.03)
    assert sum(stage["cost_share"] for stage in planned["stages"]) == pytest.approx(1.0)
    assert planned["total"]["cost"] == pytest.approx(policy.expected.cost)
    assert planned["dearest_alone"]["relative_cost"] == pytest.approx(policy.expected.relative_cost)


def test_a_plan_adds_up_what_replicas_occupy(planned):
    m0, m1, m2 = (stage["replicas"] for stage in planned["stages"])
    assert planned["total"]["replicas"] == m0 + m1 + m2
    resources = {"CPU": 0.5 * m0 + m1 + 2 * m2, "GPU": 0.25 * m1 + m2, "licence": m2}
    assert planned["total"]["resources"] == pytest.approx(resources)
    alone = planned["dearest_alone"]
    assert (alone["name"], alone["replicas"]) == ("m2", -(-RATE * (0.05 / 16 + 0.02) // 0.8))
    assert planned["stages"][1]["labels"] == {"tier": "gpu"}


def test_drift_moves_what_reaches_the_later_stages(planned):
    up, down = planned["drift"]
    assert (up["factor"], down["factor"]) == (1.2, 0.8)
    for drift in (up, down):
        reach = 1.0
        for stage, own in zip(drift["stages"], planned["stages"], strict=True):
            assert stage["reach"] == pytest.approx(reach)
            assert stage["load"] == pytest.approx(own["load"] * reach / own["reach"])
            reach *= min(1.0, own["deferral"] * drift["factor"])
            assert stage["replicas"] == own["replicas"]
        assert drift["holds"] == all(stage["load"] < 1 for stage in drift["stages"])
    assert [s["needed"] for s in up["stages"]] >= [s["replicas"] for s in up["stages"]]
    assert down["holds"]


def test_the_pools_own_range_is_what_its_bottleneck_carries(planned, home):
    own, stages = planned["range"], planned["stages"]
    seconds = {stage["name"]: stage["reach"] * stage["batch_s"] / 16 / 64 for stage in stages}
    assert own["bottleneck"] == max(seconds, key=seconds.get)
    assert own["saturated_rate"] == pytest.approx(1 / max(seconds.values()))
    assert own["max_rate"] == pytest.approx(0.8 * own["saturated_rate"])
    assert own["max_rate_at_min"] == pytest.approx(own["max_rate"] / 64)
    assert own["carries_rate"]
    assert 0.85 * own["saturated_rate"] < own["run_rows_per_s"] <= 1.05 * own["saturated_rate"]


@pytest.mark.soak("full")
def test_a_pool_with_too_few_replicas_is_planned_with_a_warning(planned, home):
    with pytest.warns(CaucWarning) as warned:
        few = cauc_ray.plan(home / "few.yaml", home / "policy.json", RATE)
    assert [str(warning.message) for warning in warned] == [
        f"stage {stage['name']!r} needs {stage['replicas']} replicas, the pool file allows 1: raise its replicas' max"
        for stage in planned["stages"]
        if stage["replicas"] > 1
    ]
    assert not few["range"]["carries_rate"]
    assert [stage["replicas"] for stage in few["stages"]] == [stage["replicas"] for stage in planned["stages"]]


@pytest.mark.soak("full")
def test_a_goal_takes_more_replicas_or_is_out_of_reach(planned, home):
    goal = 0.8 * planned["latency_s"]["p99"]
    met = cauc_ray.plan(home / "pool.yaml", home / "policy.json", RATE, slo_p99_s=goal)
    assert met["holds"]
    assert met["latency_s"]["p99"] <= goal
    assert met["total"]["replicas"] > planned["total"]["replicas"]
    never = cauc_ray.plan(home / "pool.yaml", home / "policy.json", RATE, slo_p99_s=0.01)
    assert not never["holds"]
    assert [stage["replicas"] for stage in never["stages"]] == [stage["replicas"] for stage in planned["stages"]]
    assert "batch_size of 'm2'" in never["out_of_reach"]  # whose batches take longest


def test_a_ledger_gives_seconds_and_rates_of_its_own(planned, home, command):
    flags = ["--policy", home / "policy.json", "--rate", RATE, "--ledger", home / "run"]
    code, out, _ = command("plan", home / "pool.yaml", *flags, "--json")
    assert code == 0
    for stage, expected in zip(json.loads(out)["stages"], planned["stages"], strict=True):
        assert (stage["seconds"]["source"], stage["seconds"]["n_calls"]) == ("ledger", 4)
        assert stage["seconds"]["error"] == pytest.approx(0.0, abs=1e-9)
        assert stage["batch_s"] == pytest.approx(3 * expected["batch_s"])
        assert stage["ledger_deferral"] == pytest.approx(0.25)
        assert stage["deferral"] == expected["deferral"]


@pytest.mark.soak("full")
def test_the_command_prints_the_plan(home, command):
    flags = ["--policy", home / "policy.json", "--rate", 5, "--ledger", home / "run", "--slo-p99", 50]
    code, out, _ = command("plan", home / "pool.yaml", *flags)
    assert code == 0
    for words in ("p99 within 50 s holds", "1.2 ×", "the bottleneck is 'm2'", "m2 alone", "an earlier run's ledger"):
        assert words in out


def test_a_plan_needs_no_ray():
    code = "import sys, cauc_ray.planning.plan; sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
