"""Collections and runs with a stage elsewhere."""

import pytest
import synthetic
from link import Link
from runs import (
    MODELS,
    answers_of,
    pool_of,
    python_model,
    read_all,
    saved_model,
    split_input,
    write_pool,
    write_questions,
)

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

pytestmark = pytest.mark.usefixtures("ray_session")


def remote(url, **settings):
    return {"kind": "remote", "url": url, "model": "large", **settings}


def port_of(service):
    return int(service.url.rsplit(":", 1)[1])


def test_a_run_answers_as_the_replay_and_its_ledger_has_the_bytes_of_the_wire(tmp_path):
    chains = synthetic.write_table(tmp_path / "LOGITS", n=200, ragged=True)
    policy = fit_rf(chains["calibration"], chains["validation"], ThresholdRule(threshold=0.8))
    expected = replay(policy, chains["test"])
    alone = cauc_ray.fit(tmp_path / "LOGITS", models=["m2"], threshold=0.5)
    models = {name: saved_model(name) for name in MODELS}
    cloud = pool_of(tmp_path, models)
    with (
        cauc_ray.serve(cloud, alone, port=0, name="large", local=True) as service,
        Link(port_of(service), delay_s=0.01) as link,
    ):
        edge = pool_of(tmp_path, {**models, "m2": remote(link.url)})
        summary = cauc_ray.run(edge, policy, split_input(tmp_path, chains["test"]), tmp_path / "out")
    answers = answers_of(tmp_path / "out")
    ids = [f"test-{example}" for example in chains["test"].example_ids]
    assert [answers[one]["prediction"] for one in ids] == expected.predictions.tolist()
    assert [answers[one]["stage"] for one in ids] == expected.stages.tolist()
    ledger = read_all(tmp_path / "out" / "ledger").to_pylist()
    for way in ("bytes_out", "bytes_in"):
        assert sum(call[way] for call in ledger if call["stage"] == "m2") == getattr(link, way)
        assert {call[way] for call in ledger if call["stage"] != "m2"} == {None}
        assert [stage[way] for stage in summary["stages"]] == [None, None, getattr(link, way)]


@pytest.mark.soak("full")
def test_a_collection_has_the_logits_of_the_cloud_and_costs_the_seconds_of_its_calls(tmp_path):
    data = tmp_path / "q.parquet"
    write_questions(data, 60)
    inputs = {name: {"datatype": "BYTES"} for name in ("question", "choices")}
    common = {"name": "longest", "resources": {"num_cpus": 0.5}}
    cloud = write_pool(tmp_path, [{**common, "model": python_model("longest"), "cost": {"usd": 0.5}}], inputs=inputs)
    cauc_ray.collect(cloud, data, tmp_path / "CLOUD", split="all")
    policy = cauc_ray.fit(tmp_path / "CLOUD", calibration_split="all", threshold=0.5)
    with cauc_ray.serve(cloud, policy, port=0, name="large", local=True) as service:
        stage = {**common, "model": remote(service.url), "cost": {"seconds": "auto"}}
        edge = write_pool(tmp_path, [stage], inputs=inputs)
        assert cauc_ray.collect(edge, data, tmp_path / "EDGE", split="all")["cost_unit"] == "s"
    rows = {
        name: read_all(tmp_path / name / "model=longest" / "split=all").sort_by("example_id")
        for name in ("CLOUD", "EDGE")
    }
    assert rows["EDGE"]["logits"] == rows["CLOUD"]["logits"]
    costs = rows["EDGE"]["cost"].to_numpy()
    assert (costs > 0).all()
    assert LogitTable(tmp_path / "EDGE").info.costs["longest"] == pytest.approx(costs.mean())
