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

# Codes besides 2, bad input.
DOCUMENTED = {
    "check": {0, 3},
    "fit": {0, 3},
    "collect": set(),
    "run": set(),
    "serve": set(),
    "demo": set(),
    "policy set": {4},  # nobody listens
}
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
# What a verb needs next to what is drawn, so that most combinations reach its work.
GIVEN = {
    "compare": ("--methods=base,rf",),
    "plan": ("--rate=10",),
    **dict.fromkeys(("fit", "evaluate", "check"), ("logits",)),
    "policy set": ("--url=http://127.0.0.1:9",),
}
# A verb that would start Ray has one of these, by position or name.
REFUSED = {
    "collect": (("absent", "--dataset=rows.parquet"), ("pool.yaml", "--dataset=absent"), ("text.txt", "--dataset=x")),
    "run": (("pool.yaml", "--policy=absent", "--input=rows.parquet"), ("absent", "--policy=policy.json", "--input=x")),
    "serve": (("pool.yaml", "--policy=absent"), ("text.txt", "--policy=policy.json"), ("logits", "--policy=text.txt")),
    "plan": (("pool.yaml", "--policy=absent"), ("absent", "--policy=policy.json"), ("text.txt", "--policy=text.txt")),
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
    if code not in DOCUMENTED.get(verb, {0}) | {2}:
        return f"exit code {code}: {err[-300:]}"
    if code == 2 and (out or len(errors) != 1 or not errors[0].startswith("cauc")):
        return f"an error of {len(errors)} lines: {err[-300:]}"
    changed = {path for path in after if after[path] != before.get(path)} | (before.keys() - after.keys())
    if code == 2 and changed:
        return f"changed {sorted(map(str, changed))} and failed: {err[-300:]}"
    partial = [path for path in changed if any(part.startswith((".", "~")) or "tmp" in part for part in path.parts)]
    return f"left {sorted(map(str, partial))}" if partial else None


def flags_of(verb):
    """Return the values to draw for each option that the verb has a flag for, and how a value is given."""
    for name, field in VERBS[verb].options.model_fields.items():
        text = str(field.annotation)
        if name in NOT_DRAWN or not spellings_of(name, field):
            continue
        if name in VALUES:
            yield name, VALUES[name]
        elif field.annotation is bool:
            yield name, (None,)
        elif "Literal" in text:
            yield name, ("accuracy", "macro-f1", "temperature", "offsets", "isotonic", "x")
        elif name in ("output", "predictions"):
            yield name, OUTPUTS
        elif "Path" in text:
            yield name, FILES
        else:
            kind = next((kind for kind in NUMBERS if kind.__name__ in text), None)
            yield name, TEXTS if kind is None else NUMBERS[kind]


def spelled(verb, options):
    """Return the words of a command for options; of those that are given in any case only what is not drawn."""
    rng = random.Random(str(options))
    named = {word.partition("=")[0] for word in ("--output", "-o")}
    words = []
    positional = [name for name in options if name in ("logits", "pool", "file", "folder")]
    for name, value in options.items():
        flag = "--slo-p99" if name == "slo_p99_s" else f"--{name.replace('_', '-')}"
        if name not in positional:
            words.append(flag if value is None else f"{flag}={value}")
            named.add(flag)
    required = list(GIVEN.get(verb, ()))
    if verb in REFUSED:
        return [*words, *rng.choice(REFUSED[verb])]
    if verb == "compare":
        required.append("logits")
    if verb in ("evaluate", "check"):
        required.append("--policy=policy.json")
    if verb == "show":
        required.append("policy.json")
    if positional:
        required = [word for word in required if word.startswith("-")] + [str(options[positional[0]])]
    return [*[word for word in required if word.partition("=")[0] not in named], *words]


def draws(verb, n):
    """Return n combinations of options: half of them one value, the others two to four."""
    values = {name: of_option for name, of_option in flags_of(verb) if of_option}
    rng = random.Random(verb)
    single = [{name: value} for name in values for value in values[name]]
    rng.shuffle(single)
    several = []
    for _ in range(n - n // 2):
        names = rng.sample(sorted(values), min(rng.randint(2, 4), len(values)))
        several.append({name: rng.choice(values[name]) for name in names})
    return single[: max(n // 2, 1)] + several


def broken(cauc, verb, n):
    for options in draws(verb, n):
        words = spelled(verb, options)
        _, wrong = cauc(verb, words)
        if wrong is not None:
            yield f"cauc {verb} {' '.join(words)}\n  {wrong}"


@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("times", [1, pytest.param(25, marks=pytest.mark.soak("full"))])
@pytest.mark.parametrize("verb", VERBS)
def test_combinations_of_options_keep_the_commands_contract(cauc, verb, times):
    assert not "\n".join(broken(cauc, verb, n=times * {"report": 8, "compare": 24}.get(verb, 40)))
