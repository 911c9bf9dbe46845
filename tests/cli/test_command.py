"""The cauc command as scripts and people meet it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from runs import MODELS, by_example, numbered_input, python_pool, saved_pool, split_input, two_model_policy
from synthetic import write_table

import cauc_ray
from cauc_ray.cli.command import main

CHAIN = ["--models", ",".join(MODELS)]
CAUC = Path(sys.executable).with_name("cauc")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a logit table and a policy file."""
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=400)
    cauc_ray.fit(folder / "LOGITS", models=MODELS).save(folder / "policy.json")
    return folder


@pytest.fixture
def cauc(home, tmp_path, command):
    (tmp_path / "LOGITS").symlink_to(home / "LOGITS")
    return command


def test_fit_evaluate_and_predictions(cauc, tmp_path):
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "--method", "rf", "--budget", 9, "-o", "policy.json")
    assert (code, "threshold" in out) == (0, True)
    policy = json.loads((tmp_path / "policy.json").read_text())
    code, out, _ = cauc("evaluate", "LOGITS", "--policy", "policy.json", "--predictions", "p.parquet", "--json")
    result = json.loads(out)
    keys = {"method", "n", "accuracy", "macro_f1", "cost", "cost_unit", "relative_cost", "threshold", "stages"}
    assert (code, keys <= result.keys()) == (0, True)
    assert (result["method"], result["n"], result["cost_unit"]) == ("rf", 400, "GFLOPs")
    assert result["threshold"] == policy["threshold"]
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
        assert {"name", "reached", "answered", "accepted_accuracy"} <= stage.keys()
        assert stage["answered"] == sum(row["stage"] == place for row in rows)
    assert "accuracy" in cauc("evaluate", "LOGITS", "--policy", "policy.json")[1]


def test_points_of_a_sweep_are_what_fit_and_evaluate_say(cauc):
    code, out, _ = cauc("sweep", "LOGITS", *CHAIN, "--methods", "base,rf", "--points", 4, "-o", "s.parquet")
    assert (code, "base" in out) == (0, True)
    rows = pq.ParquetFile("s.parquet").read().to_pylist()
    for method in ("base", "rf"):  # one may cost as much as all models, but they are compared at the same budgets
        assert [row["budget"] for row in rows if row["method"] == method] == pytest.approx([1, 17 / 3, 31 / 3, 15])
    for row in rows:
        assert row["validation_cost"] <= row["budget"] * (1 + 1e-9)
        fit = ["fit", "LOGITS", *CHAIN, "--method", row["method"], "--budget", row["budget"], "-o", "x.json", "--json"]
        assert json.loads(cauc(*fit)[1])["threshold"] == row["threshold"]
        result = json.loads(cauc("evaluate", "LOGITS", "--policy", "x.json", "--json")[1])
        for key in ("accuracy", "macro_f1", "cost", "relative_cost"):
            assert result[key] == pytest.approx(row[key], abs=1e-9)
        assert 1 - result["stages"][-1]["reached"] / 400 == pytest.approx(row["avoided"])


@pytest.mark.usefixtures("ray_session")
def test_a_run_and_all_that_verbs_write_can_be_shown(cauc, tmp_path):
    (tmp_path / "LOGITS").unlink()
    chain = write_table(tmp_path / "LOGITS", n=200)["test"]
    cauc("fit", "LOGITS", *CHAIN, "--method", "base", "-o", "policy.json")
    pool, inputs = saved_pool(tmp_path), split_input(tmp_path, chain)
    run = ["run", pool, "--policy", "policy.json", "--input", inputs, "-o", "out"]
    code, out, _ = cauc(*run, "--json")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (code, json.loads(out)) == (0, summary)
    assert cauc("compare", "LOGITS", *CHAIN, "--methods", "single,base,rf", "-o", "compared")[0] == 0
    assert cauc("sweep", "LOGITS", *CHAIN, "--methods", "rf", "-o", "swept.parquet")[0] == 0
    kinds = {
        "policy.json": "policy",
        "pool.yaml": "pool",
        "LOGITS": "logit table",
        "LOGITS/pool.json": "logit table",
        "out": "run",
        "out/predictions": "predictions",
        "out/ledger": "ledger",
        "input": "input",
        "compared": "comparison",
        "compared/comparison.json": "comparison",
        "compared/curves.parquet": "curves of a comparison",
        "swept.parquet": "sweep",
        ".": "folder",
    }
    for path, kind in kinds.items():
        code, out, _ = cauc("show", path, "--json")
        assert (code, json.loads(out)["kind"]) == (0, kind), path
        assert cauc("show", path)[0] == 0
    held = {"policy.json: policy", "compared: comparison", "swept.parquet: sweep", "out: run"}
    assert held <= set(json.loads(cauc("show", ".", "--json")[1])["holds"])
    code, _, err = cauc(*run)
    assert (code, "not an empty folder" in err) == (2, True)
    code, out, _ = cauc(*run, "--resume", "--json")
    assert (code, json.loads(out)) == (0, summary)


def question_pool():
    model = {"kind": "python", "factory": "user_models:longest"}
    stage = {"name": "longest", "model": model, "cost": {"seconds": 1}, "batch_size": 4}
    return {"name": "questions", "task": "multiple-choice", "stages": [stage]}


@pytest.mark.usefixtures("ray_session")
def test_collect_and_show_its_table(cauc, tmp_path):
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
    assert "why rows failed" in out
    found = json.loads(cauc("show", "L", "--json")[1])
    assert (found["kind"], "25/25/50" in found["note"], len(found["failed"])) == ("logit table", True, 1)


# What the line must name; an empty text where one line is all that is asked.
BAD = {
    "unknown verb": ("fti", "invalid choice: 'fti'"),
    "misspelt flag": ("fit LOGITS --budgt 3", "did you mean '--budget'; see cauc fit --help"),
    "shortened flag": ("fit LOGITS --thresh 0.5", "--thresh"),
    "empty name": ("fit LOGITS --models m0,,m1", "m0,,m1"),
    "costs in words": ("fit LOGITS --costs a,b,c", "costs: "),
    "too few costs": ("fit LOGITS --models m0,m1,m2 --costs 1,2", "2 costs for 3 models"),
    "costs that overflow": ("fit LOGITS --costs m0=1e307,m1=1e308,m2=1.1e308", ""),
    "budget too low": ("fit LOGITS --method rf --budget 0.5", "below the cheapest"),
    "budget no number": ("fit LOGITS --method rf --budget nan", "budget"),
    "budget in words": ("fit LOGITS --budget half", "budget: "),
    "one split twice": ("fit LOGITS --calibration-split validation", "two splits"),
    "no such split": ("evaluate LOGITS --policy policy.json --split tests", "tests"),
    "no such table": ("fit ABSENT", "ABSENT"),
    "no such folder": ("fit LOGITS -o absent/x.json", "absent"),
    "a name too long": (f"fit LOGITS -o {'x' * 300}", "File name too long"),
    "too long to look at": (f"show {'x' * 5000}", "File name too long"),
    "policy is text": ("evaluate LOGITS --policy text.json", "text.json"),
    "policy too deep": ("evaluate LOGITS --policy deep.json", "deep.json"),
    "policy of tomorrow": ("evaluate LOGITS --policy tomorrow.json", "cauc-policy/2"),
    "policy is a pipe": ("evaluate LOGITS --policy pipe", "no policy file"),
    "too many points": ("sweep LOGITS --points 10000000000 -o x.parquet", "points: "),
    "pool with unknown key": ("run pool.yaml --policy policy.json --input in.parquet -o out", "stgaes"),
    "pool of no kind": ("collect kind.yaml --dataset q.csv -o L", "pyhton"),
    "pool is a device": ("collect /dev/zero --dataset q.csv -o L", "/dev/zero"),
    "no column for a python model": ("run x.yaml --policy two.json --input in.parquet -o out", "needs a column 'x'"),
    "collect without a dataset": ("collect good.yaml -o L", "dataset is required"),
    "collect no such benchmark": ("collect good.yaml --dataset mmlu=absent -o L", "absent"),
    "collect unknown columns": ("collect good.yaml --dataset in.parquet --columns id=a -o L", "'id'"),
    "collect columns in words": ("collect good.yaml --dataset in.parquet --columns image -o L", "columns: "),
    "collect text": ("collect good.yaml --dataset text.txt -o L", "text.txt"),
    "collect images for questions": ("collect good.yaml --dataset images.parquet -o L", "multiple-choice"),
    "collect onto a file": ("collect good.yaml --dataset q.csv -o text.txt", "text.txt"),
    "collect below a file": ("collect good.yaml --dataset q.csv -o text.txt/L", "text.txt"),
    "collect onto nothing": ("collect good.yaml --dataset q.csv -o ''", "a path is missing"),
    "collect from folders above": ("collect good.yaml --dataset hub:../.. -o L", "hub:"),
    "collect an unknown split": ("collect good.yaml --dataset q.csv --split tset -o L", "tset"),
    "collect an unknown encoder": ("collect good.yaml --dataset q.csv --embedding b -o L", "unknown encoder 'b'"),
    "an encoder named as a stage": (
        "collect good.yaml --dataset q.csv --embedding org/longest -o L",
        "both named 'longest'",
    ),
    "nothing to show": ("show absent", "absent"),
    "a strange file": ("show text.txt", "text.txt"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_gets_one_line_exit_code_2_and_leaves_nothing(cauc, tmp_path, home, fault):
    policy = (home / "policy.json").read_text()
    (tmp_path / "policy.json").write_text(policy)
    (tmp_path / "two.json").write_text(two_model_policy().to_json())
    (tmp_path / "text.json").write_text("policy")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "tomorrow.json").write_text(json.dumps(json.loads(policy) | {"format": "cauc-policy/2"}))
    os.mkfifo(tmp_path / "pipe")
    inputs = {"x": {"datatype": "FP32", "shape": []}}
    by_x = yaml.safe_load(python_pool(tmp_path, [("by_x", {})] * 2).read_text())
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({**by_x, "inputs": inputs}))
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"name": "p", "task": "multiple-choice", "stgaes": []}))
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "in.parquet")
    pq.write_table(pa.table({"image": [b"x"] * 9, "label": [0] * 9}), tmp_path / "images.parquet")
    (tmp_path / "q.csv").write_text("question,choices,label\n" + 'q,"[""a"",""b""]",0\n' * 9)
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(question_pool()))
    (tmp_path / "kind.yaml").write_text(yaml.safe_dump(question_pool()).replace("python", "pyhton"))
    before = sorted(path.name for path in tmp_path.iterdir())
    words, says = BAD[fault]
    code, out, err = cauc(*(word.strip("'") for word in words.split(" ")))
    assert (code, out, err[:4], err[-1]) == (2, "", "cauc", "\n")
    assert err.count("\n") == 1, err
    assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_outputs_never_replace_inputs_or_what_is_no_file(cauc, tmp_path, home):
    cauc("fit", "LOGITS", *CHAIN, "-o", "policy.json")
    part = "LOGITS/model=m0/split=test/part-0.parquet"
    before = (home / part).read_bytes(), (tmp_path / "policy.json").read_bytes()
    for arguments in (
        ["evaluate", "LOGITS", "--policy", "policy.json", "--predictions", part],
        ["evaluate", "LOGITS", "--policy", "policy.json", "--predictions", "policy.json"],
        ["fit", "LOGITS", *CHAIN, "-o", "LOGITS/pool.json"],
        ["sweep", "LOGITS", *CHAIN, "-o", part],
        ["fit", "LOGITS", *CHAIN, "-o", "/dev/null"],
    ):
        code, out, err = cauc(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
    assert ((home / part).read_bytes(), (tmp_path / "policy.json").read_bytes()) == before
    assert Path("/dev/null").is_char_device()
    (tmp_path / "link.json").symlink_to("policy.json")
    assert cauc("fit", "LOGITS", *CHAIN, "--threshold", 0.5, "-o", "link.json")[0] == 0
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / "policy.json").read_text())["threshold"] == 0.5


def test_free_models_and_names_like_markup_are_shown(cauc, tmp_path):
    (tmp_path / "LOGITS").unlink()
    write_table(tmp_path / "LOGITS", n=60)
    info = json.loads((tmp_path / "LOGITS" / "pool.json").read_text())
    (tmp_path / "LOGITS" / "pool.json").write_text(json.dumps(info | {"cost_unit": "tokens [/usd]", "note": "[red]"}))
    code, out, _ = cauc("fit", "LOGITS", *CHAIN, "--costs", "0,0,0", "-o", "p.json")
    assert (code, "tokens [/usd]" in out) == (0, True)
    assert "[red]" in cauc("show", "LOGITS")[1]
    code, out, _ = cauc("evaluate", "LOGITS", "--policy", "p.json", "--json")
    assert (code, json.loads(out)["relative_cost"]) == (0, None)
    for verb in (["evaluate", "LOGITS", "--policy", "p.json"], ["sweep", "LOGITS", *CHAIN, "--costs", "0,0,0"]):
        assert cauc(*verb)[0] == 0


def test_terminals_without_our_letters_and_readers_that_leave_end_nothing(tmp_path, home):
    options = {"cwd": tmp_path, "capture_output": True, "timeout": 60}
    show = [CAUC, "show", home / "policy.json"]
    assert subprocess.run(show, env={"PYTHONIOENCODING": "ascii"}, **options).returncode == 0
    piped = f"{CAUC} show {home / 'policy.json'} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", piped], **options)
    assert done.returncode in (0, 1)  # the reader may leave before or after
    assert done.stderr == b""


def test_debug_shows_the_traceback(cauc):
    with pytest.raises(Exception, match="not a folder"):
        main(["fit", "ABSENT", *CHAIN, "-o", "x.json", "--debug"])


def test_importing_the_package_and_asking_for_help_load_nothing_heavy():
    def loaded(code):
        look = f"{code}\nprint([m for m in {heavy.split()!r} if m in sys.modules])"
        done = subprocess.run(
            [sys.executable, "-c", f"import sys\n{look}"], capture_output=True, text=True, timeout=120
        )
        return done.stdout.strip()

    heavy = "ray torch transformers sklearn pyarrow pydantic rich numpy"
    assert loaded("import cauc_ray") == "[]"
    help_ = "from cauc_ray.cli.command import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert loaded(help_).endswith("[]")
    heavy = "ray torch transformers sklearn"
    assert loaded("import cauc_ray; cauc_ray.fit, cauc_ray.evaluate, cauc_ray.sweep, cauc_ray.Policy") == "[]"


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_told(tmp_path, home):
    """In a process of its own: Ray may connect only once."""
    content = yaml.safe_load(saved_pool(tmp_path).read_text())
    for stage in content["stages"]:
        stage["model"]["logits"] = str(home / "LOGITS")
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(content))
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "in.parquet")
    run = [CAUC, "run", "good.yaml", "--policy", home / "policy.json", "--input", "in.parquet", "-o", "out"]
    for address in ("localhost:1", "ray://localhost:10001"):
        done = subprocess.run([*run, "--address", address], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert address in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_interrupted_run_stops_at_once_and_says_so(tmp_path):
    log = tmp_path / "calls"
    pool = python_pool(tmp_path, [("slow_by_x", {"seconds": 3.0, "log": str(log)}), ("by_x", {})])
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    run = [CAUC, "run", pool, "--policy", "policy.json", "--input", numbered_input(tmp_path), "-o", "out"]
    process = subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)  # in the first of five calls
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.splitlines()[-1]) == (130, "cauc: stopped: interrupted")
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "summary.json").exists()
    assert len(log.read_text().split()) < 5


@pytest.mark.slow
def test_closed_streams_and_full_disks_are_not_faults(tmp_path, home):
    whole = f"{CAUC} fit {home / 'LOGITS'} {' '.join(CHAIN)} -o {tmp_path / 'p.json'}"

    def shell(command):
        return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)

    assert shell(f"{whole} >&-").returncode == 0
    assert shell(f"{whole} 2>&-").returncode == 0
    lost = shell(f"{CAUC} fit {tmp_path}/absent {' '.join(CHAIN)} -o x.json 2>&-")
    assert (lost.returncode, lost.stdout) == (2, "")
    full = shell(f"{whole} --json > /dev/full")
    assert full.returncode == 2
    assert full.stderr.splitlines()[-1] == "cauc: error: the output: No space left on device"
