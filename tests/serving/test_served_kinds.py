"""A service reads its models' answers as a table's are read, and refuses probabilities that nobody declared."""

import numpy as np
from asking import answered, infer, outputs_of
from masked import MODELS, softmax, splits
from runs import pool_of, saved_model
from synthetic import write_chains

import cauc_ray
from cauc_ray.data.logits import LogitTable


def test_declared_probabilities_are_answered_as_in_the_replay_and_undeclared_ones_refused(tmp_path):
    """The models are m0, whose probabilities, with masks, are declared, and m1, whose are not."""
    chains = splits(120)
    table = write_chains(
        tmp_path / "LOGITS", chains, lambda z: np.where(np.isneginf(z), np.float32(-1e4), softmax(z)), logit_kind="raw"
    )
    kinds = {"m0": "probabilities", "m1": "probabilities"}
    policy = cauc_ray.fit(table, models=MODELS, method="rf", threshold=0.8, logit_kind=kinds)
    models = {"m0": saved_model("m0", logit_kind="probabilities"), "m1": saved_model("m1")}
    # As if it had been fitted on raw logits of m1, which the pool declares.
    raw = policy.model_dump(mode="json")
    raw["logit_kind"], raw["stages"][1]["logit_kind"] = "mixed", "raw"
    policy = type(policy).of(raw)
    with cauc_ray.serve(pool_of(tmp_path, models), policy, port=0, local=True) as service:
        chain = LogitTable(table, kinds).read_chain(MODELS, "test")
        outputs = ("prediction", "confidence")
        content = answered(service.url, "test", {"example_id": chain.example_ids}, outputs, {"max_stage": 0})
        answers = outputs_of(content)
        expected = policy.start(chain.logits[0])
        assert np.array_equal(answers["prediction"], expected.predictions)
        assert np.array_equal(answers["confidence"].astype(np.float32), expected.confidences.astype(np.float32))
        ids = np.array(chain.example_ids)[~expected.accepted]
        for part in (ids[:1], ids[1:20]):
            status, content = infer(service.url, "test", {"example_id": part.tolist()})
            assert status == 503
        assert "'m1'" in content["error"]
        assert "logit_kind: probabilities" in content["error"]
