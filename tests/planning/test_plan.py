"""`cauc plan`: figures that add up, a ledger's seconds, and what is said where the pool falls short."""

import json

import pytest
import yaml
from earlier_runs import call, write_run
from runs import MODELS, saved_model
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import CaucWarning
from cauc_ray.planning import simulation

RATE, MOST = 20.0, 8
# Seconds of a call and of a row, and what a replica occupies.
TAKES = {"m0": (0.1, 0.01), "m1": (0.2, 0.05), "m2": (0.5, 0.2)}
RESOURCES = {
    "m0": {"num_cpus": 0.5},
    "m1": {"num_cpus": 1, "num_gpus": 0.25, "labels": {"tier": "gpu"}},
    "m2": {"num_cpus": 2, "num_gpus": 1, "custom": {"licence": 1}},
}


def pool_content(most):
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
            }
            for name, (call_s, row_s) in TAKES.items()
        ],
    }


@pytest.fixture(autouse=True, scope="module")
def quick_plans():
    """Simulate few requests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, least in (("LEAST_ROWS", 1000), ("LEAST_LAST_ROWS", 100), ("LEAST_CALLS", 20)):
            patch.setattr(simulation, name, least)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a table, a policy, pools that allow many replicas and one, and an earlier run."""
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=150)
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", budget=9.0)
    policy.save(folder / "policy.json")
    for name, most in (("pool", MOST), ("few", 1)):
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(pool_content(most)))
    # Calls that take three times what the pool says, of which a quarter was deferred.
    calls = [
        call(stage, place % 2, 60.0 * place, n, 3 * (of_call + n * of_row), n - n // 4)
        for stage, (of_call, of_row) in TAKES.items()
        for place, n in enumerate([16, 8, 12, 4, 16, 8])
    ]
    write_run(folder / "run", calls, policy.id)
    return folder


@pytest.fixture(scope="module")
def planned(home):
    return cauc_ray.plan(home / "pool.yaml", home / "policy.json", RATE)


def test_a_plan_has_for_each_stage_what_reaches_it_and_what_it_takes(planned, home):
    policy = cauc_ray.Policy.load(home / "policy.json")
    assert json.loads(json.dumps(planned, allow_nan=False)) == planned
    reach = 1.0
    for stage, expected, of_policy in zip(planned["stages"], policy.expected.stages, policy.stages, strict=True):
        of_call, of_row = TAKES[stage["name"]]
        assert stage["reach"] == pytest.approx(expected.reached / policy.expected.n)
        assert stage["reach"] == pytest.approx(reach)
        assert stage["batch_s"] == pytest.approx(of_call + 16 * of_row)
        assert stage["load"] == pytest.approx(RATE * reach * (of_call / 16 + of_row) / stage["replicas"])
        assert stage["load"] <= planned["most_load"] + 1e-9
        assert stage["cost"] == pytest.approx(reach * of_policy.cost)
        reach *= stage["deferral"]
    assert planned["meets_slo"]
    assert planned["requests_per_s"] == pytest.approx(RATE, rel=0.1)
    assert planned["total"]["cost"] == pytest.approx(policy.expected.cost)
    m0, m1, m2 = (stage["replicas"] for stage in planned["stages"])
    resources = {"CPU": 0.5 * m0 + m1 + 2 * m2, "GPU": 0.25 * m1 + m2, "licence": m2}
    assert planned["total"]["resources"] == pytest.approx(resources)
    alone = planned["most_expensive_alone"]
    assert (alone["name"], alone["replicas"]) == ("m2", -(-RATE * (0.5 / 16 + 0.2) // 0.8))
    assert planned["stages"][1]["labels"] == {"tier": "gpu"}
    seconds = {stage["name"]: stage["reach"] * stage["batch_s"] / 16 / MOST for stage in planned["stages"]}
    assert planned["range"]["bottleneck"] == max(seconds, key=seconds.get)
    assert planned["range"]["max_rate"] == pytest.approx(0.8 / max(seconds.values()))


def test_too_few_replicas_and_a_goal_out_of_reach_are_named(planned, home):
    with pytest.warns(CaucWarning) as warned:
        few = cauc_ray.plan(home / "few.yaml", home / "policy.json", RATE, slo_p99_s=0.01)
    assert [str(warning.message) for warning in warned] == [
        f"stage {stage['name']!r} needs {stage['replicas']} replicas, the pool file allows 1: raise its replicas' max"
        for stage in planned["stages"]
        if stage["replicas"] > 1
    ]
    assert few["range"]["max_rate"] < RATE
    assert not few["meets_slo"]
    assert [stage["replicas"] for stage in few["stages"]] == [stage["replicas"] for stage in planned["stages"]]
    assert "batch_size" not in few["out_of_reach"]  # with replicas to spare, each batch has one row


def test_a_ledger_gives_seconds_and_rates_of_its_own(planned, home, command):
    words = ["plan", home / "pool.yaml", "--policy", home / "policy.json", "--rate", RATE / 4, "--ledger", home / "run"]
    code, out, _ = command(*words, "--json")
    assert code == 0
    for stage, expected in zip(json.loads(out)["stages"], planned["stages"], strict=True):
        assert (stage["seconds"]["source"], stage["seconds"]["n_calls"]) == ("ledger", 4)
        assert stage["seconds"]["error"] == pytest.approx(0.0, abs=1e-9)
        assert stage["batch_s"] == pytest.approx(3 * expected["batch_s"])
        assert stage["ledger_deferral"] == pytest.approx(0.25)
        assert stage["deferral"] == expected["deferral"]
    code, out, _ = command(*words, "--slo-p99", 500)
    assert code == 0
    for text in ("p99 within 500 s holds", "the bottleneck is 'm2'", "an earlier run's ledger"):
        assert text in " ".join(out.split())


def test_a_ledger_whose_calls_take_times_of_their_own_is_said_to_be_off(home, tmp_path):
    calls = [call(stage, 0, 60.0 * n, 16 - n % 3, [0.1, 2.0][n % 2]) for stage in MODELS for n in range(9)]
    write_run(tmp_path / "run", calls)
    with pytest.warns(CaucWarning) as warned:
        planned = cauc_ray.plan(home / "pool.yaml", home / "policy.json", RATE / 4, ledger=tmp_path / "run")
    off = [str(warning.message) for warning in warned if "off by" in str(warning.message)]
    assert [text.split("'")[1] for text in off] == list(MODELS)
    assert all(stage["seconds"]["error"] > 0.2 for stage in planned["stages"])


def test_a_stage_whose_cost_is_its_seconds_is_planned_by_them(home, tmp_path):
    pool = pool_content(MOST)
    for stage, seconds in zip(pool["stages"], (0.01, 0.04), strict=False):
        stage["model"] = saved_model(stage["name"])
        stage["cost"] = {"seconds": seconds}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    stages = cauc_ray.plan(tmp_path / "pool.yaml", home / "policy.json", RATE)["stages"]
    assert [stage["seconds"]["source"] for stage in stages] == ["cost", "cost", "saved"]
    assert [stage["batch_s"] for stage in stages] == pytest.approx([0.16, 0.64, 0.5 + 16 * 0.2])
