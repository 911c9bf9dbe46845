"""Fits and replays by shards are those of one process, in whatever order the files hold the rows."""

import json
import os
import re
import warnings
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import SPLITS, planted, write_table

import cauc_ray
from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.offline import evaluate_shards, fit_shards
from cauc_ray.api.options import EvaluateOptions, FitOptions
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.writing import logit_columns
from cauc_ray.errors import CaucWarning, ConfigError, DataError, ExecutionError, GuardError
from cauc_ray.execution.sharded import ShardActor, ShardedChain, cut_rows, facts_of
from cauc_ray.numbers.chain import digest_of_rows
from cauc_ray.policies.by_method import fit_policy
from cauc_ray.policies.threshold import ThresholdRule

MODELS = ("m0", "m1", "m2")
COSTS = (1.0, 4.0, 15.0)
TWO = {"shards": 2, "deadline_s": 120}
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


def assert_same(policy, other, rel=1e-9):
    """Assert that two policies' files have the same words, and numbers that agree."""
    found, expected = (dict(leaves(json.loads(of.to_json()))) for of in (policy, other))
    assert found.keys() == expected.keys()
    for place, value in expected.items():
        close = pytest.approx(value, rel=rel, abs=1e-12) if isinstance(value, float) else value
        assert found[place] == close, place


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
        assert_same(found, expected, rel=1e-6)
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
        assert_same(*fits, rel=1e-6)


def calibrate(table, **options):
    """Fit by shards; returns what that took, too."""
    return fit_shards(table, FitOptions.of({"shards": "auto", **options}))


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write_scattered(tmp_path_factory.mktemp("logits"), 5)


@pytest.mark.parametrize("shards", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4, 5))])
def test_shards_on_a_cluster_fit_and_answer_as_one_process(table, ray_session, shards):
    options = {"shards": shards, "resources": {"num_cpus": 0.25}, "deadline_s": 120}
    expected = cauc_ray.fit(table, models=MODELS, method="rf", budget=8.0)
    found = calibrate(table, models=MODELS, method="rf", budget=8.0, **options)
    assert len(found.shards.nodes) == shards
    assert_same(found.policy, expected)
    evaluation, _ = evaluate_shards(table, expected, EvaluateOptions.of(options))
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
    assert_same(found.policy, expected)


def test_the_command_on_one_shard_gives_what_it_gives_in_one_process(table, ray_session, tmp_path, command):
    expected = cauc_ray.fit(table, models=MODELS)
    sharded = ("--shards", 1, "--deadline-s", 120)
    assert command("fit", table, "--models", ",".join(MODELS), *sharded, "-o", "policy.json")[0] == 0
    assert_same(cauc_ray.Policy.load("policy.json"), expected)
    relative = os.path.relpath(table)  # to a folder that shards do not work in
    code, out, _ = command(
        "evaluate", relative, "--policy", "policy.json", *sharded, "--predictions", "answers.parquet", "--json"
    )
    said, alone = json.loads(out), cauc_ray.evaluate(table, expected).measures
    assert (code, said["accuracy"], said["cost"]) == (0, alone.accuracy.value, pytest.approx(alone.cost))
    assert pq.read_table("answers.parquet").num_rows == alone.n


# Of a fit on models too alike to be worth a cascade: what else is asked, and what the safe fit says; and of one whose
# logits are so many that they are fitted in float32.
ASKED = {
    "certified": ({"method": "rf", "certify": "risk<=0.2@0.9"}, {}, ""),
    "safe": ({"method": "rf", "safe": True}, {}, "not fused: no significant gain|another threshold chosen|no change"),
    "safe alone": ({"method": "base", "safe": True, "costs": (10.0, 11.0, 12.0)}, {}, f"^{MODELS[2]} alone, "),
    "float32": ({"models": MODELS[:2], "method": "base"}, {"n": 4500, "k": 900, "strengths": (2.5, 3.5)}, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ASKED)
def test_certificates_safe_fits_strictness_and_large_tables_are_those_of_one_process(ray_session, tmp_path, case):
    table, (asked, content, says) = tmp_path / "logits", ASKED[case]
    write_table(table, **{"n": 600, **content})
    asked = {"models": MODELS, **asked}
    expected = cauc_ray.fit(table, **asked)
    assert_same(calibrate(table, **asked, **TWO).policy, expected)
    if says:
        assert re.search(says, expected.safe.says)
    if says == "":
        fired = [guard.name for guard in expected.guards if guard.fired]
        with pytest.raises(GuardError, match=fired[0]):
            calibrate(table, **asked, strict=True, **TWO)


def rewritten(file, numbers, change):
    rows = pq.read_table(file).to_pylist()
    for number in numbers:
        change(rows[number])
    pq.write_table(pa.Table.from_pylist(rows, schema=pq.read_schema(file)), file)


def nothing_shared(file):
    for model, real in (("m1", -1), ("m2", 0)):

        def change(row, real=real):
            row.update(label=None, logits=[-np.inf] * len(row["logits"]))
            row["logits"][real] = 0.0

        rewritten(file.parents[2] / f"model={model}" / "split=calibration" / file.name, [19], change)


BREAKS = {
    "rows of other lengths": lambda file: None,
    "more options": lambda file: rewritten(file, [11, 31, 51], lambda row: row["logits"].append(-3.0)),
    "nan": lambda file: rewritten(file, [7], lambda row: row["logits"].__setitem__(0, float("nan"))),
    "gone": lambda file: rewritten(file, [13], lambda row: row.update(example_id="another")),
    "other label": lambda file: rewritten(file, [17], lambda row: row.update(label=(row["label"] + 1) % 2)),
    "nothing shared": nothing_shared,
}


@pytest.mark.parametrize(
    "name", ["more options", *(pytest.param(n, marks=pytest.mark.slow) for n in BREAKS if n != "more options")]
)
def test_shards_refuse_what_one_process_refuses_in_the_same_words(ray_session, tmp_path, name):
    write_table(tmp_path, n=60, ragged=True)
    options = {"calibrator": "offsets"} if name == "rows of other lengths" else {}  # which need as many in each
    BREAKS[name](tmp_path / "model=m1" / "split=calibration" / "part-0.parquet")
    messages = []
    for fit, sharding in ((cauc_ray.fit, {}), (calibrate, TWO)):
        with pytest.raises(DataError) as error:
            fit(tmp_path, models=MODELS, method="base", **options, **sharding)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


# Options of a fit by shards, and what is said of them.
REFUSED = {
    "too many": (
        {"shards": 4, "resources": {"num_cpus": 1000}},
        ExecutionError,
        "4 shards of 1,000 CPUs do not fit on",
    ),
    "nowhere": ({"resources": {"labels": {"tier": "nowhere"}}}, ExecutionError, "tier=nowhere do not fit"),
    "none": ({"shards": 0}, ConfigError, "shards: .*greater than or equal to 1, got 0"),
    "isotonic": ({"calibrator": "isotonic", "shards": 2}, ConfigError, "isotonic is for method base with one or two"),
    "safe and certified": (
        {"safe": True, "certify": "risk<=0.05@0.95", "shards": 2}, ConfigError, "--safe and --certify cannot be",
    ),
    "of shards alone": ({"shards": None, "deadline_s": 3.0}, ConfigError, "those of shards; give shards as well"),
    "unknown": ({"resources": {"num_gpu": 1}}, ConfigError, "unknown key 'num_gpu'; did you mean 'num_gpus'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_shards_that_do_not_fit_and_other_faults_are_refused(ray_session, table, case):
    options, kind, says = REFUSED[case]
    with pytest.raises(kind, match=says):
        cauc_ray.fit(table, models=MODELS, **{"shards": "auto", **options})


def test_parts_in_any_order_make_up_the_digest_of_the_whole():
    rng = np.random.default_rng(0)
    logits, ranks = rng.standard_normal((50, 7)).astype(np.float32), np.arange(50)
    whole, parts = digest_of_rows(logits, ranks), np.array_split(rng.permutation(50), 4)
    assert sum(digest_of_rows(logits[part], ranks[part]) for part in parts) % 2**64 == whole
    assert digest_of_rows(np.pad(logits, ((0, 0), (0, 2)), constant_values=-np.inf), ranks) == whole
    swapped, nudged = logits.copy(), logits.copy()
    swapped[[3, 4]] = logits[[4, 3]]
    nudged[9, 2] = np.nextafter(nudged[9, 2], np.float32(9))
    others = (swapped, nudged, np.pad(logits, ((0, 0), (0, 1))), logits[:, ::-1])
    assert len({whole, *(digest_of_rows(other, ranks) for other in others)}) == 5
