"""Fits and replays by shards are those of one process, wherever the shards stand and whatever becomes of them."""

import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from synthetic import SPLITS, write_table

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import CaucWarning, ConfigError, DataError, ExecutionError, GuardError
from cauc_ray.execution.sharded import Sharding, sharded
from cauc_ray.front.sharding import calibrate, evaluate_shards
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.chain import ChainLogits, digest_of_rows
from cauc_ray.policies.fitting import fit_policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay

MODELS = ("m0", "m1", "m2")
TWO = {"shards": 2, "deadline_s": 120}
SHAPES = ["per-call", "plain", "ragged"]
FITS = {
    "base": {"method": "base"},
    "base-f1": {"method": "base", "budget": 9.0, "objective": "macro-f1"},
    "rf": {"method": "rf"},
    "rf-budget": {"method": "rf", "budget": 8.0},
    "rf-threshold": {"method": "rf", "threshold": 0.7},
}


def scattered(folder, seed=0):
    """Write every model's rows of every split anew, in an order and in files and row groups of its own."""
    rng = np.random.default_rng(seed)
    for model in MODELS:
        for split in SPLITS:
            (file,) = (folder / f"model={model}" / f"split={split}").glob("*.parquet")
            table = pq.read_table(file)
            table = table.take(pa.array(rng.permutation(len(table))))
            file.unlink()
            for number, places in enumerate(np.array_split(np.arange(len(table)), rng.integers(1, 5))):
                part = table.slice(int(places[0]), len(places))
                pq.write_table(part, file.parent / f"{number}.parquet", row_group_size=int(rng.integers(5, 90)))


@pytest.fixture(scope="module", params=SHAPES)
def table(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    write_table(folder, n=600, ragged=request.param == "ragged", per_call=request.param == "per-call")
    if request.param != "plain":
        scattered(folder)
    return folder


def numbers_of(value, place=""):
    """Yield all that a policy's file holds, by its place."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from numbers_of(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from numbers_of(inner, f"{place}[{number}]")
    else:
        yield place, value


def assert_same(policy, expected):
    """Assert that two policies are the same but for 1e-9 of each number."""
    one, other = dict(numbers_of(policy.model_dump())), dict(numbers_of(expected.model_dump()))
    assert one.keys() == other.keys()
    for place, value in one.items():
        assert value == (pytest.approx(other[place], rel=1e-9) if isinstance(value, float) else other[place]), place


@pytest.fixture(scope="module")
def chains(table, ray_session):
    """Return all splits of a table, each on twelve shards."""
    heads = [LogitTable(table).read_chain_heads(MODELS, split) for split in SPLITS]
    with sharded(heads, Sharding(12, Resources(num_cpus=0.25), deadline_s=120)) as (_, held):
        yield dict(zip(SPLITS, held, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", FITS.values(), ids=FITS)
def test_a_fit_on_twelve_shards_is_that_of_one_process(table, chains, options):
    expected = cauc_ray.fit(table, models=MODELS, **options)
    method, rule = options["method"], {name: value for name, value in options.items() if name != "method"}
    splits = chains["calibration"], chains["validation"]
    assert_same(fit_policy(method, *splits, ThresholdRule(**rule), ("calibration", "validation")), expected)


@pytest.mark.slow
def test_a_replay_on_shards_is_that_of_one_process_row_for_row(table, chains):
    policy = cauc_ray.fit(table, models=MODELS, method="rf", budget=8.0)
    expected = cauc_ray.evaluate(table, policy)
    found, measures = measure_replay(policy, chains["test"])
    assert measures == expected.measures
    for name in ("predictions", "confidences", "stages", "costs"):
        assert np.array_equal(getattr(found, name), getattr(expected.replay, name))


def test_a_table_is_calibrated_and_evaluated_by_its_path(ray_session, tmp_path):
    table = tmp_path / "logits"
    write_table(table, n=600)
    expected = cauc_ray.fit(table, models=MODELS, method="base")
    found = calibrate(table, models=MODELS, method="base", **TWO)
    assert_same(found.policy, expected)
    assert found.n_rows == (600, 600)
    assert len(found.shards.peak_bytes) == len(found.shards.nodes) == 2
    evaluation, _ = evaluate_shards(table, found.policy, **TWO)
    assert evaluation.to_arrow().equals(cauc_ray.evaluate(table, found.policy).to_arrow())


@pytest.mark.slow
def test_certificates_and_strictness_are_those_of_one_process(ray_session, tmp_path):
    table = tmp_path / "logits"
    write_table(table, n=600)
    asked = {"models": MODELS, "method": "rf", "certify": "risk<=0.2@0.9"}
    expected = cauc_ray.fit(table, **asked)
    assert_same(calibrate(table, **asked, **TWO).policy, expected)
    fired = [guard.name for guard in expected.guards if guard.fired]
    assert fired  # these models are too alike to be worth a cascade
    with pytest.raises(GuardError, match=fired[0]):
        calibrate(table, **asked, strict=True, **TWO)


@pytest.mark.slow
def test_large_float32_logits_are_fitted_in_float32_in_shards_too(ray_session, tmp_path):
    write_table(tmp_path, n=4500, k=900, strengths=(2.5, 3.5))
    options = {"models": ("m0", "m1"), "method": "base"}
    expected = cauc_ray.fit(tmp_path, **options)
    assert_same(calibrate(tmp_path, **options, **TWO).policy, expected)


@pytest.mark.slow
def test_shards_refuse_what_one_process_refuses_in_the_same_words(ray_session, tmp_path):
    def refusals(break_it):
        folder = tmp_path / break_it.__name__
        folder.mkdir()
        write_table(folder, n=60, ragged=True)
        break_it(folder / "model=m1" / "split=calibration" / "part-0.parquet")
        told = []
        for fit in (cauc_ray.fit, lambda *a, **o: calibrate(*a, **o, **TWO)):
            with pytest.raises(DataError) as error:
                fit(folder, models=MODELS, method="base")
            told.append(str(error.value))
        return told

    def rewritten(file, row, change):
        rows = pq.read_table(file).to_pylist()
        change(rows[row])
        schema = pq.read_schema(file)
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), file)

    def nan(file):
        rewritten(file, 7, lambda row: row["logits"].__setitem__(0, float("nan")))

    def more_options(file):
        rewritten(file, 11, lambda row: row["logits"].append(-3.0))

    def gone(file):
        rewritten(file, 13, lambda row: row.update(example_id="another"))

    def other_label(file):
        rewritten(file, 17, lambda row: row.update(label=(row["label"] + 1) % 2))

    def nothing_shared(file):
        rewritten(file, 19, lambda row: row.update(label=None))
        rewritten(file, 19, lambda row: row.update(logits=[-np.inf] * (len(row["logits"]) - 1) + [0.0]))
        other = file.parents[2] / "model=m2" / "split=calibration" / "part-0.parquet"
        rewritten(other, 19, lambda row: row.update(label=None))
        rewritten(other, 19, lambda row: row.update(logits=[0.0] + [-np.inf] * (len(row["logits"]) - 1)))

    for break_it in (nan, more_options, gone, other_label, nothing_shared):
        local, by_shards = refusals(break_it)
        assert by_shards == local


def test_shards_that_do_not_fit_are_refused(ray_session, tmp_path):
    table = tmp_path / "logits"
    write_table(table, n=60)
    with pytest.raises(ExecutionError, match=r"4 shards of 1000 CPUs and 0 GPUs do not fit on the cluster, 0 do"):
        calibrate(table, models=MODELS, shards=4, resources={"num_cpus": 1000})
    with pytest.raises(ExecutionError, match="tier=nowhere do not fit"):
        calibrate(table, models=MODELS, resources={"labels": {"tier": "nowhere"}})
    with pytest.raises(ConfigError, match="1 shard or more, got 0"):
        calibrate(table, models=MODELS, shards=0)
    with pytest.raises(ConfigError, match="resources: unknown key 'num_gpu'"):
        calibrate(table, models=MODELS, resources={"num_gpu": 1})


@pytest.mark.slow
def test_more_shards_than_rows_are_as_many_as_rows(ray_session, tmp_path):
    write_table(tmp_path, n=5, k=2, strengths=(1.0, 1.1))
    options = {"models": ("m0", "m1"), "threshold": 0.9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)  # five rows may be separable
        found = calibrate(tmp_path, **options, shards=12, resources={"num_cpus": 0.25})
        assert len(found.shards.peak_bytes) == 5
        assert_same(found.policy, cauc_ray.fit(tmp_path, **options))


def test_parts_in_any_order_make_up_the_digest_of_the_whole():
    rng = np.random.default_rng(0)
    logits, ranks = rng.standard_normal((50, 7)).astype(np.float32), np.arange(50)
    whole = digest_of_rows(logits, ranks)
    parts = np.array_split(rng.permutation(50), 4)
    assert sum(digest_of_rows(logits[part], ranks[part]) for part in parts) % 2**64 == whole
    padded = np.pad(logits, ((0, 0), (0, 2)), constant_values=-np.inf)
    assert digest_of_rows(padded, ranks) == whole
    swapped = logits.copy()
    swapped[[3, 4]] = logits[[4, 3]]
    nudged = logits.copy()
    nudged[9, 2] = np.nextafter(nudged[9, 2], np.float32(9))
    zero = np.pad(logits, ((0, 0), (0, 1)))
    assert len({whole, *(digest_of_rows(other, ranks) for other in (swapped, nudged, zero, logits[:, ::-1]))}) == 5


def test_a_chain_in_memory_is_one_part():
    from synthetic import chain

    data = chain(3)
    assert isinstance(data, ChainLogits)
    (part,) = data.each(lambda part: part)
    assert sum(rows.stop - rows.start for rows in part.blocks()) == len(data)
