"""Fits and replays by shards are those of one process, in whatever order the files hold the rows."""

import json
import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import masked
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import MODELS
from synthetic import SPLITS, planted, write_chains, write_table

import cauc_ray
from cauc_ray.data.writing import logit_columns
from cauc_ray.errors import ConfigError, DataError, ExecutionError, GuardError
from cauc_ray.execution import session, sharded
from cauc_ray.execution.sharded import ShardActor, Shards, ShardsWatched, cut_rows

COSTS = (1.0, 4.0, 15.0)
FITS = (
    {"method": "base"},
    {"method": "base", "budget": 9.0, "objective": "macro-f1", "calibrator": "offsets"},
    {"models": MODELS[:2], "method": "base", "calibrator": "isotonic"},
    {"method": "rf"},
    {"method": "rf", "budget": 8.0, "calibrator": "offsets"},
)


def write_scattered(folder, seed, *, n=150, n_validation=None, ragged=False, per_call=False):
    """Write a table with ids like those of `collect`, each model's rows in an order, files and row groups of its own.

    As text `vec-10` comes before `vec-2`: not even a file in the dataset's own order is in order of the ids.
    """
    rng = np.random.default_rng(seed)
    for split in SPLITS:
        size = n_validation if n_validation and split == "validation" else n + int(rng.integers(20))
        labels, logits = planted(rng, size, 4, (1.0, 1.7, 2.4), ragged=ragged)
        for model, cost, model_logits in zip(MODELS, COSTS, logits, strict=True):
            order = rng.permutation(size) if rng.random() < 0.8 else np.arange(size)
            costs = cost * rng.uniform(0.8, 1.2, size) if per_call else None
            rows = [model_logits[row][np.isfinite(model_logits[row])] for row in order]
            table = logit_columns([f"vec-{row}" for row in order], labels[order], rows, costs)
            into = folder / f"model={model}" / f"split={split}"
            into.mkdir(parents=True)
            for number, places in enumerate(np.array_split(np.arange(size), min(size, rng.integers(1, 4)))):
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


def assert_same(policy, reference, rel=1e-9):
    """Assert that two policies' files have the same words, and numbers that agree."""
    values, expected = (dict(leaves(json.loads(document.to_json()))) for document in (policy, reference))
    assert values.keys() == expected.keys()
    for place, value in expected.items():
        close = pytest.approx(value, rel=rel, abs=1e-12) if isinstance(value, float) else value
        assert values[place] == close, place


class LocalShards(Shards):
    """Shards that actors of this process hold; an actor may have several."""

    def __init__(self, chains, n_shards, n_actors):
        self.watched, actors = ShardsWatched(), [ShardActor() for _ in range(n_actors)]
        self._parts = [
            [(actors[shard % n_actors], rows) for shard, rows in enumerate(cut_rows(chain, n_shards))]
            for chain in chains
        ]

    def ask(self, number, question):
        return [
            actor.ask((number, shard), rows, question)[0] for shard, (actor, rows) in enumerate(self._parts[number])
        ]


@pytest.fixture
def in_process(monkeypatch):
    """Have shards held in this process instead of on Ray. Returns the number of actors, which may be changed."""
    actors = SimpleNamespace(n=2)

    @contextmanager
    def local(chains, sharding):
        shards = LocalShards(chains, sharding.n_shards, actors.n)
        yield shards, [shards.open(number, heads) for number, heads in enumerate(chains)]

    monkeypatch.setattr(sharded, "sharded", local)
    monkeypatch.setattr(session, "ray_session", lambda address, n_cpus: nullcontext())
    monkeypatch.setattr(sharded.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    return actors


@pytest.mark.parametrize("examples", [8, pytest.param(100, marks=pytest.mark.soak("full"))])
def test_any_cut_of_rows_in_any_order_is_the_whole_table(tmp_path_factory, in_process, examples):
    @settings(max_examples=examples, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        seed=st.integers(0, 2**32 - 1),
        ragged=st.booleans(),
        per_call=st.booleans(),
        fit=st.sampled_from(FITS),
        n_shards=st.integers(1, 9),
        n_actors=st.integers(1, 9),
    )
    def check(seed, ragged, per_call, fit, n_shards, n_actors):
        in_process.n = n_actors
        ragged = ragged and fit.get("calibrator") != "offsets"  # which needs as many options in each row
        table = write_scattered(tmp_path_factory.mktemp("logits"), seed, ragged=ragged, per_call=per_call)
        expected, policy = (cauc_ray.fit(table, **{"models": MODELS, **fit}, shards=n) for n in (None, n_shards))
        assert_same(policy, expected, rel=1e-6)
        whole, cut = (cauc_ray.evaluate(table, expected, shards=n) for n in (None, n_shards))
        assert cut.to_arrow().equals(whole.to_arrow())
        assert cut.measures == whole.measures

    check()


# Fits of models too alike to be worth a cascade, and one of so many logits that it is done in float32.
SPECIAL_FITS = {
    "certified": ({"method": "rf", "certify": "risk<=0.2@0.9"}, {}),
    "safe": ({"method": "rf", "safe": True}, {}),
    "safe alone": ({"method": "base", "safe": True, "costs": (10.0, 11.0, 12.0)}, {}),
    "float32": ({"models": MODELS[:2], "method": "base"}, {"n": 4500, "k": 900, "strengths": (2.5, 3.5)}),
}


@pytest.mark.parametrize("case", [*list(SPECIAL_FITS)[:3], pytest.param("float32", marks=pytest.mark.slow)])
def test_certificates_safe_fits_strictness_and_large_tables_are_those_of_one_process(tmp_path, in_process, case):
    options, content = SPECIAL_FITS[case]
    write_table(tmp_path, **{"n": 600, **content})
    options = {"models": MODELS, **options}
    expected = cauc_ray.fit(tmp_path, **options)
    assert_same(cauc_ray.fit(tmp_path, **options, shards=2), expected)
    assert len(expected.stages) == (1 if case == "safe alone" else len(options["models"]))
    if fired := [guard.name for guard in expected.guards if guard.fired]:
        with pytest.raises(GuardError, match=fired[0]):
            cauc_ray.fit(tmp_path, **options, shards=2, strict=True)


def rewritten(file, numbers, change):
    rows = pq.read_table(file).to_pylist()
    for number in numbers:
        change(rows[number])
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)


BREAKS = {
    "rows of other lengths": lambda file: None,  # for offsets, which need as many options in each row
    "more options": lambda file: rewritten(file, [11, 31, 51], lambda row: row["logits"].append(-3.0)),
    "nan": lambda file: rewritten(file, [7], lambda row: row["logits"].__setitem__(0, float("nan"))),
}


def refusal(table, shards, **options):
    """Return how a fit refuses a table."""
    with pytest.raises(DataError) as error:
        cauc_ray.fit(table, models=MODELS, method="base", shards=shards, **options)
    return str(error.value)


@pytest.mark.parametrize("name", BREAKS)
def test_shards_refuse_what_one_process_refuses_in_the_same_words(tmp_path, in_process, name):
    write_table(tmp_path, n=60, ragged=True)
    options = {"calibrator": "offsets"} if name == "rows of other lengths" else {}
    BREAKS[name](tmp_path / "model=m1" / "split=calibration" / "part-0.parquet")
    assert refusal(tmp_path, 2, **options) == refusal(tmp_path, None, **options)


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")
def test_shards_read_masks_and_kinds_as_one_process_does(tmp_path, in_process):
    """Probabilities, with masks for missing options and a 0 for the least probable one of every fifth row."""

    def as_probabilities(logits):
        p = masked.softmax(logits)
        p[np.arange(0, len(p), 5), np.where(p > 0, p, 2)[::5].argmin(axis=1)] = 0.0
        return np.where(np.isneginf(logits), np.float32(-1e9), p)

    write_chains(tmp_path, masked.splits(), as_probabilities)
    with pytest.raises(DataError, match=r"'m0'.*--logit-kind probabilities"):
        cauc_ray.fit(tmp_path, models=masked.MODELS, shards=2)
    options = {"models": masked.MODELS, "method": "rf", "budget": 3.0, "logit_kind": "probabilities"}
    expected, policy = (cauc_ray.fit(tmp_path, **options, shards=n) for n in (None, 2))
    assert_same(policy, expected)
    for stage, expected_stage in zip(policy.stages, expected.stages, strict=True):
        assert stage.diagnostics.logits_fingerprint == expected_stage.diagnostics.logits_fingerprint
        assert stage.logit_kind == "probabilities"
        assert stage.floor == expected_stage.floor is not None
    evaluation = cauc_ray.evaluate(tmp_path, policy, shards=2)
    assert evaluation.to_arrow().equals(cauc_ray.evaluate(tmp_path, policy).to_arrow())


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_scattered(tmp_path_factory.mktemp("logits"), 5)


@pytest.mark.slow
def test_shards_on_a_cluster_fit_and_answer_as_one_process(table, ray_session, command):
    expected = cauc_ray.fit(table, models=MODELS, method="rf", budget=8.0)
    options = ("--models", ",".join(MODELS), "--method", "rf", "--budget", 8.0, "--shards", 3)
    assert command("fit", table, *options, "-o", "policy.json")[0] == 0
    assert_same(cauc_ray.Policy.load("policy.json"), expected)
    relative = os.path.relpath(table)  # to a folder that shards do not work in
    options = ("--policy", "policy.json", "--shards", 2, "--predictions", "answers.parquet", "--json")
    code, out, _ = command("evaluate", relative, *options)
    report, evaluation = json.loads(out), cauc_ray.evaluate(table, expected)
    measures = evaluation.measures
    assert (code, report["accuracy"], report["cost"]) == (0, measures.accuracy.value, pytest.approx(measures.cost))
    answers = pq.read_table("answers.parquet")
    assert answers["prediction"].equals(evaluation.to_arrow()["prediction"])


@pytest.mark.slow
def test_shards_on_a_cluster_refuse_bad_rows_and_resources_that_nobody_has(ray_session, tmp_path):
    write_table(tmp_path, n=60)
    for options, words in (
        ({"shards": 4, "resources": {"num_cpus": 1000}}, "4 shards of 1,000 CPUs do not fit on"),
        ({"shards": "auto", "resources": {"labels": {"tier": "nowhere"}}}, "tier=nowhere do not fit"),
    ):
        with pytest.raises(ExecutionError, match=words):
            cauc_ray.fit(tmp_path, models=MODELS, **options)
    BREAKS["nan"](tmp_path / "model=m1" / "split=calibration" / "part-0.parquet")
    assert refusal(tmp_path, 2) == refusal(tmp_path, None)


def test_options_of_shards_need_shards(table):
    with pytest.raises(ConfigError, match="shards"):
        cauc_ray.fit(table, models=MODELS, deadline_s=3.0)
