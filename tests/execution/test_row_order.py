"""Fits and replays by shards are those of one process, in whatever order the files hold the rows."""

import json
import warnings
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import SPLITS, planted

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.writing import logit_columns
from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.execution.sharded import ShardActor, ShardedChain, cut_rows, facts_of
from cauc_ray.front.evaluated import Evaluation
from cauc_ray.front.sharding import calibrate, evaluate_shards
from cauc_ray.policies.fitting import fit_policy
from cauc_ray.policies.threshold import ThresholdRule
from jobs.job import main
from jobs.schemas import job_named

MODELS = ("m0", "m1", "m2")
COSTS = (1.0, 4.0, 15.0)
SAME = {"rel": 1e-6, "abs": 1e-9}
FITS = (
    (MODELS, "base", ThresholdRule(), "temperature"),
    (MODELS, "base", ThresholdRule(budget=9.0, objective="macro-f1"), "offsets"),
    (MODELS[:2], "base", ThresholdRule(), "isotonic"),
    (MODELS, "rf", ThresholdRule(), "temperature"),
    (MODELS, "rf", ThresholdRule(budget=8.0), "offsets"),
)


def write_scattered(folder, seed, *, n=150, ragged=False, per_call=False):
    """Write a table with ids like those of `collect`, each model's rows in an order, files and row groups of its own.

    As text `vec-10` comes before `vec-2`: not even a file in the dataset's own order is in order of the ids.
    """
    rng = np.random.default_rng(seed)
    for split in SPLITS:
        size = n + int(rng.integers(20))
        labels, logits = planted(rng, size, 4, (1.0, 1.7, 2.4), ragged=ragged)
        for model, cost, own in zip(MODELS, COSTS, logits, strict=True):
            order = rng.permutation(size) if rng.random() < 0.8 else np.arange(size)
            costs = cost * rng.uniform(0.8, 1.2, size) if per_call else None
            rows = [own[row][np.isfinite(own[row])] for row in order]
            table = logit_columns([f"vec-{row}" for row in order], labels[order], rows, costs)
            into = folder / f"model={model}" / f"split={split}"
            into.mkdir(parents=True)
            for number, places in enumerate(np.array_split(np.arange(size), rng.integers(1, 4))):
                part = table.slice(int(places[0]), len(places))
                pq.write_table(part, into / f"{number}.parquet", row_group_size=int(rng.integers(5, 90)))
    models = [{"name": model, "cost": cost} for model, cost in zip(MODELS, COSTS, strict=True)]
    (folder / "pool.json").write_text(json.dumps({"cost_unit": "GFLOPs", "logit_kind": "raw", "models": models}))
    return folder


def leaves(value, place=""):
    """Yield every number and word of a JSON document with its place."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{place}.{key}")
    else:
        yield place, value


def assert_same(found, expected):
    """Assert that two JSON documents have the same words, and numbers that agree."""
    found, expected = dict(leaves(found)), dict(leaves(expected))
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        assert found[place] == (pytest.approx(value, **SAME) if isinstance(value, float) else value), place


def content_of(policy):
    return json.loads(policy.to_json())


class LocalShards:
    """Shards that actors of this process hold; an actor may have several."""

    def __init__(self, heads, n_shards, n_actors):
        """Cut a chain into shards, and share these among at most so many actors."""
        pool = [ShardActor() for _ in range(n_actors)]
        self._held = [(pool[shard % n_actors], rows) for shard, rows in enumerate(cut_rows(heads, n_shards))]

    def ask(self, number, question):
        return [actor.ask((number, shard), rows, question)[0] for shard, (actor, rows) in enumerate(self._held)]


def local_chain(heads, n_shards, n_actors):
    """Return a chain in shards that actors of this process hold."""
    shards, models = LocalShards(heads, n_shards, n_actors), heads.known["models"]
    width = max(facts.width for facts in shards.ask(0, partial(facts_of, models)))
    return ShardedChain(**heads.known, shards=shards, number=0, width=width, places=tuple(range(len(models))))


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_any_cut_of_rows_in_any_order_is_the_whole_table(tmp_path_factory, examples):
    @settings(max_examples=examples)
    @given(
        seed=st.integers(0, 2**32 - 1),
        ragged=st.booleans(),
        per_call=st.booleans(),
        fit=st.sampled_from(FITS),
        n_shards=st.integers(1, 9),
        n_actors=st.integers(1, 9),
    )
    def check(seed, ragged, per_call, fit, n_shards, n_actors):
        models, method, rule, calibrator = fit
        fixed = calibrator == "offsets"
        folder = tmp_path_factory.mktemp("logits")
        table = LogitTable(write_scattered(folder, seed, ragged=ragged and not fixed, per_call=per_call))
        whole = [table.read_chain(models, split) for split in SPLITS]
        cut = [local_chain(table.read_chain_heads(models, split), n_shards, n_actors) for split in SPLITS]
        expected, found = (
            fit_policy(method, *chains[:2], rule, SPLITS[:2], calibrator=calibrator) for chains in (whole, cut)
        )
        assert_same(content_of(found), content_of(expected))
        assert Evaluation.of(expected, cut[2]).to_arrow().equals(Evaluation.of(expected, whole[2]).to_arrow())

    check()


def test_files_may_take_turns_in_the_order_of_ids(tmp_path):
    """A shard then has none of the rows that a large fit takes as a sample, or all of them."""
    n, turns = 9 * 512, 9
    labels, logits = planted(np.random.default_rng(0), n, 4, (1.0, 1.7))
    for model, own in zip(MODELS, logits, strict=False):
        into = tmp_path / f"model={model}" / "split=calibration"
        into.mkdir(parents=True)
        for turn in range(turns):
            rows = range(turn, n, turns)
            table = logit_columns([f"{row:05d}" for row in rows], labels[rows], list(own[rows]), None)
            pq.write_table(table, into / f"{turn}.parquet")
    read = (MODELS[:2], "calibration")
    table, costs = LogitTable(tmp_path), {"costs": COSTS[:2]}
    whole, cut = table.read_chain(*read, **costs), local_chain(table.read_chain_heads(*read, **costs), turns, turns)
    for method in ("base", "rf"):
        fits = [fit_policy(method, chain, chain, ThresholdRule(), SPLITS[:2]) for chain in (cut, whole)]
        assert_same(*map(content_of, fits))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_scattered(tmp_path_factory.mktemp("logits"), 5)


@pytest.mark.parametrize("shards", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 5))])
def test_shards_on_a_cluster_fit_and_answer_as_one_process(table, ray_session, shards):
    options = {"shards": shards, "resources": {"num_cpus": 0.25}, "deadline_s": 120}
    expected = cauc_ray.fit(table, models=MODELS, method="rf", budget=8.0)
    found = calibrate(table, models=MODELS, method="rf", budget=8.0, **options)
    assert len(found.shards.nodes) == shards
    assert_same(content_of(found.policy), content_of(expected))
    evaluation, _ = evaluate_shards(table, expected, **options)
    alone = cauc_ray.evaluate(table, expected)
    assert evaluation.measures == alone.measures
    assert evaluation.to_arrow().equals(alone.to_arrow())


def test_a_split_of_fewer_rows_than_shards_were_asked_for_is_in_order(ray_session, tmp_path):
    """As many shards as the smallest split has rows hold all splits: one, where that has one row."""
    table = write_scattered(tmp_path / "logits", 11)
    for model in MODELS:
        folder = table / f"model={model}" / "split=validation"
        rows = pa.concat_tables([pq.read_table(file) for file in sorted(folder.iterdir())])
        for file in folder.iterdir():
            file.unlink()
        chosen = rows.filter(pa.compute.equal(rows["example_id"], "vec-7"))
        pq.write_table(chosen, folder / "0.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)
        expected = cauc_ray.fit(table, models=MODELS)
        found = calibrate(table, models=MODELS, shards=4, resources={"num_cpus": 0.25}, deadline_s=120)
    assert len(found.shards.nodes) == 1
    assert_same(content_of(found.policy), content_of(expected))


def test_of_several_bad_examples_shards_name_the_one_that_one_process_names(ray_session, tmp_path):
    table = write_scattered(tmp_path, 3)
    for file in (table / "model=m1" / "split=calibration").iterdir():
        rows = pq.read_table(file)
        for row in (bad := rows.to_pylist()):
            row["logits"] += [-1.0] * row["example_id"].endswith("7")
        pq.write_table(pa.Table.from_pylist(bad, schema=rows.schema), file)
    told = []
    for fit, sharding in ((cauc_ray.fit, {}), (calibrate, {"shards": 2, "deadline_s": 120})):
        with pytest.raises(DataError, match="has 4 options for model 'm0' and 5 for model 'm1'") as error:
            fit(table, models=MODELS, **sharding)
        told.append(str(error.value))
    assert told[0] == told[1]


def test_the_jobs_on_one_shard_give_what_the_commands_give(table, ray_session, tmp_path, capsys):
    expected = cauc_ray.fit(table, models=MODELS)
    shared = {"logits": str(table), "shards": 1, "deadline_s": 120}
    configs = {
        "calibrate": {**shared, "models": list(MODELS)},
        "evaluate": {**shared, "policy": str(tmp_path / "calibrate" / "policy.json")},
    }
    for name, config in configs.items():
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"output": str(tmp_path / name), **config}))
        assert main(job_named(name), ["--config", str(path)]) == 0, capsys.readouterr().err
    policy = cauc_ray.Policy.load(tmp_path / "calibrate" / "policy.json")
    assert_same(content_of(policy), content_of(expected))
    said = json.loads((tmp_path / "evaluate" / "result.json").read_text())["results"]
    alone = cauc_ray.evaluate(table, expected).measures
    assert (said["accuracy"], said["cost"]) == (alone.accuracy.value, pytest.approx(alone.cost))
    assert pq.read_table(tmp_path / "evaluate" / "predictions.parquet").num_rows == alone.n
