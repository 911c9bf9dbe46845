"""Collecting logits on a real Ray session."""

import io
import json
import shutil
import threading
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from completion_server import chat_answer, scripted_server
from runs import answers_of, by_example, python_model, ranked, read_all, saved_model, write_pool, write_questions
from stored import write

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.writing import PoolModel, TableInfo, write_info, write_logits
from cauc_ray.errors import CaucError, CaucWarning, ConfigError, DataError
from cauc_ray.execution import commits
from cauc_ray.execution.collection import BLOCK_ROWS

pytestmark = pytest.mark.usefixtures("ray_session")
SPLITS = ("calibration", "validation", "test")
IMAGES = "image-classification"


def stage(name, factory, cost={"seconds": 1}, kwargs={}, **settings):  # noqa: B006
    model = python_model(factory, **kwargs)
    return {"name": name, "model": model, "batch_size": 16, "resources": {"num_cpus": 0.5}, "cost": cost, **settings}


def pool(folder, *stages, task="multiple-choice"):
    return write_pool(folder, stages, task)


def images(path, contents, labels=None):
    """Write images of a few bytes, some of which may be None, with labels of two classes."""
    labels = [row % 2 for row in range(len(contents))] if labels is None else labels
    ids, labels = [f"image-{row}" for row in range(len(contents))], pa.array(labels, pa.int32())
    return write(path, pa.table({"example_id": ids, "image": pa.array(contents, pa.binary()), "label": labels}))


def collected(table, model, kind="model", splits=SPLITS):
    """Return a model's rows of all splits by example, each of which is there once."""
    return by_example(pa.concat_tables([read_all(table / f"{kind}={model}" / f"split={split}") for split in splits]))


def test_requests_of_the_next_call_go_out_while_the_last_answers_of_a_call_are_awaited(tmp_path):
    write_questions(tmp_path / "q.parquet", 12)
    asked, overlap, go = set(), [], threading.Event()

    def script(prompt, before):
        asked.add(prompt)
        if len(asked) > 2:  # more than one call has
            go.set()
        overlap.append(go.wait(20))
        return chat_answer({"A": 0.9})

    with scripted_server(script) as server:
        model = {"kind": "openai", "model": "m", "base_url": server.url}
        large = {"name": "large", "model": model, "batch_size": 2, "cost": {"usd": 1}}
        cauc_ray.collect(pool(tmp_path, large), tmp_path / "q.parquet", tmp_path / "L")
    assert overlap == [True] * 12


def test_every_row_of_every_split_is_answered_once_by_every_model_and_kept_columns_make_segments(tmp_path):
    rows = write_questions(tmp_path / "q.parquet", 1500)
    subjects = {example: f"s{number % 3}" for number, example in enumerate(rows)}
    data = read_all(tmp_path / "q.parquet")
    write(tmp_path / "q.parquet", data.append_column("subject", [[subjects[e] for e in data["id"].to_pylist()]]))
    stages = [stage("long", "longest"), stage("square", "longest", kwargs={"exponent": 2.0})]
    with pytest.raises(ConfigError, match=r"'subjet'.*subject"):
        cauc_ray.collect(pool(tmp_path, *stages), tmp_path / "q.parquet", tmp_path / "L", keep=["subjet"])
    summary = cauc_ray.collect(pool(tmp_path, *stages), tmp_path / "q.parquet", tmp_path / "L", keep=["subject"])
    for model, exponent in (("long", 1), ("square", 2)):
        got = collected(tmp_path / "L", model)
        assert got.keys() == rows.keys()
        for example, row in got.items():
            assert row["logits"] == [len(choice) ** exponent for choice in rows[example]["choices"]]
            assert row["label"] == rows[example]["label"]
    assert summary["splits"] == {"calibration": 375, "validation": 375, "test": 750}
    right = sum(np.argmax([len(c) for c in row["choices"]]) == row["label"] for row in rows.values())
    assert summary["models"][0]["accuracy"] == right / 1500
    info = LogitTable(tmp_path / "L").info
    assert (info.cost_unit, [(m.name, m.cost) for m in info.models]) == ("s", [("long", 1), ("square", 1)])
    assert "25/25/50" in info.note
    assert info.logit_kind == info.models[0].logit_kind == "raw"
    record = json.loads((tmp_path / "L" / "model=long" / "split=test" / "_collect.json").read_text())
    assert (record["dataset"], record["split"], record["n_rows"]) == ("q.parquet", "test", 750)
    assert record["source"] == "python user_models:longest"
    policy = cauc_ray.fit(tmp_path / "L", models=["long", "square"], method="rf", costs=[1, 2])
    evaluation = cauc_ray.evaluate(tmp_path / "L", policy, by="subject")
    assert evaluation.measures.n == 750
    ids = collected(tmp_path / "L", "long", splits=["test"])
    assert {of.name: of.n for of in evaluation.segments} == Counter(subjects[example] for example in ids)


@pytest.mark.slow
def test_a_collection_goes_on_where_it_was_and_does_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "COMMIT_S", 0.0)  # a part for each block
    data = tmp_path / "q.csv"
    rows = write_questions(data, 2500)
    log = tmp_path / "calls"
    noted = stage("noted", "longest_noted", kwargs={"log": str(log)})
    both = pool(tmp_path, stage("long", "longest"), noted)
    cauc_ray.collect(both, data, tmp_path / "L")
    undisturbed = collected(tmp_path / "L", "noted")
    assert undisturbed.keys() == rows.keys()
    assert sum(map(int, log.read_text().split())) >= 2500
    split = tmp_path / "L" / "model=noted" / "split=test"
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "L").rglob("*.parquet")}
    gone = sorted(p for p in files if p.parent == split)[1]
    n_gone = pa.parquet.read_metadata(gone).num_rows
    gone.unlink()
    with pytest.raises(DataError, match=rf"{gone.name} is committed but missing; restore it"):
        cauc_ray.collect(both, data, tmp_path / "L")
    (split / "_manifest" / f"{gone.stem}.json").unlink()
    log.unlink()
    cauc_ray.collect(both, data, tmp_path / "L")
    assert collected(tmp_path / "L", "noted") == undisturbed
    assert all(p.stat().st_mtime_ns == t for p, t in files.items() if p.name != gone.name)  # nothing was written anew
    assert sum(map(int, log.read_text().split())) == n_gone <= BLOCK_ROWS  # and nothing else computed
    log.unlink()
    cauc_ray.collect(both, data, tmp_path / "L")
    assert not log.exists()


def labels_cleaned(rows):
    return [{**row, "label": (row["label"] + 1) % 2} for row in rows]


# What happens to a dataset after it was collected, and how many of its 300 rows are asked then.
CHANGED = {
    "cleaned labels of fewer rows in another order": (lambda rows: labels_cleaned(rows[249::-1]), 0),
    "more rows": (lambda rows: [*rows, *({**row, "id": f"new-{n}"} for n, row in enumerate(rows[:20]))], 20),
    "corrected inputs": (
        lambda rows: [{**row, "choices": [*row["choices"], "neither"]} for row in rows[:10]] + rows[10:],
        10,
    ),
}


@pytest.mark.parametrize("change", ranked(CHANGED, quick=1, slow=1))
def test_what_was_paid_for_is_kept_when_the_dataset_changes(tmp_path, change):
    log, data = tmp_path / "calls", tmp_path / "q.jsonl"
    rows = list(write_questions(data, 300).values())
    path = pool(tmp_path, stage("noted", "longest_noted", kwargs={"log": str(log)}))
    cauc_ray.collect(path, data, tmp_path / "L")
    log.unlink()
    make, n_asked = CHANGED[change]
    write(data, make(rows))
    for _ in range(2):  # the second time, nothing is left to do
        summary = cauc_ray.collect(path, data, tmp_path / "L")
    assert sum(map(int, log.read_text().split())) == n_asked if n_asked else not log.exists()
    table = collected(tmp_path / "L", "noted")
    expected = {row["id"]: row for row in make(rows)}
    assert table.keys() == expected.keys()
    assert sum(summary["splits"].values()) == len(expected)
    for example, row in table.items():
        assert row["logits"] == [len(choice) for choice in expected[example]["choices"]]
        assert row["label"] == expected[example]["label"]
    write(data, rows)  # and back: what was answered before the change is still there
    cauc_ray.collect(path, data, tmp_path / "L")
    assert sum(map(int, log.read_text().split())) == n_asked if n_asked else not log.exists()
    assert collected(tmp_path / "L", "noted").keys() == {row["id"] for row in rows}


@pytest.mark.slow
def test_a_table_is_not_mixed_from_two_datasets_or_models(tmp_path):
    data, another = tmp_path / "q.csv", tmp_path / "other" / "q.csv"
    rows = write_questions(data, 40)
    write(another, [{**row, "id": f"r{number}"} for number, row in enumerate(rows.values())])  # of the same size
    path = pool(tmp_path, stage("long", "longest"))
    cauc_ray.collect(path, data, tmp_path / "L")
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "L").rglob("model=*/*/*"))
    with pytest.raises(ConfigError, match="belongs to another dataset"):
        cauc_ray.collect(path, another, tmp_path / "L")
    faster = pool(tmp_path, stage("long", "longest", batch_size=7, replicas={"min": 2}))
    cauc_ray.collect(faster, data, tmp_path / "L")  # how it is run makes no difference
    cubic = pool(tmp_path, stage("long", "longest", kwargs={"exponent": 3.0}))
    with pytest.raises(ConfigError, match="another model of that name"):
        cauc_ray.collect(cubic, data, tmp_path / "L")
    flops = pool(tmp_path, stage("longer", "longest", cost={"gflops": 3}))
    with pytest.raises(ConfigError, match="holds costs in s, this pool gives GFLOPs"):
        cauc_ray.collect(flops, data, tmp_path / "L")
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "L").rglob("model=*/*/*"))
    (tmp_path / "L" / "model=long" / "split=test" / "_collect.json").unlink()
    path = pool(tmp_path, stage("long", "longest"))
    with pytest.raises(ConfigError, match="belongs to no collection"):
        cauc_ray.collect(path, data, tmp_path / "L")


@pytest.fixture(scope="module")
def with_failures(tmp_path_factory, ray_session):
    """Collect three models' answers to images that some fail on. Returns the folder, the pool and the summary."""
    folder = tmp_path_factory.mktemp("failures")
    contents, labels = [bytes([row]) for row in range(200)], [row % 2 for row in range(200)]
    contents[17], contents[130], labels[60] = b"", b"", 7
    images(folder / "i.parquet", contents, labels)
    stages = [stage("a", "brightness"), stage("b", "brightness", {"seconds": 4}, {"factor": 1.5})]
    stages.append(stage("partly", "brightness_below", kwargs={"limit": 190}))
    path = pool(folder, *stages, task=IMAGES)
    return folder, path, cauc_ray.collect(path, folder / "i.parquet", folder / "L")


def test_rows_that_fail_are_reported_and_left_out_of_chains_and_a_model_without_answers_is_refused(
    with_failures, tmp_path
):
    folder, _, summary = with_failures
    failed = pa.concat_tables([read_all(p) for p in (folder / "L" / "failed" / "model=a").iterdir()])
    reasons = {row["example_id"]: row["reason"] for row in failed.to_pylist()}
    empty = "ValueError: an image of no bytes"
    assert reasons == {"image-17": empty, "image-130": empty, "image-60": "its label 7 is outside its 2 options"}
    whole, partly = (collected(folder / "L", name).keys() for name in ("a", "partly"))
    assert whole == {f"image-{row}" for row in range(200)} - reasons.keys()
    answered, table = set(), LogitTable(folder / "L")
    for split in SPLITS:
        with pytest.warns(CaucWarning, match=r"\d+ examples are left out because some model of the chain"):
            answered |= set(table.read_chain(["a", "partly"], split).example_ids)
    assert answered == whole & partly
    assert [model["n_failed"] for model in summary["models"]] == [3, 3, 200 - len(partly)]
    images(tmp_path / "bright.parquet", [bytes([row]) for row in range(1, 13)])
    path = pool(tmp_path, stage("none", "brightness_below", kwargs={"limit": 0}), task=IMAGES)
    with pytest.raises(DataError, match=r"'none' answered no row of split 'calibration'; .*: ValueError: too bright"):
        cauc_ray.collect(path, tmp_path / "bright.parquet", tmp_path / "none")
    assert not (tmp_path / "none").exists()  # nothing that another attempt would take for done


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # of models that have learnt nothing
def test_what_was_collected_is_what_the_live_cascade_does_failed_rows_included(with_failures):
    folder, path, _ = with_failures
    policy = cauc_ray.fit(folder / "L", models=["a", "b"], method="rf", threshold=0.50001)
    tables = [cauc_ray.evaluate(folder / "L", policy, split=split).to_arrow() for split in SPLITS]
    replayed = by_example(pa.concat_tables(tables))
    summary = cauc_ray.run(path, policy, folder / "i.parquet", folder / "out")
    live = answers_of(folder / "out")
    assert live.keys() == replayed.keys() | {"image-60"}  # a run needs no label
    for example, row in replayed.items():
        for column in ("prediction", "stage", "cost", "label"):
            assert live[example][column] == row[column]
    failed = read_all(folder / "out" / "failed").to_pylist()
    assert {(row["example_id"], row["stage"]) for row in failed} == {("image-17", "a"), ("image-130", "a")}
    assert summary["n_failed"] == 2


@pytest.mark.soak("full")
def test_operations_are_counted_where_nobody_declares_a_cost(tmp_path):
    images(tmp_path / "i.parquet", [bytes([row] * 4) for row in range(40)], [0] * 40)
    costs = {"counted": None, "auto": {"gflops": "auto"}, "doubled": {"gflops": 24e-9}}
    stages = [stage(name, "linear", cost, {"seed": seed}) for seed, (name, cost) in enumerate(costs.items())]
    message = r"'doubled': its cost of 2\.4e-08 GFLOPs is 2 times the measured 1\.2e-08; it"
    with pytest.warns(CaucWarning, match=message):
        summary = cauc_ray.collect(pool(tmp_path, *stages, task=IMAGES), tmp_path / "i.parquet", tmp_path / "L")
    assert [model["cost"] for model in summary["models"]] == [12e-9, 12e-9, 24e-9]  # 4 x 3 multiply-adds
    assert {model.name: model.cost for model in LogitTable(tmp_path / "L").info.models}["counted"] == 12e-9
    unknown = pool(tmp_path, stage("none", "brightness", None), task=IMAGES)
    with pytest.raises(ConfigError, match="stage 'none': the cost of a call is unknown"):
        cauc_ray.collect(unknown, tmp_path / "i.parquet", tmp_path / "L")


@pytest.mark.slow
def test_calls_that_tell_their_own_cost_keep_it(tmp_path):
    rows = write_questions(tmp_path / "q.parquet", 60)
    ids, costs = sorted(rows), np.arange(60) / 7
    logits = [np.zeros(len(rows[i]["choices"]), np.float32) for i in ids]
    write_logits(tmp_path / "S", "m", "all", example_ids=ids, labels=None, logits=logits, costs=costs)
    write_info(tmp_path / "S", TableInfo(cost_unit="USD", models=[PoolModel(name="m", cost=1.0)]))
    path = pool(tmp_path, {"name": "m", "model": saved_model("m", "S", "all"), "batch_size": 16})
    summary = cauc_ray.collect(path, tmp_path / "q.parquet", tmp_path / "L")
    assert summary["cost_unit"] == "USD"
    got = collected(tmp_path / "L", "m")
    assert [got[example]["cost"] for example in ids] == costs.astype(np.float32).tolist()
    assert summary["models"][0]["cost"] == pytest.approx(costs.mean(), rel=1e-6)


@pytest.mark.slow
def test_models_run_side_by_side_as_resources_allow(tmp_path):
    """Of the session's eight CPUs each model takes four: two run together, the third when one of them is done."""
    images(tmp_path / "i.parquet", [bytes([row % 200]) for row in range(96)])
    stages = []
    for name in "abc":
        kwargs = {"logs": str(tmp_path), "name": name, "n": 2}
        stages.append(stage(name, "brightness_together", kwargs=kwargs, resources={"num_cpus": 4}))
    summary = cauc_ray.collect(pool(tmp_path, *stages, task=IMAGES), tmp_path / "i.parquet", tmp_path / "L")
    assert [model["n_failed"] for model in summary["models"]] == [0, 0, 0]  # the first two have met
    calls = {name: (tmp_path / f"calls-{name}").read_text().split() for name in "abc"}
    first, last = ({name: float(times[place]) for name, times in calls.items()} for place in (0, -1))
    assert sum(last[name] < max(first.values()) for name in "abc") >= 1


@pytest.mark.soak("full")
def test_of_a_network_the_input_of_its_last_layer_is_collected_too_and_all_in_one_precision(tmp_path):
    """With `dtype: auto` the precision follows the device. The first part is marked as one that a GPU computed."""
    torch, models = pytest.importorskip("torch"), pytest.importorskip("torchvision.models")
    image, rng, contents = pytest.importorskip("PIL.Image"), np.random.default_rng(0), []
    for _ in range(16):
        buffer = io.BytesIO()
        image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(buffer, "JPEG")
        contents.append(buffer.getvalue())
    inputs, table = images(tmp_path / "i.parquet", contents), tmp_path / "L"
    torch.manual_seed(0)
    state = models.mnasnet0_5(weights=None, num_classes=2).state_dict()
    torch.save(state, tmp_path / "m.pth")
    model = {"kind": "torchvision", "arch": "mnasnet0_5", "weights": "m.pth"}
    path = pool(tmp_path, {"name": "m", "model": model, "batch_size": 8, "resources": {"num_cpus": 0.5}}, task=IMAGES)
    cauc_ray.collect(path, inputs, table)
    cauc_ray.collect(path, inputs, table, embedding="m")
    rows, answers = collected(table, "m", "embedding"), collected(table, "m")
    assert len(rows) == 16
    for example, row in rows.items():
        logits = torch.tensor(row["embedding"]) @ state["classifier.1.weight"].T + state["classifier.1.bias"]
        assert logits.tolist() == pytest.approx(answers[example]["logits"], rel=1e-3, abs=1e-3)

    record = table / "model=m" / "split=calibration" / "_collect.json"
    content = json.loads(record.read_text())
    assert content["dtype"] == "float32"
    record.write_text(json.dumps({**content, "dtype": "bfloat16"}))
    shutil.rmtree(table / "model=m" / "split=test")
    with pytest.raises(CaucError, match=r"'m' answered split 'calibration' in bfloat16 .* continue in float32"):
        cauc_ray.collect(path, inputs, table, split="test")
    assert not (table / "model=m" / "split=test").exists()
