"""Combinations of every verb's options: documented exit codes, errors of one line, no traceback, no half-written file.

Ray does not start here. Verbs that work on a cluster are drawn with an input that they must refuse before.
"""

import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cauc_ray
from cauc_ray.cli.command import main, spellings_of
from cauc_ray.cli.verbs import VERBS

# Codes besides 2, bad input, and 0 of what is not refused.
DOCUMENTED = {"check": {0, 3}, "fit": {0, 3}, "policy set": {4}}  # nobody listens there
# Each of these starts Ray, waits for a network, or has its own tests with real parts.
NOT_DRAWN = {"address": "a cluster", "shards": "a cluster", "input": "a cluster", "texts": "text routers"}
FILES = ("logits", "policy.json", "text.txt", "rows.parquet", "absent", "memory://absent/x", "")
OUTPUTS = ("out.json", "out.parquet", "memory://bucket/out.json", "logits", "text.txt", "absent/../out", "logits/x", "")
TEXTS = ("test", "calibration", "absent", "é\n", "")
NUMBERS = {int: ("0", "3", "-1", "1e9", "x"), float: ("0", "0.5", "4", "-1", "nan", "inf", "x")}
VALUES = {
    "method": ("base", "rf", "stacked", "auto", "margin", "duo", "single:small", "oracle", "random", ""),
    "methods": ("single", "base,rf", "margin,random", "rf-shared,oracle", "stacked", "recalibrated,duo", "absent", ","),
    "models": ("small", "small,large", "large,small", "small,small", "small,absent", ","),
    "chains": ("small+large", "small,large+small", "large+large", "absent", "+"),
    "labels": ("labels.npy", "text.txt"),
    "costs": ("1,10", "small=1,large=10", "0,0", "10,1", "1", "-1,2", "nan,1", "small=x", "absent=1"),
    "budgets": ("3,5", "0.01,1e9", "5,5", "-1"),
    "relative_budgets": ("0.3,0.9", "0.001", "0"),
    "points": ("2", "21", "1", "x"),
    "seeds": ("0,1", "3", "1,1", "-1"),
    "redrawn": ("calibration,validation", "calibration,test", "calibration", "absent,test", ""),
    "validation": ("0.3", "0.9", "0", "1", "x"),
    "test": ("0.3", "0.9", "0", "x"),
    "certify": ("risk<=0.1@0.9", "risk<=0.001@0.99", "risk<=2@0.9", "risk", ""),
    "logit_kind": ("raw", "surrogate", "probabilities", "small=raw", "absent=raw", "x"),
    "embedding": ("small", "absent", ""),
    "checkpoints": ("routellm-bert=x", "x"),
    "columns": ("label=key", "label"),
    "url": ("http://127.0.0.1:9", "absent", "file:///x"),
    "folder": (".", "logits", "absent", "text.txt"),
    "dataset": ("rows.parquet", "absent", "hub:../..", "mmlu", "logits"),
}
# What a verb has next to what is drawn, so that most combinations reach its work.
GIVEN = {
    "fit": ("logits",),
    "compare": ("logits", "--methods=base,rf"),
    "evaluate": ("logits", "--policy=policy.json"),
    "check": ("logits", "--policy=policy.json"),
    "show": ("policy.json",),
    "report": (".",),
    "policy set": ("policy.json", "--url=http://127.0.0.1:9"),
}
# A verb that would start Ray has one of these.
REFUSED = {
    "collect": (("absent", "--dataset=rows.parquet"), ("pool.yaml", "--dataset=absent"), ("text.txt", "--dataset=x")),
    "run": (("pool.yaml", "--policy=absent", "--input=rows.parquet"), ("absent", "--policy=policy.json", "--input=x")),
    "serve": (("pool.yaml", "--policy=absent"), ("text.txt", "--policy=policy.json"), ("logits", "--policy=text.txt")),
    "plan": (("pool.yaml", "--policy=absent", "--rate=10"), ("absent", "--policy=policy.json", "--rate=10")),
    "demo": (("--output=logits",), ("--output=text.txt",)),
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "template"
    shutil.copytree(cauc_ray.sample_logits(), folder / "logits")
    cauc_ray.fit(folder / "logits", method="rf", budget=4.0).save(folder / "policy.json")
    model = "{kind: saved, logits: logits, model: %s, split: test}"
    stages = "".join(f"  - {{name: {name}, model: {model % name}}}\n" for name in ("small", "large"))
    labels = [str(digit) for digit in range(10)]
    (folder / "pool.yaml").write_text(f"name: digits\ntask: classification\nlabels: {labels}\nstages:\n{stages}")
    (folder / "text.txt").write_text("text")
    pq.write_table(pa.table({"example_id": ["a", "b"]}), folder / "rows.parquet")
    return folder


@pytest.fixture
def cauc(template, tmp_path, monkeypatch, capsys):
    """Return a function that runs words of a command in a new copy of the files, and what is wrong with the result."""

    def started(*_, **__):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("ray.init", started)

    def run(verb, words):
        folder = tmp_path / "work"
        shutil.copytree(template, folder)
        monkeypatch.chdir(folder)
        before = contents(folder)
        with pytest.raises(SystemExit) as end:
            main([*verb.split(), *words])
        code, (out, err) = end.value.code, capsys.readouterr()
        after = contents(folder)
        shutil.rmtree(folder)
        return code, problem(verb, code, out, err, before, after)

    return run


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def problem(verb, code, out, err, before, after):
    """Return what breaks the contract of the command, None if nothing does."""
    errors = [line for line in err.splitlines() if not line.startswith("cauc: warning: ")]
    if "Traceback" in err or "internal error" in err:
        return f"internal error: {err[-300:]}"
    if code != 2 and (verb in REFUSED or code not in DOCUMENTED.get(verb, {0})):
        return f"exit code {code}: {err[-300:]}"
    if code == 2 and (out or len(errors) != 1 or not errors[0].startswith("cauc")):
        return f"an error of {len(errors)} lines: {err[-300:]}"
    changed = {path for path in after if after[path] != before.get(path)} | (before.keys() - after.keys())
    if code == 2 and changed:
        return f"changed {sorted(map(str, changed))} and failed: {err[-300:]}"
    partial = [path for path in changed if any(part.startswith((".", "~")) or "tmp" in part for part in path.parts)]
    return f"left {sorted(map(str, partial))}" if partial else None


def values_of(name, field):
    """Return the values to draw for an option; None for a flag without one."""
    if name in VALUES:
        return VALUES[name]
    text = str(field.annotation)
    if field.annotation is bool:
        return (None,)
    if "Literal" in text:
        return ("accuracy", "macro-f1", "temperature", "offsets", "isotonic", "x")
    if name in ("output", "predictions"):
        return OUTPUTS
    if "Path" in text:
        return FILES
    return next((values for kind, values in NUMBERS.items() if kind.__name__ in text), TEXTS)


def words_of(verb):
    """Return the words to draw for each option that the verb has on the command line."""
    for name, field in VERBS[verb].options.model_fields.items():
        if name not in NOT_DRAWN and (spellings := spellings_of(name, field)):
            flag = next((f"{spelling}=" for spelling in spellings if spelling.startswith("--")), "")
            yield [flag.rstrip("=") if value is None else f"{flag}{value}" for value in values_of(name, field)]


def command_of(verb, drawn, rng):
    """Return the words of a command; what it is given in any case comes last where it must be refused."""
    flags = [word for word in drawn if word.startswith("--")]
    if verb in REFUSED:
        return [*flags, *rng.choice(REFUSED[verb])]
    first = next((word for word in drawn if not word.startswith("--")), GIVEN[verb][0])
    return [first, *GIVEN[verb][1:], *flags]


def broken(cauc, verb, n):
    """Run n commands: half of them with one option, the others with two to four."""
    options, rng = list(words_of(verb)), random.Random(verb)
    single = [[word] for words in options for word in words]
    rng.shuffle(single)
    for number in range(n):
        several = [rng.choice(words) for words in rng.sample(options, min(rng.randint(2, 4), len(options)))]
        words = command_of(verb, single[number] if number < min(n // 2, len(single)) else several, rng)
        _, wrong = cauc(verb, words)
        if wrong is not None:
            yield f"cauc {verb} {' '.join(words)}\n  {wrong}"


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.soak("full"))])
@pytest.mark.parametrize("verb", VERBS)
def test_combinations_of_options_keep_the_commands_contract(cauc, verb, times):
    assert not "\n".join(broken(cauc, verb, n=times * {"report": 8, "compare": 24}.get(verb, 40)))
