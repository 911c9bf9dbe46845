"""The cauc command as scripts and people meet it."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from runs import (
    MODELS,
    answers_of,
    numbered_input,
    python_pool,
    read_all,
    saved_pool,
    split_input,
    two_model_policy,
    write_pool,
)
from synthetic import write_table

import cauc_ray
from cauc_ray.cli.command import main
from cauc_ray.data.answer_table import write_answers
from cauc_ray.files.paths import path_of

CHAIN = ["--models", ",".join(MODELS)]
CAUC = Path(sys.executable).with_name("cauc")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a logit table and a policy file."""
    folder = tmp_path_factory.mktemp("home")
    write_table(folder / "LOGITS", n=400)
    cauc_ray.fit(folder / "LOGITS", models=MODELS).save(folder / "policy.json")
    return folder


def test_a_rule_of_answers_is_found_in_the_current_folder(tmp_path):
    """Of the command itself: Python finds modules there where it is given a module or a program."""
    (tmp_path / "spoken.py").write_text("def first(answer):\n    return answer[:1]\n")
    for split in ("calibration", "validation"):
        texts, sure = ["Yes", "No"] * 60, {"self": [0.5] * 120}
        ids = [f"{split}{row}" for row in range(120)]
        write_answers(tmp_path / "ANSWERS", "one", split, ids, texts, sure, [True] * 90 + [False] * 30, cost=1.0)
    info = tmp_path / "ANSWERS" / "pool.json"
    info.write_text(info.read_text().replace('"exact"', '"spoken:first"'))
    fit = [CAUC, "fit", "ANSWERS", "-o", "policy.json"]
    done = subprocess.run(fit, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "policy.json").read_text())["stages"][0]["rule"] == "spoken:first"


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
        "compared/summary.parquet": "summary of a comparison",
        ".": "folder",
    }
    for path, kind in kinds.items():
        code, out, _ = cauc("show", path, "--json")
        assert (code, json.loads(out)["kind"]) == (0, kind), path
        assert cauc("show", path)[0] == 0
    held = {"policy.json: policy", "compared: comparison", "out: run"}
    assert held <= set(json.loads(cauc("show", ".", "--json")[1])["holds"])
    deep = tmp_path / "above" / "one" / "two" / "three"  # a whole disk is not searched
    shutil.copytree(tmp_path / "compared", deep / "compared")
    assert json.loads(cauc("show", "above/one/two", "--json")[1])["holds"] == ["three: folder"]
    assert cauc("show", "above")[0] == 2
    code, _, err = cauc(*run)
    assert (code, "not an empty folder" in err) == (2, True)
    code, out, _ = cauc(*run, "--resume", "--json")
    assert (code, json.loads(out)) == (0, summary)


@pytest.mark.usefixtures("ray_session")
def test_collect_and_show_its_table(cauc, tmp_path):
    model = {"kind": "python", "factory": "user_models:longest"}
    write_pool(tmp_path, [{"name": "longest", "model": model, "cost": {"seconds": 1}, "batch_size": 4}])
    rows = [json.dumps({"stem": f"{n}?", "a": "x" * (n % 5 + 1), "b": "xxx", "key": "AB"[n % 2]}) for n in range(40)]
    (tmp_path / "q.jsonl").write_text("\n".join([*rows, json.dumps({"stem": "41?", "key": None})]))
    collect = ["collect", "pool.yaml", "--dataset", "q.jsonl", "--columns", "question=stem,choices=a+b,label=key"]
    code, out, err = cauc(*collect, "-o", "L", "--json")
    assert (code, err.count("\n"), "starting 1 stage" in err) == (5, 1, True)
    summary = json.loads(out)
    (model,) = summary["models"]
    assert (model["name"], model["n_failed"], model["cost"], summary["cost_unit"]) == ("longest", 1, 1.0, "s")
    assert sum(split["rows"] for split in model["splits"].values()) == 40
    assert model["accuracy_interval"][0] < model["accuracy"] < model["accuracy_interval"][1]
    code, out, err = cauc(*collect, "-o", "L")
    assert (code, err) == (5, "")
    assert "why rows failed" in out
    listing = json.loads(cauc("show", "L", "--json")[1])
    assert (listing["kind"], "25/25/50" in listing["note"], len(listing["failed"])) == ("logit table", True, 1)


def test_a_service_that_does_not_answer_is_worth_a_retry_and_a_wrong_address_is_not(cauc):
    cauc("fit", "LOGITS", *CHAIN, "-o", "policy.json")
    for url, expected in (("http://127.0.0.1:1", 4), ("127.0.0.1:1", 2)):
        code, out, err = cauc("policy", "set", "policy.json", "--url", url, "--name", "m")
        assert (code, out, err.count("\n"), url in err) == (expected, "", 1, True)


def test_help_shows_common_options_first_and_each_option_once(cauc):
    code, out, _ = cauc("fit", "--help")
    flags = re.findall(r"^  (?:-o PATH, )?(--[\w-]+)", out, re.MULTILINE)
    titles = [line for line in out.splitlines() if re.fullmatch(r"\w.*:", line)]
    assert (code, len(flags)) == (0, len({*flags}))
    assert titles.index("common options:") < titles.index("more options:") < titles.index("Ray:")
    assert flags.index("--budget") < flags.index("--calibrator") < flags.index("--calibration-split")
    assert "(default: policy.json)" in out


@pytest.mark.parametrize(
    ("words", "config", "spelled"),
    [
        ("--calibration-split validation", None, "--calibration-split and --validation-split must"),
        ("--price -1", None, "--price: "),
        ("", None, "LOGITS is required"),
        ("", {"price": -1}, "fit.yaml: price: "),
        ("", {"calibration_split": "validation"}, "fit.yaml: calibration_split and validation_split must"),
        ("--price -1", {"price": 1}, "error: --price: "),
        ("--price 1", {"search": True}, "leave one of search and --price out"),
        ("", {"costs": {"m0": -1}}, "fit.yaml: costs.m0: "),
        ("", {"resources": {"num_cpu": 1}, "shards": 2}, "fit.yaml: resources: unknown key 'num_cpu'"),
    ],
)
def test_errors_name_options_as_they_were_given(cauc, tmp_path, words, config, spelled):
    (tmp_path / "fit.yaml").write_text(yaml.safe_dump({"logits": "LOGITS", **(config or {})}))
    source = ["LOGITS"] if config is None and words else [] if config is None else ["--config", "fit.yaml"]
    code, _, err = cauc("fit", *source, *words.split())
    assert (code, err.count("\n"), spelled in err) == (2, 1, True), err


def test_a_config_lists_values_as_yaml_or_as_a_flag_does(cauc, tmp_path):
    for name, models in (("yaml", ["m0", "m2"]), ("text", "m0,m2")):
        content = {"logits": "LOGITS", "models": models, "costs": "1,10", "output": f"{name}.json"}
        (tmp_path / "fit.yaml").write_text(yaml.safe_dump(content))
        assert cauc("fit", "--config", "fit.yaml")[0] == 0
    assert (tmp_path / "yaml.json").read_text() == (tmp_path / "text.json").read_text()


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
    policy = json.loads((tmp_path / "p.json").read_text())
    policy["stages"][0]["name"] = "a\x1b[2Jb"
    (tmp_path / "named.json").write_text(json.dumps(policy))
    code, _, err = cauc("show", "named.json")
    assert (code, "a\\x1b[2Jb" in err, "\x1b" in err) == (2, True, False)
    assert cauc("compare", "LOGITS", *CHAIN, "--methods", "rf", "--costs", "0,0,0")[0] == 0


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
    assert loaded(help_.replace("--help", "--completion', 'bash")).endswith("[]")
    assert (
        loaded("import cauc_ray; cauc_ray.fit, cauc_ray.evaluate, cauc_ray.compare, cauc_ray.plan, cauc_ray.Policy")
        == "[]"
    )


@pytest.mark.parametrize(
    ("number", "word"),
    [
        pytest.param(signal.SIGINT, "interrupted", marks=pytest.mark.soak("full")),
        pytest.param(signal.SIGTERM, "terminated", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_says_so_ends_its_cluster_and_keeps_what_is_finished(tmp_path, monkeypatch, number, word):
    log = tmp_path / "calls"
    pool = python_pool(
        tmp_path, [("slow_by_x", {"seconds": 3.0, "log": str(log)}), ("by_x", {})], batch_size=32, batch_wait_s=0.1
    )
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    numbered_input(tmp_path, 160)
    words = ["run", pool, "--policy", "policy.json", "--input", "input.parquet", "-o", "out"]
    script = (
        "from cauc_ray.execution import runner; runner.BLOCK_ROWS = 32; from cauc_ray.cli.command import main; main()"
    )
    run = [sys.executable, "-c", script, *words]
    process = subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (log.exists() and len(log.read_text().split()) > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) > 3  # Ray's
    process.send_signal(number)  # in the third of five calls
    _, err = process.communicate(timeout=60)
    assert psutil.wait_procs(children, timeout=20)[1] == []
    assert (process.returncode, err.splitlines()[-1]) == (128 + number, f"cauc: stopped: {word}")
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "summary.json").exists()
    assert 0 < len(answers_of(tmp_path / "out")) <= 96
    assert sum(read_all(tmp_path / "out" / "ledger").column("batch").to_pylist()) >= 32
    assert len(log.read_text().split()) < 5


@pytest.mark.slow
def test_closed_streams_full_disks_and_terminals_without_our_letters_are_not_faults(tmp_path, home):
    whole = f"{CAUC} fit {home / 'LOGITS'} {' '.join(CHAIN)} -o {tmp_path / 'p.json'}"
    show = f"{CAUC} show {home / 'policy.json'}"

    def shell(command):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout, done.stderr

    assert shell(f"PYTHONIOENCODING=ascii {show}")[0] == 0
    code, _, err = shell(f"{show} | true; exit ${{PIPESTATUS[0]}}")
    assert (code in (0, 1), err) == (True, "")  # the reader may leave before or after
    assert shell(f"{whole} >&-")[0] == shell(f"{whole} 2>&-")[0] == 0
    assert shell(f"{CAUC} fit absent {' '.join(CHAIN)} -o x.json 2>&-")[:2] == (2, "")
    code, _, err = shell(f"{whole} --json > /dev/full")
    assert (code, err.splitlines()[-1]) == (2, "cauc: error: the output: No space left on device")


@pytest.mark.parametrize("method", ["duo", "single", "rf"])
def test_methods_of_one_setting_are_compared_at_points_under_the_name_of_their_chain(cauc, method):
    code, out, _ = cauc("compare", "LOGITS", *CHAIN, "--methods", method, "--points", 5)
    assert (code, "LOGITS: " in out, "None" in out) == (0, True, False)


def test_show_takes_a_uri(cauc, home, s3):
    folder = f"{s3}/shown"
    cauc_ray.Policy.load(home / "policy.json").save(f"{folder}/policy.json")
    write_table(path_of(f"{folder}/LOGITS"), n=60)
    for path, kind in {f"{folder}/policy.json": "policy", f"{folder}/LOGITS": "logit table", folder: "folder"}.items():
        code, out, err = cauc("show", path, "--json")
        assert (code, err, json.loads(out)["kind"]) == (0, "", kind)
    assert f"{folder}/missing.json" in cauc("show", f"{folder}/missing.json")[2]
