"""Results, checks and certificates by the values of a column that a logit table keeps."""

import json
import shutil
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import synthetic

import cauc_ray
from cauc_ray.api.segmented import segment_results
from cauc_ray.cli.command import main
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import ConfigError, DataError, PolicyError, RiskError
from cauc_ray.files.documents import write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits, Costs
from cauc_ray.numbers.segments import Segments
from cauc_ray.policies.trace import Answered

pytestmark = pytest.mark.filterwarnings("ignore::cauc_ray.CaucWarning")
SPLITS, NAMES = ("calibration", "validation", "test"), ("easy", "hard", "odd")
INFO = {"cost_unit": "s", "logit_kind": "raw", "models": [{"name": "m0", "cost": 1.0}, {"name": "m1", "cost": 9.0}]}


def write_segmented(folder, *, seed=0, n=900, drifted=(), splits=SPLITS, names=NAMES):
    """Write a table of segments that differ in how often the first model is right, with the column that names them.

    drifted: segments of the last split in which both models answer at random.
    """
    rng = np.random.default_rng(seed)
    for split in splits:
        segments = rng.choice(names, n)
        easy = np.where(segments == "easy", 1.0, 0.35)[:, None]
        labels, (small, large) = synthetic.planted(rng, n, 4, (4.0, 5.0))
        small = small * easy
        rows = np.isin(segments, drifted) & (split == splits[-1])
        small[rows], large[rows] = rng.permuted(small[rows], axis=1), rng.permuted(large[rows], axis=1)
        ids = [f"{row}" for row in range(n)]  # they begin anew in each split
        for model, logits in (("m0", small), ("m1", large)):
            write_logits(folder, model, split, example_ids=ids, labels=labels, logits=list(logits))
        (folder / "columns" / f"split={split}").mkdir(parents=True)
        columns = pa.table({"example_id": ids, "difficulty": segments, "number": rng.integers(0, 2, n)})
        write_parquet(folder / "columns" / f"split={split}" / "part-0.parquet", columns)
    write_json(folder / "pool.json", INFO)
    return folder


def values_of(table, split):
    columns = read_parquet(table / "columns" / f"split={split}" / "part-0.parquet").sort_by("example_id")
    return np.array(columns["difficulty"].to_pylist())


def arrays_of(table, split, order):
    """Return a split's arrays by name, the column of segments among them, its labels and its ids, in some order."""
    chain, segments = LogitTable(table).read_chain(["m0", "m1"], split), values_of(table, split)
    arrays = {model: logits[order] for model, logits in zip(chain.models, chain.logits, strict=True)}
    return arrays | {"difficulty": segments[order]}, chain.labels[order], np.array(chain.example_ids)[order]


def test_results_of_segments_are_those_of_their_rows_and_their_intervals_are_wider(tmp_path):
    table = write_segmented(tmp_path / "L")
    policy = cauc_ray.fit(table, method="rf", budget=5.0)
    evaluation = cauc_ray.evaluate(table, policy, by="difficulty")
    arrays, labels, _ = arrays_of(table, "test", np.arange(900))
    segments = arrays.pop("difficulty")
    answers = policy.predict(arrays)
    printed = evaluation.as_json()["segments"]
    assert [segment["name"] for segment in printed] == sorted(NAMES)
    for segment in printed:
        rows = segments == segment["name"]
        right = answers.prediction[rows] == labels[rows]
        early = answers.stage[rows] == 0
        assert segment["n"] == rows.sum()
        assert segment["accuracy"] == pytest.approx(right.mean())
        assert segment["cost"] == pytest.approx(answers.cost[rows].mean())
        assert segment["early"] == pytest.approx(early.mean())
        assert segment["risk"] == pytest.approx(1 - right[early].mean())
        low, high = segment["accuracy_interval"]
        of_rows = {model: logits[rows] for model, logits in arrays.items()}
        alone = cauc_ray.evaluate(of_rows, policy, labels=labels[rows]).measures.accuracy
        assert low < alone.low < alone.high < high
    assert "difficulty" in str(evaluation)


@pytest.mark.parametrize(("n_segments", "n", "deferred"), [(10, 50, 0.1), (30, 20, 0.2), (60, 10, 0.3)])
def test_all_intervals_of_a_column_hold_together_also_in_small_segments(n_segments, n, deferred):
    """Costs of two values, of which a small segment may have met one; the normal limit failed in up to 80 of 100."""
    rng, n_draws, missed = np.random.default_rng(0), 200, Counter()
    ids = tuple(map(str, range(n_segments * n)))
    segments = Segments("of", {example: f"{int(example) % n_segments}" for example in ids})
    for _ in range(n_draws):
        last, right = rng.random(len(ids)) < deferred, rng.random(len(ids)) < 0.9
        logits = np.where(np.stack([right, ~right], axis=1), np.float32(1), np.float32(-1))
        chain = ChainLogits(
            models=("a", "b"), example_ids=ids, labels=np.zeros(len(ids), np.int32), per_call_costs=False, source="",
            costs=Costs("c", np.array([1.0, 10.0])), logit_kind="raw", logits=(logits, logits),
        )  # fmt: skip
        answers = Answered(
            stages=last.astype(np.int8), predictions=(~right).astype(np.int32), confidences=np.ones(len(ids)),
            costs=np.where(last, 11.0, 1.0),
        )  # fmt: skip
        results = segment_results(answers, chain, segments)
        missed["cost"] += not all(
            low <= 1 + 10 * deferred <= high for low, high in (of.cost_interval for of in results)
        )
        missed["accuracy"] += not all(of.accuracy.low <= 0.9 <= of.accuracy.high for of in results)
        missed["risk"] += not all(of.risk is None or of.risk.low <= 0.1 <= of.risk.high for of in results)
    assert max(missed.values()) <= 0.05 * n_draws + 3 * (0.05 * 0.95 * n_draws) ** 0.5


def test_a_certificate_by_segment_holds_in_each_and_one_of_all_rows_need_not(tmp_path):
    table = write_segmented(tmp_path / "L", n=2000)
    whole = cauc_ray.fit(table, method="rf", certify="risk<=0.1@0.9").threshold_choice.certificate
    policy = cauc_ray.fit(table, method="rf", certify="risk<=0.1@0.9", by="difficulty")
    certificate = policy.threshold_choice.certificate
    assert certificate.by == "difficulty"
    assert [segment.name for segment in certificate.segments] == sorted(NAMES)
    assert sum(segment.n_accepted for segment in certificate.segments) == certificate.n_accepted < whole.n_accepted
    assert all(segment.n_wrong <= 0.1 * segment.n_accepted for segment in certificate.segments)
    policy.save(tmp_path / "policy.json")
    assert cauc_ray.Policy.load(tmp_path / "policy.json").threshold_choice.certificate == certificate
    again = cauc_ray.replace_model(policy, table, {"m0": "m0"})
    assert again.threshold_choice.certificate == certificate


@pytest.mark.soak("full")
def test_the_risk_of_no_segment_is_above_the_limit_more_often_than_promised(tmp_path):
    limit, n_draws, broken, refused = 0.15, 400, 0, 0
    population = write_segmented(tmp_path / "population", seed=99, n=20_000, splits=("test",))
    logits, labels, _ = arrays_of(population, "test", np.arange(20_000))
    segments = logits.pop("difficulty")
    for seed in range(n_draws):
        table = write_segmented(tmp_path / f"{seed}", seed=seed, n=700, splits=SPLITS[:2])
        try:
            policy = cauc_ray.fit(table, method="rf", certify=f"risk<={limit}@0.8", by="difficulty")
        except RiskError:
            refused += 1
            continue
        answers = policy.predict(logits)
        wrong, early = answers.prediction != labels, answers.stage == 0
        broken += any(wrong[early & (segments == name)].mean() > limit for name in NAMES)
    assert refused < n_draws / 2
    assert broken <= 0.2 * n_draws + 2 * (0.16 * n_draws) ** 0.5


def test_what_no_rule_can_certify_is_refused_at_once_and_what_any_rule_must_defer_is_shown(tmp_path):
    table = write_segmented(tmp_path / "L", n=300)
    with pytest.raises(RiskError, match="300 validation examples"):
        cauc_ray.fit(table, certify="risk<=0.005@0.95")
    with pytest.raises(RiskError, match=r"segment .*at least 59"):
        cauc_ray.fit(write_segmented(tmp_path / "small", n=120), certify="risk<=0.05@0.95", by="difficulty")
    policy = cauc_ray.fit(table, method="base", certify="risk<=0.05@0.8")
    arrays, labels, _ = arrays_of(table, "validation", np.arange(300))
    wrong = np.mean(arrays["m0"].argmax(axis=1) != labels)
    least = policy.threshold_choice.certificate.least_deferred
    assert 0 < least == pytest.approx((wrong - 0.05) / (1 - 0.05))
    assert f"any rule defers at least {100 * least:.1f} %" in policy.sheet().text()


def test_a_drift_in_one_segment_is_found_there_and_ends_with_exit_code_3(tmp_path, capsys):
    table = write_segmented(tmp_path / "L", drifted=["odd"], n=1500)
    cauc_ray.fit(table, method="rf", budget=5.0).save(tmp_path / "policy.json")
    arguments = ["check", str(table), "--policy", str(tmp_path / "policy.json"), "--by", "difficulty", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 3
    printed = json.loads(capsys.readouterr().out)
    assert not printed["valid"]
    holds = {segment["name"]: segment["valid"] for segment in printed["segments"]}
    assert holds == {"easy": True, "hard": True, "odd": False}


def test_a_segment_is_compared_with_itself_and_a_new_one_with_nothing(tmp_path):
    table = write_segmented(tmp_path / "L")
    policy = cauc_ray.fit(table, method="rf", budget=5.0)
    assert cauc_ray.check(table, policy, by="difficulty").valid  # though hard examples are unlike the others
    folder = table / "columns" / "split=test"
    ids = [f"{row}" for row in range(900)]
    write_parquet(folder / "part-0.parquet", pa.table({"example_id": ids, "difficulty": ["new", "easy"] * 450}))
    check = cauc_ray.check(table, policy, by="difficulty")
    assert next(segment for segment in check.segments if segment.name == "new").valid is None
    assert check.verdict.endswith("1 of 2 segments cannot be checked")


@pytest.mark.parametrize("values", [np.array(["easy", "hard", "odd"]), np.array([3, 4, 5])], ids=["words", "numbers"])
def test_files_of_arrays_have_segments(values, tmp_path, capsys):
    table = write_segmented(tmp_path / "L", n=300)
    cauc_ray.fit(table, method="rf", budget=5.0).save(tmp_path / "policy.json")
    arrays, labels, _ = arrays_of(table, "test", np.arange(300))
    groups = np.unique(arrays.pop("difficulty"), return_inverse=True)[1]
    for name, array in (arrays | {"labels": labels, "group": values[groups]}).items():
        np.savetxt(tmp_path / f"{name}.csv", array, fmt="%s", delimiter=",", header=name, comments="")
    words = [f"{name}={tmp_path / name}.csv" for name in ("m0", "m1", "group")]
    words += ["--labels", str(tmp_path / "labels.csv"), "--policy", str(tmp_path / "policy.json")]
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *words, "--by", "group", "--json"])
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)["segments"]
    assert [segment["n"] for segment in printed] == np.bincount(groups).tolist()
    assert [segment["name"] for segment in printed] == [str(value) for value in values]


def test_arrays_have_the_certificate_results_and_check_of_a_table_with_their_segments(tmp_path):
    table = write_segmented(tmp_path / "L", n=900, drifted=["odd"])
    order = np.random.default_rng(1).permutation(900)
    calibration, validation, test = (arrays_of(table, split, order) for split in SPLITS)
    claim = {"method": "rf", "certify": "risk<=0.15@0.8", "by": "difficulty"}
    arrays, labels, ids = calibration
    policy = cauc_ray.fit(
        arrays, labels, example_ids=ids, validation=validation, costs=[1.0, 9.0], cost_unit="s", **claim
    )
    of_table = cauc_ray.fit(table, **claim)
    assert policy.threshold_choice.certificate == of_table.threshold_choice.certificate
    assert policy.id == of_table.id
    arrays, labels, ids = test
    of_segments = cauc_ray.evaluate(table, policy, by="difficulty").segments
    for example_ids in (None, ids):
        evaluation = cauc_ray.evaluate(arrays, policy, labels=labels, example_ids=example_ids, by="difficulty")
        for segment, expected in zip(evaluation.as_json()["segments"], of_segments, strict=True):
            assert segment == {key: pytest.approx(value) for key, value in expected.as_json().items()}
    checked = cauc_ray.check(arrays, policy, labels=labels, example_ids=ids, by="difficulty", validation=validation)
    expected = cauc_ray.check(table, of_table, by="difficulty")
    assert [of.as_json() for of in checked.segments] == [of.as_json() for of in expected.segments]
    assert checked.valid is expected.valid is False
    with pytest.raises(ConfigError, match="validation="):
        cauc_ray.check(arrays, policy, labels=labels, example_ids=ids, by="difficulty")
    with pytest.raises(PolicyError, match="other examples"):
        cauc_ray.check(arrays, policy, labels=labels, example_ids=ids, by="difficulty", validation=test)


def test_a_share_of_arrays_is_certified_in_the_segments_of_its_own_rows(tmp_path):
    table = write_segmented(tmp_path / "L", n=1500)
    arrays, labels, _ = arrays_of(table, "calibration", np.random.default_rng(2).permutation(1500))
    np.savez(tmp_path / "arrays.npz", labels=labels, **arrays)
    command = ["fit", str(tmp_path / "arrays.npz"), "--costs", "m0=1,m1=9", "--method", "rf", "--validation", "0.5"]
    command += ["--certify", "risk<=0.05@0.8", "--by", "difficulty", "-o", str(tmp_path / "policy.json")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    policy = cauc_ray.Policy.load(tmp_path / "policy.json")
    assert policy.models == ("m0", "m1")
    certificate = policy.threshold_choice.certificate
    assert [segment.name for segment in certificate.segments] == sorted(NAMES)
    assert certificate.n_accepted < policy.validation.n == 750


def test_a_check_by_segment_leaves_out_the_examples_of_validation_that_the_fit_left_out(tmp_path):
    table = write_segmented(tmp_path / "L")
    arrays, labels, ids = arrays_of(table, "validation", np.arange(900))
    labels[:50] = UNKNOWN_LABEL
    for model in ("m0", "m1"):
        write_logits(table, model, "validation", example_ids=ids, labels=labels, logits=list(arrays[model]))
    policy = cauc_ray.fit(table, method="rf", budget=5.0)
    assert cauc_ray.check(table, policy, by="difficulty").valid


def test_wrong_columns_are_refused(tmp_path):
    table = write_segmented(tmp_path / "L")
    policy = cauc_ray.fit(table, budget=5.0)
    arrays, labels, _ = arrays_of(table, "test", np.arange(900))
    with pytest.raises(ConfigError, match=r"'dificulty'; did you mean 'difficulty'"):
        cauc_ray.evaluate(arrays, policy, by="dificulty")
    with pytest.raises(DataError, match=r"'difficulty' has shape \(1,\)"):
        cauc_ray.evaluate(arrays | {"difficulty": ["x"]}, policy, by="difficulty")
    with pytest.raises(ConfigError, match="give by"):
        cauc_ray.check(arrays, policy, validation=(arrays, labels))
    file = table / "columns" / "split=test" / "part-0.parquet"
    write_parquet(file, pa.table({"example_id": ["0"], "difficulty": ["x"]}))
    with pytest.raises(DataError, match="no value for example '1'"):
        cauc_ray.evaluate(table, policy, by="difficulty")
    shutil.rmtree(file.parent)
    with pytest.raises(DataError, match="--keep difficulty"):
        cauc_ray.evaluate(table, policy, by="difficulty")
