"""The cauc command as scripts and people meet it."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from runs import (
    MODELS,
    by_example,
    numbered_input,
    python_pool,
    read_all,
    saved_pool,
    split_input,
    two_model_policy,
)
from synthetic import write_table

import cauc_ray
from cauc_ray.cli.command import main
from cauc_ray.errors import PolicyError
from cauc_ray.policies.policy import Policy

CHAIN = ["--models", ",".join(MODELS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=400)
    return folder


@pytest.fixture(scope="module")
def policy(home):
    """Return a policy file's content."""
    return cauc_ray.fit(home / "LOGITS", models=MODELS).to_json()


@pytest.fixture
def cauc(home, tmp_path, command):
    (tmp_path / "LOGITS").symlink_to(home / "LOGITS")

    return command


def test_fit_evaluate_and_predictions(cauc, tmp_path):
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "--method", "rf", "--budget", 9, "-o", "policy.json")
    assert code == 0
    assert "threshold" in out
    policy = json.loads((tmp_path / "policy.json").read_text())
    code, out, _ = cauc(
        "evaluate", "LOGITS", "--policy", "policy.json", "--split", "test", "--predictions", "p.parquet", "--json"
    )
    assert code == 0
    result = json.loads(out)
    assert {"method", "n", "accuracy", "macro_f1", "cost", "cost_unit", "relative_cost", "threshold", "stages"} <= set(
        result
    )
    assert (result["method"], result["n"], result["cost_unit"]) == ("rf", 400, "GFLOPs")
    assert result["threshold"] == policy["threshold"]
    assert all({"name", "reached", "answered", "accepted_accuracy"} <= set(stage) for stage in result["stages"])
    predictions = pq.ParquetFile("p.parquet").read()
    assert predictions.schema == pa.schema(
        {
            "example_id": pa.string(),
            "prediction": pa.int32(),
            "confidence": pa.float32(),
            "stage": pa.int8(),
            "cost": pa.float32(),
            "label": pa.int32(),
        }
    )
    rows = by_example(predictions).values()
    assert sum(row["prediction"] == row["label"] for row in rows) / 400 == result["accuracy"]
    assert sum(row["cost"] for row in rows) / 400 == pytest.approx(result["cost"])
    for place, stage in enumerate(result["stages"]):
        assert stage["answered"] == sum(row["stage"] == place for row in rows)
    code, out, _ = cauc("evaluate", "LOGITS", "--policy", "policy.json")
    assert code == 0
    assert "accuracy" in out


def test_without_models_the_chain_is_all_of_them_cheapest_first(cauc, policy):
    code, _, _ = cauc("fit", "LOGITS", "-o", "all.json")
    assert code == 0
    assert Path("all.json").read_text() == policy
    code, out, _ = cauc("fit", "LOGITS", "--models", "m2,m1,m0", "-o", "given.json", "--json")
    assert [stage["name"] for stage in json.loads(out)["stages"]] == ["m2", "m1", "m0"]


def test_fit_prints_the_policy_as_json(cauc):
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "--method", "base", "--costs", "4,14,31", "-o", "b.json", "--json")
    assert code == 0
    said = json.loads(out)
    assert [stage["cost"] for stage in said["stages"]] == [4, 14, 31]
    code, out, _ = cauc("show", "b.json", "--json")
    assert json.loads(out)["policy_id"] == said["policy_id"]


def test_macro_f1_can_be_the_objective(cauc):
    arguments = ["fit", "LOGITS", *CHAIN, "--method", "rf", "--budget", 9, "--objective", "macro-f1", "-o", "f.json"]
    code, out, _ = cauc(*arguments, "--json")
    assert code == 0
    assert json.loads(out)["threshold_choice"]["objective"] == "macro-f1"


def test_a_given_threshold_needs_no_validation_split(cauc):
    code, out, _ = cauc(
        "fit", "LOGITS", *CHAIN, "--method", "rf", "--threshold", 0.75, "--validation-split", "none", "-o", "t.json",
        "--json",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["threshold"] == 0.75


def test_sweep_writes_every_operating_point_and_shows_a_few(cauc):
    code, out, _ = cauc("sweep", "LOGITS", *CHAIN, "--methods", "base,rf,margin", "-o", "sweep.parquet")
    assert code == 0
    assert all(name in out for name in ("base", "rf", "margin"))
    rows = pq.ParquetFile("sweep.parquet").read().to_pylist()
    assert {row["method"] for row in rows} == {"base", "rf", "margin"}
    for method in ("base", "rf", "margin"):
        own = [row for row in rows if row["method"] == method]
        assert len(own) > 200
        for one, other in pairwise(own):
            assert one["threshold"] < other["threshold"]
            assert one["cost"] <= other["cost"] + 1e-12
            assert one["validation_cost"] <= other["validation_cost"] + 1e-12
    code, out, _ = cauc("sweep", "LOGITS", *CHAIN, "--points", 7, "-o", "few.parquet", "--json")
    assert code == 0
    assert json.loads(out)["points"] == 21
    few = pq.ParquetFile("few.parquet").read().to_pylist()
    for row in few:
        assert row["validation_cost"] <= row["budget"] * (1 + 1e-9)
        code, out, _ = cauc(
            "fit", "LOGITS", *CHAIN, "--method", row["method"], "--budget", row["budget"], "-o", "x.json", "--json"
        ) if row["method"] != "margin" else (0, None, "")  # fmt: skip
        if out:
            assert json.loads(out)["threshold"] == row["threshold"]


def test_points_of_a_sweep_are_what_evaluate_says(cauc):
    cauc("sweep", "LOGITS", *CHAIN, "--methods", "base,rf", "--points", 4, "-o", "s.parquet")
    for row in pq.ParquetFile("s.parquet").read().to_pylist():
        cauc("fit", "LOGITS", *CHAIN, "--method", row["method"], "--threshold", row["threshold"], "-o", "x.json")
        result = json.loads(cauc("evaluate", "LOGITS", "--policy", "x.json", "--json")[1])
        for key in ("accuracy", "macro_f1", "cost", "relative_cost"):
            assert result[key] == pytest.approx(row[key], abs=1e-9)
        assert 1 - result["stages"][-1]["reached"] / 400 == pytest.approx(row["avoided"])


def test_no_fitted_number_ever_sees_the_test_split(cauc, tmp_path):
    """Shuffling the test labels changes what is measured and nothing that is fitted or chosen."""
    (tmp_path / "LOGITS").unlink()
    write_table(tmp_path / "LOGITS", n=200)
    cauc("sweep", "LOGITS", *CHAIN, "-o", "one.parquet")
    for model in MODELS:
        path = tmp_path / "LOGITS" / f"model={model}" / "split=test" / "part-0.parquet"
        table = pq.ParquetFile(path).read()
        pq.write_table(table.set_column(1, "label", pa.chunked_array([table.column("label").to_pylist()[::-1]])), path)
    cauc("sweep", "LOGITS", *CHAIN, "-o", "two.parquet")
    one, two = (pq.ParquetFile(name).read() for name in ("one.parquet", "two.parquet"))
    for column in ("method", "threshold", "validation_accuracy", "validation_cost", "cost", "avoided"):
        assert one.column(column).equals(two.column(column))
    assert not one.column("accuracy").equals(two.column("accuracy"))


@pytest.mark.usefixtures("ray_session")
def test_run_and_inspect_its_output(cauc, tmp_path, home):
    (tmp_path / "LOGITS").unlink()
    chain = write_table(tmp_path / "LOGITS", n=200)["test"]
    cauc("fit", "LOGITS", *CHAIN, "--method", "base", "-o", "policy.json")
    pool, inputs = saved_pool(tmp_path), split_input(tmp_path, chain)
    run = ["run", pool, "--policy", "policy.json", "--input", inputs, "-o", "out"]
    code, out, _ = cauc(*run, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out" / "summary.json").read_text())
    kinds = {"policy.json": "policy", "pool.yaml": "pool", "LOGITS": "logit table", "out": "run"}
    kinds |= {"out/predictions": "predictions", "out/ledger": "ledger", "input": "input"}
    for path, kind in kinds.items():
        code, out, _ = cauc("show", path, "--json")
        assert (code, json.loads(out)["kind"]) == (0, kind)
        assert cauc("show", path)[0] == 0
    code, _, err = cauc(*run)
    assert code == 2
    assert "not an empty folder" in err
    code, out, _ = cauc(*run, "--resume", "--json")
    assert (code, json.loads(out)) == (0, json.loads((tmp_path / "out" / "summary.json").read_text()))


def question_pool():
    model = {"kind": "python", "factory": "user_models:longest"}
    stage = {"name": "longest", "model": model, "cost": {"seconds": 1}, "batch_size": 4}
    return {"name": "questions", "task": "multiple-choice", "stages": [stage]}


@pytest.mark.usefixtures("ray_session")
def test_collect_and_inspect_its_table(cauc, tmp_path):
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(question_pool()))
    rows = [json.dumps({"stem": f"{n}?", "a": "x" * (n % 5 + 1), "b": "xxx", "key": "AB"[n % 2]}) for n in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join([*rows, json.dumps({"stem": "41?", "key": None})]))
    collect = ["collect", "pool.yaml", "--dataset", "q.jsonl", "--columns", "question=stem,choices=a+b,label=key"]
    code, out, err = cauc(*collect, "-o", "L", "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    (model,) = summary["models"]
    assert (model["name"], model["n_failed"], model["cost"], summary["cost_unit"]) == ("longest", 1, 1.0, "s")
    assert sum(split["rows"] for split in model["splits"].values()) == 40
    assert model["accuracy_interval"][0] < model["accuracy"] < model["accuracy_interval"][1]
    code, out, err = cauc(*collect, "-o", "L")
    assert (code, err) == (0, "")
    assert "longest" in out
    assert "why rows failed" in out
    code, out, _ = cauc("show", "L", "--json")
    found = json.loads(out)
    assert (code, found["kind"]) == (0, "logit table")
    assert "25/25/50" in found["note"]
    assert len(found["failed"]) == 1


BAD = {
    "unknown verb": ["fti"],
    "unknown flag": ["fit", "LOGITS", *CHAIN, "-o", "x.json", "--bugdet", "3"],
    "shortened flag": ["fit", "LOGITS", *CHAIN, "-o", "x.json", "--thresh", "0.5"],
    "one model twice": ["sweep", "LOGITS", "--models", "m0,m0", "-o", "x.parquet"],
    "empty name": ["fit", "LOGITS", "--models", "m0,,m1", "-o", "x.json"],
    "costs in words": ["fit", "LOGITS", *CHAIN, "--costs", "a,b,c", "-o", "x.json"],
    "too few costs": ["fit", "LOGITS", *CHAIN, "--costs", "1,2", "-o", "x.json"],
    "negative cost": ["fit", "LOGITS", *CHAIN, "--costs", "-1,2,3", "-o", "x.json"],
    "unknown model": ["fit", "LOGITS", "--models", "m0,m11", "-o", "x.json"],
    "unknown method": ["fit", "LOGITS", *CHAIN, "--method", "fr", "-o", "x.json"],
    "unknown split": ["fit", "LOGITS", *CHAIN, "--calibration-split", "calib", "-o", "x.json"],
    "one split twice": ["fit", "LOGITS", *CHAIN, "--calibration-split", "validation", "-o", "x.json"],
    "no validation": ["fit", "LOGITS", *CHAIN, "--budget", "9", "--validation-split", "none", "-o", "x.json"],
    "budget too low": ["fit", "LOGITS", *CHAIN, "--method", "rf", "--budget", "0.5", "-o", "x.json"],
    "budget no number": ["fit", "LOGITS", *CHAIN, "--method", "rf", "--budget", "nan", "-o", "x.json"],
    "budget and threshold": ["fit", "LOGITS", *CHAIN, "--budget", "9", "--threshold", "0.5", "-o", "x.json"],
    "objective in vain": ["fit", "LOGITS", *CHAIN, "--objective", "macro-f1", "-o", "x.json"],
    "no such table": ["fit", "ABSENT", *CHAIN, "-o", "x.json"],
    "no such folder": ["fit", "LOGITS", *CHAIN, "-o", "absent/x.json"],
    "no such policy": ["evaluate", "LOGITS", "--policy", "absent.json"],
    "policy is text": ["evaluate", "LOGITS", "--policy", "text.json"],
    "policy of tomorrow": ["evaluate", "LOGITS", "--policy", "tomorrow.json"],
    "no such test split": ["evaluate", "LOGITS", "--policy", "policy.json", "--split", "tests"],
    "unknown sweep method": ["sweep", "LOGITS", *CHAIN, "--methods", "base,magrin", "-o", "x.parquet"],
    "costs that overflow": ["fit", "LOGITS", *CHAIN, "--costs", "1e307,1e308,1.1e308", "-o", "x.json"],
    "a method twice": ["sweep", "LOGITS", *CHAIN, "--methods", "base,base", "-o", "x.parquet"],
    "a line break": ["fit", "LOGITS", *CHAIN, "-o", "x.json", "one\ntwo"],
    "too many points": ["sweep", "LOGITS", *CHAIN, "--points", "10000000000", "-o", "x.parquet"],
    "policy too deep": ["evaluate", "LOGITS", "--policy", "deep.json"],
    "one point": ["sweep", "LOGITS", *CHAIN, "--points", "1", "-o", "x.parquet"],
    "no such pool": ["run", "absent.yaml", "--policy", "policy.json", "--input", "in.parquet", "-o", "out"],
    "pool with unknown key": ["run", "pool.yaml", "--policy", "policy.json", "--input", "in.parquet", "-o", "out"],
    "no such cluster": [
        "run", "good.yaml", "--policy", "policy.json", "--input", "in.parquet", "-o", "out", "--address", "localhost:1",
    ],
    "collect without a dataset": ["collect", "good.yaml", "-o", "L"],
    "collect no such dataset": ["collect", "good.yaml", "--dataset", "absent", "-o", "L"],
    "collect a benchmark that is not there": ["collect", "good.yaml", "--dataset", "mmlu=absent", "-o", "L"],
    "collect unknown columns": ["collect", "good.yaml", "--dataset", "in.parquet", "--columns", "id=a", "-o", "L"],
    "collect columns in words": ["collect", "good.yaml", "--dataset", "in.parquet", "--columns", "image", "-o", "L"],
    "collect from no question": ["collect", "good.yaml", "--dataset", "in.parquet", "-o", "L"],
    "collect text": ["collect", "good.yaml", "--dataset", "text.txt", "-o", "L"],
    "collect images for questions": ["collect", "good.yaml", "--dataset", "images.parquet", "-o", "L"],
    "collect onto a file": ["collect", "good.yaml", "--dataset", "q.csv", "-o", "text.txt"],
    "collect onto nothing": ["collect", "good.yaml", "--dataset", "q.csv", "-o", ""],
    "collect below a file": ["collect", "good.yaml", "--dataset", "q.csv", "-o", "text.txt/L"],
    "collect onto a long name": ["collect", "good.yaml", "--dataset", "q.csv", "-o", "x" * 300],
    "collect no encoder": ["collect", "good.yaml", "--dataset", "q.csv", "--embedding", "", "-o", "L"],
    "collect a long encoder": ["collect", "good.yaml", "--dataset", "q.csv", "--embedding", "x" * 300, "-o", "L"],
    "collect from folders above": ["collect", "good.yaml", "--dataset", "hub:../..", "-o", "L"],
    "collect with a device as pool": ["collect", "/dev/zero", "--dataset", "q.csv", "-o", "L"],
    "collect an unknown split": ["collect", "good.yaml", "--dataset", "q.csv", "--split", "tset", "-o", "L"],
    "collect an unknown stage": ["collect", "good.yaml", "--dataset", "q.csv", "--models", "b", "-o", "L"],
    "collect an unknown encoder": ["collect", "good.yaml", "--dataset", "q.csv", "--embedding", "b", "-o", "L"],
    "collect with a seed below 0": ["collect", "good.yaml", "--dataset", "q.csv", "--seed", "-1", "-o", "L"],
    "collect from a pool of no kind": ["collect", "kind.yaml", "--dataset", "q.csv", "-o", "L"],
    "nothing to inspect": ["show", "absent"],
    "a strange file": ["show", "text.txt"],
}  # fmt: skip


@pytest.mark.parametrize("fault", sorted(set(BAD) - {"no such cluster"}))
def test_bad_input_gets_one_line_exit_code_2_and_leaves_nothing(cauc, tmp_path, policy, fault):
    (tmp_path / "policy.json").write_text(policy)
    (tmp_path / "text.json").write_text("policy")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "tomorrow.json").write_text(json.dumps(json.loads(policy) | {"format": "cauc-policy/2"}))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "task": "multiple-choice", "stgaes": []}))
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"image": [b"x"] * 9, "label": [0] * 9}), tmp_path / "images.parquet")
    (tmp_path / "q.csv").write_text("question,choices,label\n" + 'q,"[""a"",""b""]",0\n' * 9)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(question_pool()))
    (tmp_path / "kind.yaml").write_text(yaml.safe_dump(question_pool()).replace("python", "pyhton"))
    before = sorted(path.name for path in tmp_path.iterdir())
    code, out, err = cauc(*BAD[fault])
    assert code == 2
    assert out == ""
    assert err.startswith("cauc")
    assert err.endswith("\n")
    assert err.count("\n") == 1, err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_encoder_that_would_be_taken_for_a_stage_is_refused(cauc, tmp_path):
    (tmp_path / "q.csv").write_text("question,choices,label\n" + 'q,"[""a"",""b""]",0\n' * 9)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(question_pool()))
    code, _, err = cauc("collect", "good.yaml", "--dataset", "q.csv", "--embedding", "org/longest", "-o", "L")
    assert (code, err.count("\n")) == (2, 1)
    assert "both named 'longest'" in err


def test_outputs_never_replace_inputs_or_what_is_no_file(cauc, tmp_path, home):
    cauc("fit", "LOGITS", *CHAIN, "-o", "policy.json")
    part = "LOGITS/model=m0/split=test/part-0.parquet"
    before = (home / part).read_bytes(), (tmp_path / "policy.json").read_bytes()
    for arguments in (
        ["evaluate", "LOGITS", "--policy", "policy.json", "--predictions", part],
        ["evaluate", "LOGITS", "--policy", "policy.json", "--predictions", "policy.json"],
        ["evaluate", "LOGITS", "--policy", "policy.json", "--predictions", ""],
        ["fit", "LOGITS", *CHAIN, "-o", "LOGITS/pool.json"],
        ["sweep", "LOGITS", *CHAIN, "-o", part],
        ["fit", "LOGITS", *CHAIN, "-o", "/dev/null"],
        ["fit", "LOGITS", *CHAIN, "-o", "x" * 300],
    ):
        code, out, err = cauc(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
    assert ((home / part).read_bytes(), (tmp_path / "policy.json").read_bytes()) == before
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.json").symlink_to("policy.json")
    assert cauc("fit", "LOGITS", *CHAIN, "--threshold", 0.5, "-o", "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "policy.json").read_text())["threshold"] == 0.5
    assert cauc("fit", "LOGITS", *CHAIN, "-o", "y" * 250)[0] == 0


def test_models_that_cost_nothing_have_no_relative_cost(cauc):
    code, out, _ = cauc("sweep", "LOGITS", *CHAIN, "--costs", "0,0,0", "-o", "s.parquet", "--json")
    assert code == 0
    assert {row["relative_cost"] for row in json.loads(out)["highlights"]} == {None}
    cauc("fit", "LOGITS", *CHAIN, "--costs", "0,0,0", "-o", "p.json")
    code, out, _ = cauc("evaluate", "LOGITS", "--policy", "p.json", "--json")
    assert (code, json.loads(out)["relative_cost"]) == (0, None)
    assert cauc("evaluate", "LOGITS", "--policy", "p.json")[0] == 0


def test_names_are_shown_as_they_are(cauc, tmp_path):
    (tmp_path / "LOGITS").unlink()
    write_table(tmp_path / "LOGITS", n=60)
    info = json.loads((tmp_path / "LOGITS" / "pool.json").read_text())
    (tmp_path / "LOGITS" / "pool.json").write_text(json.dumps(info | {"cost_unit": "tokens [/usd]", "note": "[red]"}))
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "-o", "p.json")
    assert code == 0
    assert "tokens [/usd]" in out
    assert "[red]" in cauc("show", "LOGITS")[1]


def test_terminals_without_our_letters_and_readers_that_leave_end_nothing(tmp_path, home):
    cauc = Path(sys.executable).with_name("cauc")
    fit = [cauc, "fit", home / "LOGITS", *CHAIN, "-o", "policy.json"]
    options = {"cwd": tmp_path, "capture_output": True, "timeout": 60}
    assert subprocess.run(fit, env={"PYTHONIOENCODING": "ascii"}, **options).returncode == 0
    piped = f"{cauc} show policy.json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], **options)
    assert done.returncode in (0, 1)  # the reader may leave before or after
    assert done.stderr == b""


def test_paths_that_the_system_does_not_take_are_bad_input(cauc):
    code, out, err = cauc("show", "x" * 5000)
    assert (code, out) == (2, "")
    assert err.endswith(": File name too long\n")


def test_debug_shows_the_traceback(cauc):
    with pytest.raises(Exception, match="not a folder"):
        main(["fit", "ABSENT", *CHAIN, "-o", "x.json", "--debug"])


def test_warnings_are_one_line_each(cauc):
    code, out, err = cauc("fit", "LOGITS", *CHAIN, "--costs", "3,2,1", "-o", "x.json", "--json")
    assert code == 0
    assert err.splitlines()[0].startswith("cauc: warning: 'm1' costs 2")
    assert all(line.startswith("cauc: warning: ") for line in err.splitlines())
    assert json.loads(out)["method"] == "base"


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def test_importing_the_package_and_asking_for_help_load_nothing_heavy():
    heavy = "ray torch transformers sklearn pyarrow pydantic rich numpy"
    look = f"import sys; print([m for m in {heavy.split()!r} if m in sys.modules])"
    assert python("-c", f"import cauc_ray; {look}").stdout.strip() == "[]"
    code = f"from cauc_ray.cli.command import main\ntry: main(['--help'])\nexcept SystemExit: pass\n{look}"
    assert python("-c", code).stdout.strip().endswith("[]")
    code = f"import cauc_ray; cauc_ray.fit, cauc_ray.evaluate, cauc_ray.sweep, cauc_ray.Policy; {look}"
    loaded = python("-c", code).stdout
    assert not any(repr(m) in loaded for m in ("ray", "torch", "transformers", "sklearn"))


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_told(tmp_path, home):
    """In a process of its own: Ray may connect only once."""
    cauc = Path(sys.executable).with_name("cauc")
    fit = [cauc, "fit", home / "LOGITS", *CHAIN, "-o", "policy.json"]
    subprocess.run(fit, cwd=tmp_path, check=True, capture_output=True)
    pool = saved_pool(tmp_path)
    content = yaml.safe_load(pool.read_text())
    for stage in content["stages"]:
        stage["model"]["logits"] = str(home / "LOGITS")
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(content))
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "in.parquet")
    for address in ("localhost:1", "ray://localhost:10001"):
        arguments = [cauc, *BAD["no such cluster"][:-1], address]
        done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert address in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_run_stops_at_once_and_says_so(tmp_path):
    log = tmp_path / "calls"
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 3.0, "log": str(log)}), ("by_x", {})])
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    run = ["run", pool, "--policy", "policy.json", "--input", numbered_input(tmp_path), "-o", "out"]
    executable = Path(sys.executable).with_name("cauc")
    process = subprocess.Popen(
        [executable, *run], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # in the first of five calls
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "cauc: stopped: interrupted"
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "summary.json").exists()
    assert len(log.read_text().split()) < 5


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_collect_killed_outright_goes_on_and_has_every_row_once(cauc, tmp_path):
    pool = question_pool()
    pool["stages"][0] |= {"batch_size": 16}
    # Slow for as long as it is to be killed: what is left at that moment takes longer than killing.
    told = {"path": str(tmp_path / "killed"), "seconds": 0.08}
    pool["stages"][0]["model"] = {"kind": "python", "factory": "user_models:longest_slow_until", "kwargs": told}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(pool))
    rows = [{"id": f"q{n}", "question": f"{n}?", "choices": ["a", "b" * (n % 7 + 1)], "label": 1} for n in range(2000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "q.parquet")
    collect = ["collect", "pool.yaml", "--dataset", "q.parquet", "--split", "all", "-o", "L", "--json"]
    small_commits = Path(__file__).parents[1] / "execution" / "small_commits.py"
    killed = [sys.executable, small_commits, *collect]
    first = subprocess.Popen(killed, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folder = tmp_path / "L" / "model=longest" / "split=all"
    deadline = time.monotonic() + 90
    while len(list(folder.glob("part-*.parquet"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    first.kill()
    first.communicate(timeout=60)
    time.sleep(2.0)  # the controller ends with its driver
    (tmp_path / "killed").touch()
    parts = {path.name: path.read_bytes() for path in folder.glob("part-*.parquet")}
    assert 2 <= len(parts) < 8
    code, out, _ = cauc(*collect)
    assert (code, json.loads(out)["models"][0]["splits"]["all"]["rows"]) == (0, 2000)
    table = by_example(read_all(folder))
    assert {example: row["logits"] for example, row in table.items()} == {
        row["id"]: [float(len(choice)) for choice in row["choices"]] for row in rows
    }
    kept = sorted(parts)[:-1]  # the last one may not have been noted yet
    assert all((folder / name).read_bytes() == parts[name] for name in kept)


@pytest.mark.slow
def test_closed_streams_and_full_disks_are_not_faults(tmp_path, home):
    cauc = Path(sys.executable).with_name("cauc")
    whole = f"{cauc} fit {home / 'LOGITS'} {' '.join(CHAIN)} -o {tmp_path / 'p.json'}"

    def shell(command):
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)

    assert shell(f"{whole} >&-").returncode == 0
    assert shell(f"{whole} 2>&-").returncode == 0
    lost = shell(f"{cauc} fit {tmp_path}/absent {' '.join(CHAIN)} -o x.json 2>&-")
    assert (lost.returncode, lost.stdout) == (2, "")
    full = shell(f"{whole} --json > /dev/full")
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1] == "cauc: error: the output: No space left on device"


def test_a_policy_is_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PolicyError, match="there is no policy file"):
        Policy.load(tmp_path / "pipe")


def test_everything_that_verbs_write_can_be_shown(cauc, home):
    assert cauc("fit", "LOGITS", *CHAIN, "--method", "rf", "-o", "policy.json")[0] == 0
    assert cauc("compare", "LOGITS", *CHAIN, "--methods", "single,base,rf", "-o", "compared")[0] == 0
    assert cauc("sweep", "LOGITS", *CHAIN, "--methods", "rf", "-o", "swept.parquet")[0] == 0
    kinds = {
        "policy.json": "policy",
        "compared": "comparison",
        "compared/comparison.json": "comparison",
        "compared/curves.parquet": "curves of a comparison",
        "swept.parquet": "sweep",
        "LOGITS": "logit table",
        "LOGITS/pool.json": "logit table",
        ".": "folder",
    }
    for path, kind in kinds.items():
        code, out, _ = cauc("show", path, "--json")
        assert (code, json.loads(out)["kind"]) == (0, kind), path
        assert cauc("show", path)[0] == 0
    shown = json.loads(cauc("show", ".", "--json")[1])["holds"]
    assert {"policy.json: policy", "compared: comparison", "swept.parquet: sweep"} <= set(shown)


def test_a_misspelt_flag_is_answered_with_the_nearest(cauc):
    code, out, err = cauc("fit", "LOGITS", *CHAIN, "--budgt", "4")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "did you mean '--budget'; see cauc fit --help" in err
