"""A sentence encoder of the pool in front of the models: collected, fitted on, served."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import infer, outputs_of
from runs import write_pool

import cauc_ray
from cauc_ray.errors import ConfigError

TOPICS = ("refund of an invoice", "router does not connect", "parcel is lost", "password was forgotten")


@pytest.mark.soak("full")
@pytest.mark.usefixtures("ray_session")
def test_embeddings_of_the_pools_encoder_are_collected_and_route_texts_in_a_service_as_in_the_replay(tmp_path, minilm):
    """Each of the two models is right on half of the topics."""
    encoder = {"kind": "sentence-encoder", "model": str(minilm), "columns": ["text"], "required": ["text"]}
    stages = [{"name": "enc", "model": encoder, "batch_size": 16}]
    for name, factor in (("small", 1.0), ("large", -1.0)):
        model = {"kind": "python", "factory": "user_models:by_x", "kwargs": {"factor": factor}}
        stages.append({"name": name, "model": model, "cost": {"usd": abs(factor - 2)}})
    pool = write_pool(tmp_path, stages, "classification", labels=["no", "yes"])
    rng, topics = np.random.default_rng(0), np.arange(400) % 4
    labels, ids = rng.integers(0, 2, 400), [f"row-{row}" for row in range(400)]
    texts = [f"{TOPICS[topic]}, case {rng.integers(1000)}" for topic in topics]
    x = np.where((labels == 0) == (topics < 2), 1.0, -1.0)
    dataset, table = tmp_path / "rows.parquet", tmp_path / "LOGITS"
    pq.write_table(pa.table({"example_id": ids, "text": texts, "x": x, "label": labels}), dataset)
    summary = cauc_ray.collect(pool, dataset, table)
    assert [model["name"] for model in summary["models"]] == ["small", "large"]
    cauc_ray.collect(pool, dataset, table, embedding="enc")
    with pytest.raises(ConfigError, match="'enc' is an encoder: collect its embeddings with embedding=enc"):
        cauc_ray.collect(pool, dataset, tmp_path / "OTHER", models=["enc"])

    policy = cauc_ray.fit(table, models=["small", "large"], method="benchmark-routing", embedding="enc")
    expected = cauc_ray.evaluate(table, policy)
    assert expected.measures.accuracy.value > 0.95
    rows = [ids.index(example) for example in expected.predictions.example_ids[:40]]
    names = ("prediction", "stage", "cost")
    with cauc_ray.serve(pool, policy, port=0, local=True) as service:
        asked = {"text": [texts[row] for row in rows], "x": x[rows].tolist()}
        status, content = infer(service.url, "test", asked, names)
        assert status == 200, content
        answers = outputs_of(content)
        for name in names:
            assert (answers[name] == getattr(expected.predictions, name)[:40]).all()
        # A row that the encoder cannot read is refused alone.
        status, content = infer(service.url, "test", {"text": [""], "x": [1.0]})
        assert status == 422
        assert "it has no text in text" in content["error"]
