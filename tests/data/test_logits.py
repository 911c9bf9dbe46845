"""The logit table: what is written is read, joined, refused, or kept on disk; embeddings and texts next to it."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from stored import write
from synthetic import write_table

import cauc_ray
from cauc_ray.data.logits import LogitTable, Texts, encoders, read_embeddings
from cauc_ray.data.model_rows import ShardFiles, SpooledLogits
from cauc_ray.data.writing import logit_columns, write_logits
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet

MODELS = ["m0", "m1", "m2"]


@pytest.fixture
def table(tmp_path):
    write_table(tmp_path, n=60)
    return tmp_path


def part(folder, model="m1", split="calibration"):
    return folder / f"model={model}" / f"split={split}" / "part-0.parquet"


def rewrite(path, **columns):
    """Replace columns of a Parquet file."""
    old = read_parquet(path)
    write_parquet(path, pa.table({name: old.column(name) for name in old.column_names} | columns))


def values(path, column):
    return read_parquet(path).column(column).to_pylist()


@pytest.mark.parametrize("most", [1, 20, 10_000])
def test_more_values_than_the_offsets_of_one_array_can_count_are_written(tmp_path, monkeypatch, most):
    """With a smaller number in place of 2^31 - 1, which takes 9 GB."""
    monkeypatch.setattr("cauc_ray.data.writing.MOST_VALUES", most)
    rows = [np.arange(n, dtype=np.float32) for n in (3, 7, 1, 7)]
    write_logits(tmp_path, "m", "test", example_ids="abcd", labels=np.zeros(4, int), logits=rows)
    read = LogitTable(tmp_path).read_model("m", "test")
    assert read.example_ids.to_pylist() == [*"abcd"]
    assert [logits[np.isfinite(logits)].tolist() for logits in read.logits] == [row.tolist() for row in rows]
    assert len(logit_columns([], None, [], None)) == 0


def test_row_order_and_files_mean_nothing(folder):
    table = folder / "LOGITS"
    write_table(table, n=60)
    expected = LogitTable(table).read_chain(MODELS, "test")
    whole = read_parquet(part(table, "m2", "test"))
    order = np.random.default_rng(0).permutation(len(whole))
    shuffled = whole.take(pa.array(order))
    write_parquet(part(table, "m2", "test"), shuffled.slice(0, 23))
    write_parquet(part(table, "m2", "test").parent / "part-1.parquet", shuffled.slice(23))
    read = LogitTable(table).read_chain(MODELS, "test")
    assert read.example_ids == expected.example_ids
    assert (read.logits[2] == expected.logits[2]).all()
    assert read.examples_fingerprint() == expected.examples_fingerprint()
    assert read.logits_fingerprint(2) == expected.logits_fingerprint(2)


def test_other_list_and_number_types_serve_too(table):
    path = part(table)
    logits = values(path, "logits")
    expected = LogitTable(table).read_chain(MODELS, "calibration").logits[1]
    for kind in (pa.large_list(pa.float64()), pa.list_(pa.float32(), 5)):
        rewrite(path, logits=pa.array(logits, kind), example_id=pa.array(values(path, "example_id"), pa.large_string()))
        assert (LogitTable(table).read_chain(MODELS, "calibration").logits[1] == expected).all()


def with_column(name, change):
    """Return what writes a table anew with one column's values changed."""

    def changed(table):
        place = table.column_names.index(name)
        return table.set_column(place, name, pa.array(change(table[name].to_pylist())))

    return changed


def with_logit(value):
    return with_column("logits", lambda z: [[value, *z[0][1:]], *z[1:]])


FAULTS = {
    "part-0.parquet: model 'm1', example 'calibration-0-00000': a logit is NaN or +inf": with_logit(float("nan")),
    "of model 'm0' is missing from model 'm1' (1 in all)": lambda table: table.slice(1),
    "is a duplicate (part-0.parquet)": with_column("example_id", lambda ids: [ids[1], *ids[1:]]),
    "row 0 has no example_id": with_column("example_id", lambda ids: [None, *ids[1:]]),
    "label 5 is outside its 5 options": with_column("label", lambda labels: [5, *labels[1:]]),
    "for model 'm0' and": with_column("label", lambda labels: [(labels[0] + 1) % 5, *labels[1:]]),
    "column 'label' has type int64, expected int32": with_column("label", lambda labels: [2**40, *labels[1:]]),
    "has 5 options for model 'm0' and 6 for model 'm1'": with_column("logits", lambda z: [[*z[0], 0.0], *z[1:]]),
    "no logits": with_column("logits", lambda z: [[], *z[1:]]),
    "a logit is null": with_column("logits", lambda z: [[None] * 5, *z[1:]]),
    "column 'logits' has type list<": with_column("logits", lambda z: [[True] * 5 for _ in z]),
    "column 'logits' is missing; the file has example_id, label": lambda table: table.drop_columns(["logits"]),
    "cost must be a number of at least 0": lambda table: table.append_column("cost", pa.array([-1.0] * len(table))),
    "has two columns named 'label'": lambda table: table.append_column("label", table["label"]),
    "model 'm1', split 'calibration': the split is empty": lambda table: table.slice(0, 0),
    "split": lambda table: None,
}


@pytest.mark.parametrize("words", FAULTS)
def test_every_fault_is_refused_in_one_line(table, words):
    path = part(table)
    changed = FAULTS[words](read_parquet(path))
    path.unlink()
    if changed is not None:
        write_parquet(path, changed)
    with pytest.raises(DataError) as error:
        LogitTable(table).read_chain(MODELS, "calibration")
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "m1" in str(error.value)


def read_test(table, models=("m0", "m2"), **options):
    return LogitTable(table).read_chain(models, "test", **options)


def test_costs_come_from_the_caller_or_pool_json_or_an_error_says_so(table):
    assert read_test(table).costs.per_call.tolist() == [1.0, 15.0]
    assert read_test(table, costs=[3, 4]).costs.per_call.tolist() == [3.0, 4.0]
    info = read_json(table / "pool.json")
    for content, words in (
        ({**info, "models": info["models"][:1]}, "no cost for model 'm2'"),
        ({"cost_unit": "s", "modles": []}, r"pool\.json: "),
    ):
        write_json(table / "pool.json", content)
        with pytest.raises(DataError, match=words):
            read_test(table)
    (table / "pool.json").unlink()
    with pytest.raises(DataError, match="give --costs"):
        read_test(table)
    assert read_test(table, costs=[3, 4]).costs.unit == "cost units"


@pytest.mark.parametrize("mask", [-np.inf, -1e9])
def test_an_example_on_whose_options_the_models_disagree_altogether_is_named(table, mask):
    for possible, model in enumerate(("m0", "m1")):
        path = part(table, model, "test")
        logits = values(path, "logits")
        row = values(path, "example_id").index("test-2-00007")
        logits[row] = [0.0 if k == possible else mask for k in range(5)]
        rewrite(path, logits=pa.array(logits, pa.list_(pa.float32())), label=pa.nulls(60, pa.int32()))
    with pytest.raises(DataError, match="'test-2-00007' has no option that is possible for all models"):
        LogitTable(table).read_chain(MODELS, "test")


def test_splits_that_share_rows_are_refused(table):
    for model in MODELS:
        shutil.copytree(part(table, model).parent, part(table, model, "validation").parent, dirs_exist_ok=True)
    with pytest.raises(DataError, match="calibration"):
        cauc_ray.fit(table, models=MODELS)


def test_what_is_written_with_its_cost_is_a_whole_table(folder):
    ids, labels = ["a", "b"], np.array([1, -1])
    for model, cost in (("large", 9.0), ("small", 2.0), ("large", 10.0)):
        write_logits(folder, model, "test", ids, np.eye(2) * cost, labels, cost=cost, cost_unit="B params")
    chain = LogitTable(folder).read_chain(["small", "large"], "test")
    assert (chain.costs.unit, chain.costs.per_call.tolist()) == ("B params", [2.0, 10.0])
    assert chain.labels.tolist() == [1, -1]
    assert chain.logits[1].tolist() == [[10, 0], [0, 10]]
    with pytest.raises(ConfigError, match="in B params, but those of model 'other' are in s"):
        write_logits(folder, "other", "test", ids, np.eye(2), cost=1.0, cost_unit="s")
    with pytest.raises(ConfigError, match="2 example ids and 3 rows of logits"):
        write_logits(folder, "other", "test", ids, np.eye(3))


def test_files_that_have_changed_since_are_refused_and_those_without_wanted_rows_are_not_opened(tmp_path):
    """A shard may be read long after the ids: again, when its actor has died."""
    into = tmp_path / "model=m" / "split=test"
    into.mkdir(parents=True)
    for number in range(2):
        ids = [f"e{number}{row}" for row in range(10)]
        logits = np.random.default_rng(number).standard_normal((10, 3), np.float32)
        columns = logit_columns(ids, np.zeros(10, np.int32), [*logits], None)
        pq.write_table(columns, into / f"part-{number}.parquet", row_group_size=5)
    head = LogitTable(tmp_path).read_model("m", "test", with_logits=False)
    first, second = (file.path for file in head.files)
    rows = pq.read_table(second)
    pq.write_table(rows.take(np.arange(len(rows))[::-1]), second, row_group_size=5)
    with pytest.raises(DataError, match=r"part-1\.parquet has changed since"):
        SpooledLogits(ShardFiles("m", head.files, head.positions))
    second.unlink()
    of_first = head.positions[head.positions < head.files[0].n_rows]
    assert len(SpooledLogits(ShardFiles("m", head.files, of_first)).n_options) == pq.read_metadata(first).num_rows


IDS = [f"e{row}" for row in range(6)]


def write_embedding(folder, vectors, ids=IDS, name="part-0"):
    lists = pa.array([None if vector is None else [float(x) for x in vector] for vector in vectors])
    write(
        folder / "embedding=enc" / "split=test" / f"{name}.parquet", pa.table({"example_id": ids, "embedding": lists})
    )


def test_embeddings_come_in_the_order_asked_for_from_any_number_of_files(tmp_path):
    vectors = np.random.default_rng(0).random((6, 3), dtype=np.float32)
    write_embedding(tmp_path, vectors[:2], IDS[:2], name="a")
    write_embedding(tmp_path, vectors[2:], IDS[2:], name="b")
    assert encoders(tmp_path) == ["enc"]
    for order in ([5, 0, 3], [0, 1, 2, 3, 4, 5]):
        read = read_embeddings(tmp_path, "enc", "test", [IDS[row] for row in order])
        assert read.dtype == np.float32
        assert (read == vectors[order]).all()


@pytest.mark.parametrize(
    ("vectors", "ids", "words"),
    [
        ([[1, 2]] * 5, IDS[:5], "'e5' is missing"),
        ([[1, 2]] * 7, [*IDS, "e2"], "'e2' is a duplicate"),
        ([*[[1, 2]] * 5, [1, 2, 3]], IDS, "'e5' has 3 numbers, example 'e0' 2"),
        ([*[[1, 2]] * 5, [1, np.nan]], IDS, "'e5' is not finite"),
        ([*[[1, 2]] * 5, None], IDS, "'e5' has 0 numbers"),
        ([[]] * 6, IDS, "'e0' has 0 numbers"),
    ],
)
def test_embeddings_that_do_not_serve_are_refused_in_one_line(tmp_path, vectors, ids, words):
    write_embedding(tmp_path, vectors, ids)
    with pytest.raises(DataError, match=words) as refused:
        read_embeddings(tmp_path, "enc", "test", IDS)
    assert "'enc'" in str(refused.value)
    with pytest.raises(DataError, match="no such split"):
        read_embeddings(tmp_path, "enc", "validation", IDS)


def test_texts_are_found_by_id(tmp_path):
    file = write(tmp_path / "q.parquet", [{"example_id": name, "question": f"text {name}"} for name in IDS])
    assert Texts(file, "question").of(["e4", "e1"]) == ("text e4", "text e1")
    with pytest.raises(DataError, match="'other' is missing"):
        Texts(file, "question").of(["other"])
    with pytest.raises(DataError, match="column 'text' is missing; the file has example_id, question"):
        Texts(file, "text")
