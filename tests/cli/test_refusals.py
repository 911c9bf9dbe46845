"""What is refused: one line that names the option, file or value, exit code 2, CaucError in Python, nothing written."""

import json
import math
import os
import re
import shlex

import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from earlier_runs import call, write_run
from job_cases import SWEEP, write_config
from reported import fitted
from runs import MODELS, python_pool, saved_model, two_model_policy
from synthetic import write_table

import cauc_ray
from cauc_ray.errors import BudgetError, CaucError, ConfigError, DataError, PolicyError
from cauc_ray.policies.policy import Policy

LIMIT = "risk<=0.1@0.9"
CHOICE = {"kind": "transformers-choice", "model": "bert"}
# By verb: its arguments where a case does not give them, the first of them without a flag; what the command writes.
DEFAULTS = {
    "fit": {"logits": "LOGITS"},
    "compare": {"logits": "LOGITS", "methods": ["rf"]},
    "evaluate": {"logits": "LOGITS", "policy": "policy.json"},
    "check": {"logits": "LOGITS", "policy": "policy.json"},
    "collect": {"pool": "good.yaml", "dataset": "q.csv", "output": "L"},
    "run": {"pool": "x.yaml", "policy": "two.json", "input": "in.parquet", "output": "out"},
    "plan": {"pool": "saved.yaml", "policy": "policy.json", "rate": 5},
    "report": {"folder": "report"},
}
OUTPUTS = {"fit": "p.json"}

ADDRESSES = ("head", "10.0.0.1", ":1", "a:b", " ", "ray://localhost:10001", "http://127.0.0.1:8265")
# A verb, its options as Python names them, the words of the line, and the error in Python.
BOTH_DOORS = [
    # Values: of another type, without end, out of range, too long, twice, unknown.
    ("fit", {"budget": "half"}, "budget: ", ConfigError),
    *(
        ("fit", {"budget": text}, "budget: ", ConfigError)
        for text in ("6@1.5", "6@1", "6@0", "1e@.5", "6@.", "1e999@.9")
    ),
    ("fit", {"budget": np.nan}, "a budget must be a finite number, got nan", ConfigError),
    ("compare", {"seed": 2**64}, "seed: ", ConfigError),
    ("fit", {"models": MODELS, "costs": [1, 2]}, "{costs}: 2 for 3 models", ConfigError),
    ("fit", {"costs": {"m0": 1e307, "m1": 1e308, "m2": 1.1e308}}, "cost 1e+307 GFLOPs", CaucError),
    ("fit", {"models": ["m0", "m0"]}, "'m0' is a duplicate", CaucError),
    ("compare", {"methods": ["rff"]}, "unknown method 'rff'; did you mean 'rf'", ConfigError),
    ("fit", {"logit_kind": "odds"}, "{logit_kind}: unknown kind 'odds'", ConfigError),
    ("fit", {"logits": "https://user:password@127.0.0.1:9/x?sig=abc"}, "https://***@127.0.0.1:9/x?sig=***", CaucError),
    ("fit", {"costs": {"m0": 1, "m1": 2, "m3": 3}}, "{costs}: unknown model 'm3'. Available: m0", ConfigError),
    ("fit", {"costs": {"m0": 1, "m1": 2}}, "{costs}: no cost of model 'm2'", ConfigError),
    ("fit", {"costs": [1, 2, 3]}, "{costs} in a list are in the order of {models}", ConfigError),
    # Splits.
    ("fit", {"calibration_split": "validation"}, "two splits", ConfigError),
    ("compare", {"split": "validation"}, "measure them on another", ConfigError),
    ("compare", {"training_split": "validation"}, "split 'validation' has another use already", ConfigError),
    ("evaluate", {"split": "tests"}, "unknown split 'tests'; did you mean 'test'", DataError),
    ("compare", {"redrawn": ["calibration"]}, "'calibration' cannot be pooled with nothing", ConfigError),
    # Budgets and rules that decide a threshold.
    ("fit", {"method": "rf", "budget": 0.5}, "below the cheapest", BudgetError),
    ("fit", {"budget": 3.0, "threshold": 0.5}, "give {budget} or {threshold}, not both", ConfigError),
    ("fit", {"method": "rf", "validation_split": "none"}, "validation", ConfigError),
    ("fit", {"certify": LIMIT, "objective": "macro-f1"}, "an objective chooses a threshold", ConfigError),
    ("fit", {"certify": "risk<=0.0001@0.95"}, "no threshold is certified, by any rule", CaucError),
    ("fit", {"certify": "risk<0.05@0.95"}, "{certify}: 'risk<0.05@0.95' is not of the form", ConfigError),
    ("fit", {"price": 0.1, "budget": 9}, "each decides it alone", ConfigError),
    ("fit", {"price": 0.1, "search": True}, "a search chooses a chain by its best threshold", ConfigError),
    ("fit", {"search": True, "budget": 0.5}, "below the cost of the cheapest chain, 1 GFLOPs", BudgetError),
    ("fit", {"calibrator": "isotonic"}, "for method base with one or two models", ConfigError),
    # What a method cannot do.
    ("fit", {"method": "stacked", "safe": True}, "leave {safe} out", ConfigError),
    ("fit", {"method": "stacked", "calibrator": "offsets"}, "leave {calibrator} offsets out", ConfigError),
    ("fit", {"embedding": "enc"}, "leave {embedding} out", ConfigError),
    ("fit", {"method": "oracle"}, "needs the labels", ConfigError),
    ("fit", {"method": "routellm-bert"}, "reads the queries' texts", ConfigError),
    ("fit", {"method": "single:m9"}, "m9", CaucError),
    ("fit", {"logits": "EMBEDDED", "method": "rf", "embedding": "enc"}, "looks at no embedding", ConfigError),
    ("fit", {"method": "base", "rule": "gain"}, "rule gain", ConfigError),
    ("fit", {"method": "rf", "rule": "gain", "search": True}, "stacked", ConfigError),
    ("fit", {"method": "stacked", "search": True, "threshold": 0.7}, "budget", ConfigError),
    ("fit", {"method": "stacked", "search": True, "budget": "9@0.95"}, "for base and rf", ConfigError),
    ("fit", {"method": "margin", "safe": True}, "safe is for methods base and rf, not", ConfigError),
    ("fit", {"method": "margin", "search": True}, "search is for methods base, rf and stacked, not", ConfigError),
    ("fit", {"method": "frugalgpt", "price": 0.01}, "price", ConfigError),
    ("fit", {"method": "duo", "certify": LIMIT}, "answers nothing before the last model", ConfigError),
    ("compare", {"texts": "nowhere.parquet"}, "nowhere.parquet does not exist", DataError),
    ("compare", {"methods": ["routellm-bert"]}, "trains a model on the queries' texts", ConfigError),
    ("compare", {"budget": 0.5}, "below the cheapest", BudgetError),
    ("compare", {"budgets": [3], "points": 4}, "give one of the three", ConfigError),
    ("compare", {"reference": "rx"}, "reference: unknown method 'rx'", ConfigError),
    ("compare", {"checkpoints": {"rf": "bert"}}, "'rf' takes no checkpoint", ConfigError),
    ("compare", {"methods": ["embedding"]}, "reads the queries' embeddings: give their encoder", ConfigError),
    # Files.
    ("fit", {"logits": "ABSENT"}, "ABSENT", DataError),
    ("evaluate", {"policy": "absent.json"}, "policy file absent.json", PolicyError),
    ("check", {"policy": "moved.json"}, "fit it at this threshold", PolicyError),
    ("evaluate", {"policy": "text.json"}, "text.json", PolicyError),
    ("evaluate", {"policy": "deep.json"}, "deep.json", PolicyError),
    ("evaluate", {"policy": "pipe"}, "policy file", PolicyError),
    ("run", {"pool": "unknown-key.yaml"}, "stgaes", ConfigError),
    ("run", {}, "needs a column 'x'", DataError),
    ("run", {"input": "absent"}, "unknown dataset 'absent'", ConfigError),
    ("run", {"pool": "good.yaml"}, "unknown stage 'small'", ConfigError),
    ("run", {"pool": "text.txt"}, "text.txt is not a pool file: a mapping", ConfigError),
    *(
        (verb, {**data, "output": out}, words, ConfigError)
        for verb, data in (("run", {"input": "x.parquet"}), ("collect", {}))
        for out, words in (
            ("http://a/b", "a web address cannot be written to"),
            ("memory://a/b", "the memory of one process"),
        )
    ),
    *(("collect", {"address": text}, "give HOST:PORT", ConfigError) for text in ADDRESSES),
    # Data to collect on.
    ("collect", {"pool": "kind.yaml"}, "pyhton", ConfigError),
    ("collect", {"dataset": "mmlu=absent"}, "absent", DataError),
    ("collect", {"dataset": "in.parquet", "columns": {"id": "a"}}, "'id'", CaucError),
    ("collect", {"dataset": "text.txt"}, "text.txt", DataError),
    ("collect", {"dataset": "images.parquet"}, "multiple-choice", CaucError),
    ("collect", {"dataset": "hub:../.."}, "hub:", CaucError),
    ("collect", {"output": "text.txt"}, "text.txt", CaucError),
    ("collect", {"output": ""}, "a path is ", ConfigError),
    ("collect", {"split": "tset"}, "tset", CaucError),
    ("collect", {"models": ["lnog"]}, "lnog", ConfigError),
    ("collect", {"embedding": "org/longest"}, "both named 'longest'", ConfigError),
    ("collect", {"embedding": "s3://"}, "embedding 's3://': ", ConfigError),
    # Models that must be known to serve before Ray starts or weights are loaded.
    *(
        ("collect", {"pool": f"{name}.yaml", "dataset": "rows.csv", "split": "all"}, words, error)
        for name, words, error in (
            ("labels", "'no' (1)", DataError),
            ("column", "needs a column 'txt'", DataError),
            ("bert", "is not a complete causal language model: it was saved as BertModel", ConfigError),
            ("cuda", "stages.0: its model needs 1 GPU, not 0", ConfigError),
            ("parallel", "its model needs 4 GPUs, not 2: set num_gpus", ConfigError),
        )
    ),
    # Plans.
    *(("plan", {"rate": rate}, "rate: input should be", ConfigError) for rate in (0, -1, math.nan, math.inf)),
    ("plan", {"rate": 1e12}, "requests a second", ConfigError),
    ("plan", {"policy": "moved.json"}, "how often its stages defer", CaucError),
    ("plan", {"pool": "x.yaml", "policy": "expecting-two.json"}, "no timing for stage 'small'", ConfigError),
    ("plan", {"pool": "untimed.yaml"}, "declares no seconds", ConfigError),
    # Reports.
    ("report", {"folder": "empty"}, "has no policy.json", DataError),
    ("report", {"folder": "several"}, "holds 2 policies (several/policies/first.json, several/pol", ConfigError),
    ("report", {"folder": "other-logits"}, "model 'm1'", DataError),
    ("report", {"run": "none"}, "summary.json", DataError),
    ("report", {"split": "calibration"}, "was fitted or chosen on", ConfigError),
    ("report", {"output": "report/LOGITS/report.html"}, "is, or lies in, the input", ConfigError),
    ("report", {"output": "policy-card.md"}, "give the page another name", ConfigError),
]
COMMAND = [
    ("fti", "invalid choice: 'fti'"),
    ("fit LOGITS --budgt 3", "did you mean '--budget'; see cauc fit --help"),
    ("fit LOGITS --thresh 0.5", "--thresh"),
    ("fit LOGITS --costs 1 4 16", "commas"),
    ("fit LOGITS --costs [1,4,16]", "--costs: input should be a valid number"),
    ("fit LOGITS --method RF", "did you mean 'rf'"),
    ("fit LOGITS --models m0,,m1", "m0,,m1"),
    ("fit LOGITS -o absent/x.json", "absent"),
    (f"fit LOGITS -o {'x' * 300}", "File name too long"),
    ("fit LOGITS -o LOGITS/pool.json", "LOGITS"),
    ("evaluate LOGITS --policy policy.json --predictions LOGITS/model=m0/split=test/part-0.parquet", "LOGITS"),
    ("collect good.yaml -o L", "dataset is required"),
    ("collect good.yaml --dataset in.parquet --columns image -o L", "columns: "),
    ("plan saved.yaml --policy policy.json", "rate"),
    ("plan saved.yaml --policy policy.json --rate 5 --slo-p99 0", "--slo-p99: input should be"),
    *((f"serve x.yaml --policy two.json --host '{host}'", "host '") for host in ("a\nb", " ", "\u202e")),
    (f"serve x.yaml --policy two.json --host {'x' * 300}", "cannot listen at"),
    ("show absent", "absent"),
    ("demo -o report", "not an empty folder"),
    *((f"demo -o {uri}", "a folder of this machine") for uri in ("http://host/demo", "memory://demo")),
]
# A verb, what differs of its config file, and the words of the line.
CONFIGS = [
    ("fit", {"outptu": "x"}, "unknown key 'outptu'; did you mean 'output'"),
    ("fit", {"output": 3}, "output: "),
    ("compare", {"output": "sets"}, "exists and is not an empty folder"),
    ("compare", {"output": "_ray_pkg_0123456789abcdef/out"}, "give an absolute path"),
    *(
        ("compare", {"sets": sets}, words)
        for sets, words in (
            ([{"name": "a", "logits": "nowhere", "chains": [["m0"]]}], "no logit table"),
            ([{"name": "a", "logits": "sets/planted", "chains": [["m0", "m9"]]}], "unknown model 'm9'"),
            ([{"name": "a", "logits": "sets/planted", "chains": [["m0"]]}] * 2, "set 'a' is a duplicate"),
        )
    ),
]
CONFIG = {
    "compare": {**SWEEP, "output": "out"},
    "fit": {"logits": "sets/planted", "output": "out.json"},
}


def language_pool(model=CHOICE, num_gpus=0, **more):
    stage = {"name": "s", "model": {**CHOICE, **model}, "resources": {"num_gpus": num_gpus} if num_gpus else {}}
    pool = {"name": "p", "task": "classification", "labels": ["yes", "no"], "prompt": "{{ text }}", "stages": [stage]}
    return {**pool, **more}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder that holds what the cases name."""
    folder = tmp_path_factory.mktemp("refusals")
    write_table(folder / "LOGITS", n=120)
    split = planted.problem(3, n=40, n_test=40, m=2)[0]
    planted.write_table(folder / "EMBEDDED", {"calibration": split.calibration, "validation": split.validation})
    policy = cauc_ray.fit(folder / "LOGITS", models=MODELS, method="rf", budget=9.0)
    policy.save(folder / "policy.json")
    policy.with_threshold(0.5).save(folder / "moved.json")
    two = two_model_policy()
    two.save(folder / "two.json")
    expected = {"models": ["m0", "m1"], "method": "rf", "budget": 9.0}
    renamed = (
        cauc_ray.fit(folder / "LOGITS", **expected).to_json().replace('"m0"', '"small"').replace('"m1"', '"large"')
    )
    Policy.of(json.loads(renamed)).save(folder / "expecting-two.json")
    for name, text in (("text.json", "policy"), ("text.txt", "text"), ("deep.json", "[" * 100_000)):
        (folder / name).write_text(text)
    os.mkfifo(folder / "pipe")
    write_pools(folder)
    pq.write_table(pa.table({"example_id": ["a"]}), folder / "in.parquet")
    pq.write_table(pa.table({"example_id": ["a"], "x": pa.array([0.5], pa.float32())}), folder / "x.parquet")
    pq.write_table(pa.table({"image": [b"x"] * 9, "label": [0] * 9}), folder / "images.parquet")
    (folder / "q.csv").write_text("question,choices,label\n" + 'q,"[""a"",""b""]",0\n' * 9)
    (folder / "rows.csv").write_text("example_id,text,label\n1,hello,yes\n2,bye,no\n3,well,yes\n4,oh,yes\n")
    (folder / "bert").mkdir()
    bert = {"model_type": "bert", "architectures": ["BertModel"]}
    (folder / "bert" / "config.json").write_text(json.dumps(bert))
    write_run(folder / "run", [call(stage, 0, 60.0 * n, 8, 1.0) for stage in MODELS for n in range(3)], policy.id)
    fitted(folder / "report", table={"n": 120}, method="rf", budget=9.0)
    write_reports(folder, Policy.load(folder / "report" / "policy.json"))
    write_table(folder / "jobs" / "sets" / "planted", n=60)
    (folder / "jobs" / "_ray_pkg_0123456789abcdef").mkdir()
    return folder


def write_pools(folder):
    by_x = yaml.safe_load(python_pool(folder, [("by_x", {})] * 2).read_text())
    model = {"kind": "python", "factory": "user_models:longest"}
    stage = {"name": "longest", "model": model, "cost": {"seconds": 1}, "batch_size": 4}
    good = {"name": "questions", "task": "multiple-choice", "stages": [stage]}
    saved = {"name": "p", "task": "multiple-choice"}
    pools = {
        "x": {**by_x, "inputs": {"x": {"datatype": "FP32", "shape": []}}},
        "unknown-key": {"name": "p", "task": "multiple-choice", "stgaes": []},
        "good": good,
        "kind": {**good, "stages": [{**stage, "model": {**model, "kind": "pyhton"}}]},
        "saved": {**saved, "stages": [{"name": m, "model": saved_model(m, seconds_per_row=0.01)} for m in MODELS]},
        "untimed": {**saved, "stages": [{"name": m, "model": saved_model(m)} for m in MODELS]},
        "labels": language_pool(labels=["yes", "nope"]),
        "column": language_pool({"model": "org/name"}, prompt="{{ txt }}"),
        "bert": language_pool(),
        "cuda": language_pool({"device": "cuda"}),
        "parallel": language_pool({"kind": "vllm", "engine": {"tensor_parallel_size": 4}}, num_gpus=2),
    }
    for name, content in pools.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))


def write_reports(folder, policy):
    """Write folders that no report can be made of."""
    (folder / "empty").mkdir()
    (folder / "several" / "policies").mkdir(parents=True)
    for name in ("first", "second"):
        policy.save(folder / "several" / "policies" / f"{name}.json")
    fitted(folder / "other-logits", table={"n": 60}, method="rf")
    parts = [
        folder / "other-logits" / "LOGITS" / f"model={m}" / "split=calibration" / "part-0.parquet" for m in ("m2", "m1")
    ]
    parts[1].write_bytes(parts[0].read_bytes())


@pytest.fixture
def cauc(home, command, monkeypatch):
    """Return a function that runs `cauc` where the files are and requires a refusal; Ray must not start."""

    def started(*_, **__):
        raise AssertionError("Ray starts")

    monkeypatch.setattr(ray, "init", started)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.chdir(home)

    def refused(words, *arguments):
        before = content(home)
        code, out, error = command(*arguments)
        assert (code, out, error.count("\n")) == (2, "", 1), error
        assert error.startswith("cauc")
        assert words in error
        assert content(home) == before

    return refused


def content(folder):
    files = {path: path.lstat() for path in folder.rglob("*")}
    return {path: path.is_dir() or (of.st_size, of.st_mtime_ns) for path, of in files.items()}


def word_of(value):
    if isinstance(value, dict):
        return ",".join(f"{name}={of}" for name, of in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def flags_of(options):
    names = {"output": "-o", "slo_p99_s": "--slo-p99"}
    for name, value in options.items():
        yield names.get(name, f"--{name.replace('_', '-')}")
        if value is not True:
            yield word_of(value)


def name_of(value):
    return value.__name__ if isinstance(value, type) else str(value)


@pytest.mark.parametrize(("verb", "options", "words", "error"), BOTH_DOORS, ids=name_of)
def test_the_command_and_python_refuse_in_one_line(home, cauc, verb, options, words, error):
    arguments = {**DEFAULTS[verb], **options}
    first, *rest = arguments
    output = ["-o", OUTPUTS[verb]] if verb in OUTPUTS else []
    flags = flags_of({name: arguments[name] for name in rest})
    of_command = re.sub(r"\{(\w+)\}", lambda name: next(flags_of({name[1]: True})), words)
    words = re.sub(r"\{(\w+)\}", r"\1", words)
    cauc(of_command, verb, arguments[first], *flags, *output)
    before = content(home)
    with pytest.raises(error, match=re.escape(words)) as refused:
        getattr(cauc_ray, verb)(**arguments)
    assert isinstance(refused.value, CaucError)
    assert "\n" not in str(refused.value)
    assert content(home) == before


@pytest.mark.parametrize(("arguments", "words"), COMMAND)
def test_the_command_refuses_in_one_line(cauc, arguments, words):
    cauc(words, *shlex.split(arguments))


@pytest.mark.parametrize(("verb", "change", "words"), CONFIGS, ids=str)
def test_a_config_file_is_refused_in_one_line(home, cauc, verb, change, words):
    config = write_config(home / "jobs", "bad", {**CONFIG[verb], **change})
    cauc(words, verb, "--config", config)
