"""A sentence or vision encoder of the pool in front of the models: collected, fitted on, served."""

from dataclasses import replace

import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from asking import infer, outputs_of
from synthetic import chain_of

import cauc_ray
from cauc_ray.errors import ConfigError, PolicyError
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.trace import Examples

TOPICS = ("refund of an invoice", "router does not connect", "parcel is lost", "password was forgotten")
SPLITS = {"calibration": 120, "validation": 120, "test": 80}


def written(folder, encoder, inputs):
    """Write a pool with an encoder and two saved models, each of which is right on half of the inputs' kinds.

    inputs: texts by split. Returns the pool's file and the table.
    """
    stages = [{"name": "enc", "model": encoder, "batch_size": 16}]
    for name in ("small", "large"):
        stages.append({"name": name, "model": {"kind": "saved", "logits": "LOGITS", "model": name, "split": "test"}})
    names = {"example_id": {"datatype": "BYTES"}, "text": {"datatype": "BYTES"}}
    content = {"name": "pool", "task": "classification", "stages": stages, "inputs": names}
    (folder / "pool.yaml").write_text(yaml.safe_dump(content))
    model = load_pool(folder / "pool.yaml").stage("enc").load()
    splits = {}
    for place, (split, values) in enumerate(inputs.items()):
        rng, first = np.random.default_rng(place), np.arange(len(values)) % 4 < 2
        labels = rng.integers(0, 4, len(values))
        answers = (np.where(right, labels, (labels + 1) % 4) for right in (first, ~first))
        logits = [(3 * np.eye(4)[answer] + rng.random((len(values), 4))).astype(np.float32) for answer in answers]
        chain = chain_of(labels, logits, [f"{place}-{row}" for row in range(len(values))], np.array([1.0, 10.0]))
        splits[split] = Examples(
            replace(chain, models=("small", "large")), model({"text": np.array(values, dtype=object)}).logits, None
        )
    return folder / "pool.yaml", planted.write_table(folder / "LOGITS", splits)


def sentences(minilm):
    return {"kind": "sentence-encoder", "model": str(minilm), "columns": ["text"], "required": ["text"]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory, minilm):
    """Return a pool with a sentence encoder, its table, and the texts by split."""
    rng = np.random.default_rng(0)
    rows = {split: [f"{TOPICS[row % 4]}, case {rng.integers(1000)}" for row in range(n)] for split, n in SPLITS.items()}
    return *written(tmp_path_factory.mktemp("texts"), sentences(minilm), rows), rows


@pytest.mark.soak("full")
@pytest.mark.parametrize("method", ["benchmark-routing", "frugalgpt", "routellm-sw"])
def test_a_sentence_encoder_routes_texts_in_a_service_as_in_the_replay(texts, method):
    pool, table, rows = texts
    policy = cauc_ray.fit(table, models=["small", "large"], method=method, embedding="enc")
    assert policy.models[0] == "enc"
    expected = cauc_ray.evaluate(table, policy)
    assert expected.measures.accuracy.value > 0.95
    places = {example: row for row, example in enumerate(expected.predictions.example_ids)}
    ids, names = [f"test-2-{row}" for row in range(SPLITS["test"])], ("prediction", "stage", "cost")
    with cauc_ray.serve(pool, policy, port=0, local=True) as service:
        status, content = infer(service.url, "pool", {"example_id": ids, "text": rows["test"]}, names)
        assert status == 200, content
        answers = outputs_of(content)
        for name in names:
            assert (answers[name] == getattr(expected.predictions, name)[[places[example] for example in ids]]).all()
        # A row that the encoder cannot read is refused alone.
        status, content = infer(service.url, "pool", {"example_id": ids[:1], "text": [""]})
        assert status == 422
        assert "it has no text in text" in content["error"]


def test_a_stage_of_the_wrong_kind_is_refused_before_the_start(texts):
    pool, table, _ = texts
    policy = cauc_ray.fit(table, method="benchmark-routing", embedding="enc")
    content = yaml.safe_load(pool.read_text())
    content["stages"][0]["model"] = content["stages"][1]["model"]
    other_pool = pool.with_name("other.yaml")
    other_pool.write_text(yaml.safe_dump(content))
    with pytest.raises(PolicyError, match="'enc' returns logits of kind raw; the policy was fitted on embedding"):
        cauc_ray.serve(other_pool, policy, port=0, local=True)


@pytest.mark.soak("full")
@pytest.mark.usefixtures("ray_session")
def test_embeddings_are_collected_by_the_pools_own_encoder(tmp_path, minilm):
    by_x = {"kind": "python", "factory": "user_models:by_x"}
    stages = [{"name": "enc", "model": sentences(minilm)}, {"name": "small", "model": by_x, "cost": {"usd": 1.0}}]
    content = {"name": "pool", "task": "classification", "stages": stages, "labels": ["no", "yes"]}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(content))
    ids = [f"row-{row}" for row in range(8)]
    rows = pa.table({"example_id": ids, "text": list(TOPICS) * 2, "x": [-1.0, 1.0] * 4, "label": [0, 1] * 4})
    pq.write_table(rows, tmp_path / "rows.parquet")
    asked = {"split": "all"}
    summary = cauc_ray.collect(tmp_path / "pool.yaml", tmp_path / "rows.parquet", tmp_path / "LOGITS", **asked)
    assert [model["name"] for model in summary["models"]] == ["small"]
    cauc_ray.collect(tmp_path / "pool.yaml", tmp_path / "rows.parquet", tmp_path / "LOGITS", embedding="enc", **asked)
    assert (tmp_path / "LOGITS" / "embedding=enc" / "split=all").is_dir()
    with pytest.raises(ConfigError, match="'enc' is an encoder: collect its embeddings with embedding=enc"):
        cauc_ray.collect(tmp_path / "pool.yaml", tmp_path / "rows.parquet", tmp_path / "OTHER", models=["enc"], **asked)
