"""What a service logs is a logit table: fitted as it is, the policy is that of logits which were collected."""

import json
import os
import signal
import socket
import subprocess
from contextlib import closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from asking import FEEDBACK, Command, answered, http, send_labels, until
from runs import python_model, write_pool

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import CaucWarning, ConfigError, DataError
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.serving.answer_ids import sampled_rows

NAME, K = "logged", 4
MODELS = {"small": 0.6, "large": 2.5}


def pool_in(folder, to, shadow=1.0, **log):
    stages = [
        {
            "name": name,
            "model": python_model("planted", strength=strength, seed=place),
            "cost": {"gflops": 1.0 + 9.0 * place},
            "batch_size": 64,
            "resources": {"num_cpus": 0.5},
        }
        for place, (name, strength) in enumerate(MODELS.items())
    ]
    serving = {"shadow": shadow, "log": {"to": str(to), "flush_s": 0.2, **log}}
    inputs = {"x": {"datatype": "FP64"}}
    return write_pool(folder, stages, "classification", name=NAME, inputs=inputs, serving=serving)


@pytest.fixture(scope="module")
def policy():
    """A policy that answers about half of the rows early."""
    x = np.arange(10_000, 10_600.0)
    logits = {name: planted(x, place) for place, name in enumerate(MODELS)}
    costs = {"small": 1.0, "large": 10.0}
    return cauc_ray.fit(
        logits, (x % K).astype(int), costs=costs, cost_unit="GFLOPs", method="rf", validation=0.5, budget=6.0
    )


def planted(x, place):
    import user_models

    return user_models.planted(list(MODELS.values())[place], place)({"x": x})


def ask(service, x, **parameters):
    """Ask for rows; return the response."""
    return answered(service.url, NAME, {"x": list(x)}, FEEDBACK, parameters)


def traffic(service, x, size=20, labelled=True, **parameters):
    """Ask for rows in requests of a size and send their labels; return x by example id."""
    by_id = {}
    for start in range(0, len(x), size):
        part = x[start : start + size]
        content = ask(service, part, **parameters)
        by_id |= {f"{content['parameters']['answer_id']}-{row}": value for row, value in enumerate(part)}
        if labelled:
            send_labels(service.url, NAME, content, (part % K).astype(int))
    return by_id


def logged(table, model="large"):
    """Return the ids that a log has for a model, by default the one that is written last."""
    folder = path_of(table) / f"model={model}"
    files = parquet_below(folder) if folder.is_dir() else []
    return [example for file in files for example in read_parquet(file)["example_id"].to_pylist()]


def n_labels(table):
    folder = path_of(table) / "labels"
    return sum(len(read_parquet(file)) for file in (parquet_below(folder) if folder.is_dir() else ()))


def fitted(table, method, **options):
    return cauc_ray.fit(table, method=method, validation=0.5, budget=6.0, **options)


@pytest.fixture(scope="module")
def log(tmp_path_factory, policy):
    """Return the log of a service that has ended, and x by example id of all that was asked."""
    folder = tmp_path_factory.mktemp("log")
    with cauc_ray.serve(
        pool_in(folder, "LOG", split="all", shadow=0.7, flush_rows=100), policy, port=0, local=True
    ) as service:
        by_id = traffic(service, np.arange(600.0), size=20)
        answer_ids = {example.partition("-")[0] for example in by_id}
        sample = {f"{answer}-{row}" for answer in answer_ids for row in np.flatnonzero(sampled_rows(answer, 20, 0.7))}
        until(lambda: set(logged(folder / "LOG")) == sample and n_labels(folder / "LOG") == len(sample))
    return folder, by_id


def test_a_policy_fitted_on_the_log_is_that_of_collected_logits_to_the_byte(log, ray_session):
    folder, by_id = log
    ids = logged(folder / "LOG")
    assert len(set(ids)) == len(ids)
    assert abs(len(ids) - 0.7 * 600) < 60
    rows = {
        "example_id": ids,
        "x": [by_id[example] for example in ids],
        "label": [int(by_id[example] % K) for example in ids],
    }
    pq.write_table(pa.table(rows), folder / "rows.parquet")
    cauc_ray.collect(folder / "pool.yaml", folder / "rows.parquet", folder / "LOGITS", split="all")
    for method in ("base", "rf"):
        policies = [fitted(folder / name, method, calibration_split="all") for name in ("LOG", "LOGITS")]
        assert policies[0].id == policies[1].id
        assert policies[0].to_json() == policies[1].to_json()
    infos = [json.loads((folder / name / "pool.json").read_text()) for name in ("LOG", "LOGITS")]
    assert infos[0]["models"] == infos[1]["models"]


def test_missing_labels_are_left_out_and_conflicting_or_invalid_ones_refused(tmp_path, policy):
    to = tmp_path / "LOG"
    with cauc_ray.serve(pool_in(tmp_path, to), policy, port=0, local=True) as service:
        traffic(service, np.arange(300.0), labelled=False)
        until(lambda: len(logged(to)) == 300)
        with pytest.raises(DataError, match=r"has no label; calibration needs labels"):
            fitted(to, "rf")
        by_id = traffic(service, np.arange(300.0, 600.0))
        until(lambda: (len(logged(to)), n_labels(to)) == (600, 300))
        with pytest.warns(CaucWarning, match=r"300 of 600 examples have no label and are left out"):
            fit = fitted(to, "rf")
        assert fit.calibration.n + fit.validation.n == 300
        # A row is labelled once, however often that is sent.
        content = ask(service, np.arange(4.0))
        assert send_labels(service.url, NAME, content, range(4))["counted"] == 4
        assert send_labels(service.url, NAME, content, [3, 3, 3, 3])["counted"] == 0
    chain = LogitTable(to).read_chain(list(MODELS), "calibration")
    labels = dict(zip(chain.example_ids, chain.labels.tolist(), strict=True))
    assert {example: labels[example] for example in by_id} == {example: int(x % K) for example, x in by_id.items()}
    assert [labels[f"{content['parameters']['answer_id']}-{row}"] for row in range(4)] == [0, 1, 2, 3]

    first, second = list(by_id)[:2]
    late = to / "labels" / "late.parquet"
    unlabelled = next(example for example in labels if labels[example] < 0)
    pq.write_table(pa.table({"example_id": [unlabelled], "label": [K]}), late)
    with pytest.raises(DataError, match="has label 4, which is outside its 4 options"):
        LogitTable(to).read_chain(list(MODELS), "calibration")
    wrong = (labels[first] + 1) % K
    pq.write_table(pa.table({"example_id": [second, first], "label": [labels[second], wrong]}), late)
    with pytest.raises(DataError, match=rf"example '{first}' has label .* and label .*; remove the wrong one"):
        LogitTable(to).read_chain(list(MODELS), "calibration")


def test_requests_that_opt_out_or_are_capped_leave_nothing_in_the_log(tmp_path, policy):
    to = tmp_path / "LOG"
    with cauc_ray.serve(pool_in(tmp_path, to), policy, port=0, local=True) as service:
        out = {**traffic(service, np.arange(40.0), log=False), **traffic(service, np.arange(40.0), max_stage=0)}
        taken = traffic(service, np.arange(60.0), log=True, priority=1, max_stage=1)
        until(lambda: len(logged(to)) >= 60)
    assert set(logged(to)) == set(logged(to, "small")) == set(taken)
    assert n_labels(to) == 60
    assert not set(taken) & set(out)


def test_files_that_only_some_models_have_are_left_out(log, tmp_path):
    """So is what a service that died over a flush has left, and what a reader sees while another is written."""
    folder, _ = log
    models = list(MODELS)
    whole = LogitTable(folder / "LOG").read_chain(models, "all")
    gone = parquet_below(folder / "LOG" / "model=large")[0]
    rows = set(read_parquet(gone)["example_id"].to_pylist())
    gone.rename(tmp_path / gone.name)
    try:
        table = LogitTable(folder / "LOG")
        with pytest.warns(CaucWarning, match="1 files of a service's log are left out: not all of small, large"):
            chain = table.read_chain(models, "all")
        with pytest.warns(CaucWarning, match="left out"):
            heads = table.read_chain_heads(models, "all")
    finally:
        (tmp_path / gone.name).rename(gone)
    assert set(chain.example_ids) == set(heads.example_ids) == set(whole.example_ids) - rows


def test_old_files_are_deleted_for_all_models_and_nothing_else(tmp_path, policy):
    to = tmp_path / "LOG"
    folders = [to / "model=small" / "split=calibration", to / "model=large" / "split=calibration", to / "labels"]
    for folder in folders:
        folder.mkdir(parents=True)
        for name in ("log-20200101T000000Z-abc.parquet", "log-20990101T000000Z-abc.parquet", "part-0.parquet"):
            pq.write_table(pa.table({"example_id": pa.array([], pa.string())}), folder / name)
    with cauc_ray.serve(pool_in(tmp_path, to, keep_days=30), policy, port=0, local=True):
        until(lambda: not any((folder / "log-20200101T000000Z-abc.parquet").exists() for folder in folders))
    for folder in folders:
        assert sorted(file.name for file in folder.iterdir()) == ["log-20990101T000000Z-abc.parquet", "part-0.parquet"]


def test_neither_requests_nor_the_stop_wait_for_a_store_that_is_silent(tmp_path, policy, monkeypatch, caplog):
    silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never answers
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    pool = pool_in(tmp_path, "s3://nowhere/LOG", flush_rows=10)
    with cauc_ray.serve(pool, policy, port=0, local=True) as service:
        traffic(service, np.arange(400.0))
        until(lambda: 'outcome="dropped"' in http("GET", f"{service.url}/metrics")[1].decode())
        ask(service, np.arange(10.0))
    silent.close()
    assert "the last rows of the log could not be written to s3://nowhere/LOG" in caplog.text


@pytest.mark.soak("full")
def test_a_table_of_other_models_is_not_added_to(tmp_path, policy, log, caplog):
    folder, _ = log
    info = json.loads((folder / "LOG" / "pool.json").read_text())
    to = tmp_path / "LOG"
    to.mkdir()
    for change in ({"cost_unit": "s"}, {"models": [{**info["models"][0], "source": "another"}]}):
        (to / "pool.json").write_text(json.dumps({**info, **change}))
        caplog.clear()
        with cauc_ray.serve(pool_in(tmp_path, to), policy, port=0, local=True) as service:
            traffic(service, np.arange(20.0))
            until(lambda: "log elsewhere" in caplog.text)
        assert logged(to) == []


def test_a_log_needs_a_shadow_sample(tmp_path, policy):
    with pytest.raises(ConfigError, match="set shadow to"):
        cauc_ray.serve(pool_in(tmp_path, "LOG", shadow=0.0), policy, port=0, local=True)


@pytest.mark.soak("faults")
@pytest.mark.filterwarnings("ignore:.* left out. not all of:cauc_ray.errors.CaucWarning")
def test_a_service_that_is_killed_during_a_flush_leaves_a_readable_table(tmp_path, policy):
    policy.save(tmp_path / "policy.json")
    pool_in(tmp_path, "LOG", flush_rows=20)
    to, by_id = tmp_path / "LOG", {}
    for n_logged in (100, 200):  # the next one goes on with the table
        # Nobody reads what it writes about each request.
        with closing(Command(tmp_path, "--local", "--port", "0", errors=subprocess.DEVNULL)) as service:
            while len(logged(to)) < n_logged:
                by_id |= traffic(service, np.arange(len(by_id), len(by_id) + 40.0))
            os.kill(service.process.pid, signal.SIGKILL)
    chain = LogitTable(to).read_chain(list(MODELS), "calibration")
    assert len(chain) >= 180
    for place, name in enumerate(MODELS):
        x = np.array([by_id[example] for example in chain.example_ids])
        assert np.array_equal(chain.logits[place], planted(x, place)), name


@pytest.mark.soak("full")
def test_an_object_store_takes_a_log(s3, tmp_path, policy):
    to = f"{s3}/service/LOG"
    with cauc_ray.serve(pool_in(tmp_path, to), policy, port=0, local=True) as service:
        traffic(service, np.arange(600.0))
        until(lambda: (len(logged(to)), n_labels(to)) == (600, 600))
    assert fitted(to, "rf").calibration.n == 300
