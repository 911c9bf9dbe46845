"""A service reads its models' answers as a table's are read, and refuses probabilities that nobody declared."""

import numpy as np
import pytest
import yaml
from asking import infer, outputs_of
from masked import MODELS, softmax, splits
from synthetic import write_chains

import cauc_ray
from cauc_ray.data.logits import LogitTable


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Serve m0, whose probabilities, with masks, are declared, and m1, whose are not."""
    folder, chains = tmp_path_factory.mktemp("served"), splits(120)
    table = write_chains(
        folder / "LOGITS", chains, lambda z: np.where(np.isneginf(z), np.float32(-1e4), softmax(z)), logit_kind="raw"
    )
    kinds = {"m0": "probabilities", "m1": "probabilities"}
    policy = cauc_ray.fit(table, models=MODELS, method="rf", threshold=0.8, logit_kind=kinds)
    declared = {"m0": {"logit_kind": "probabilities"}, "m1": {}}
    stages = [
        {
            "name": name,
            "model": {"kind": "saved", "logits": "LOGITS", "model": name, "split": "test", **declared[name]},
            "resources": {"num_cpus": 0.5},
        }
        for name in MODELS
    ]
    content = {"name": "kinds", "task": "multiple-choice", "stages": stages}
    content["serving"] = {"router": {"resources": {"num_cpus": 0.5}}}
    (folder / "pool.yaml").write_text(yaml.safe_dump(content))
    # As if it had been fitted on raw logits of m1, which the pool declares.
    raw = policy.model_dump(mode="json")
    raw["logit_kind"], raw["stages"][1]["logit_kind"] = "mixed", "raw"
    policy = type(policy).of(raw)
    with cauc_ray.serve(folder / "pool.yaml", policy, port=0, local=True) as service:
        yield service, policy, LogitTable(table, kinds).read_chain(MODELS, "test")


def test_declared_probabilities_are_answered_as_in_the_replay_and_undeclared_ones_refused(served):
    service, policy, chain = served
    outputs = ("prediction", "confidence")
    status, content = infer(service.url, "kinds", {"example_id": chain.example_ids}, outputs, {"max_stage": 0})
    answers = outputs_of(content)
    expected = policy.start(chain.logits[0])
    assert status == 200
    assert np.array_equal(answers["prediction"], expected.predictions)
    assert np.array_equal(answers["confidence"].astype(np.float32), expected.confidences.astype(np.float32))
    ids = np.array(chain.example_ids)[~expected.accepted]
    for part in (ids[:1], ids[1:20]):
        status, content = infer(service.url, "kinds", {"example_id": part.tolist()})
        assert status == 503
    assert "'m1'" in content["error"]
    assert "logit_kind: probabilities" in content["error"]
