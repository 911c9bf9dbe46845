"""When and where warnings reach people: on standard error as they arise, and as Python's own from the library."""

import io
import json
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from asking import until
from job_cases import SWEEP, write_config
from runs import numbered_input, python_pool, two_model_policy
from synthetic import chain, write_chains, write_table

import cauc_ray
from cauc_ray import CaucWarning
from cauc_ray.api import live
from cauc_ray.cli.command import main
from cauc_ray.errors import GuardError
from cauc_ray.policies.evidence import Guard

MODELS = ["m0", "m1", "m2"]
FALLING = ["--models", "m0,m1", "--costs", "3,2"]
SAID_OF_FALLING = "'m1' costs 2"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A table whose fits fire guards, as it has few examples, and one that costs more on one split than expected."""
    folder = tmp_path_factory.mktemp("warned")
    write_table(folder / "LOGITS", n=90)
    write_table(folder / "two", n=1500, strengths=(1.0, 2.5))
    write_chains(folder / "two", {"harder": chain(8, 1500, 5, (0.3, 2.5))}, logit_kind="raw")
    return folder


def fired(guards):
    return [f"{guard.name}: {guard.message}; see docs/how-to/guards.md" for guard in guards if guard.fired]


def caught(call):
    """Return what a call returns, and the messages of the CaucWarnings that name this file as their place."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", CaucWarning)
        result = call()
    assert {warning.filename for warning in seen} <= {__file__}
    return result, [str(warning.message) for warning in seen if issubclass(warning.category, CaucWarning)]


def test_the_library_warns_of_guards_where_it_is_called(home):
    policy, messages = caught(lambda: cauc_ray.fit(home / "LOGITS", models=MODELS))
    assert messages == fired(policy.guards)
    assert any(message.startswith("few-examples: ") for message in messages)
    with pytest.raises(GuardError) as error:
        cauc_ray.fit(home / "LOGITS", models=MODELS, strict=True)
    assert fired(error.value.guards) == messages
    replaced, messages = caught(lambda: cauc_ray.replace_model(policy, home / "LOGITS", {"m1": "m1"}))
    assert messages == fired(replaced.guards)
    two, _ = caught(lambda: cauc_ray.fit(home / "two", models=["m0", "m1"], budget=3.5))
    assert caught(lambda: cauc_ray.evaluate(home / "two", two))[1] == []
    evaluation, messages = caught(lambda: cauc_ray.evaluate(home / "two", two, split="harder"))
    assert messages == fired(evaluation.guards)
    assert messages[0].startswith("data-shift: ")


def test_warnings_of_costs_and_of_probabilities_point_at_the_call():
    rng, labels = np.random.default_rng(0), np.arange(600) % 3
    votes = {name: rng.multinomial(4, 0.2 + 0.4 * np.eye(3)[labels]) / 4 for name in "ab"}
    asked = {"models": ["a", "b"], "costs": [2, 1], "validation": 0.5, "logit_kind": "probabilities"}
    for method in ("base", "rf", "stacked"):
        _, messages = caught(lambda method=method: cauc_ray.fit(votes, labels, method=method, **asked))
        assert any("the order is used as given" in message for message in messages)
        assert sum("model '" in message for message in messages) >= 2


def test_a_comparison_warns_once_at_the_call_of_what_all_its_fits_meet():
    rng, labels = np.random.default_rng(0), np.arange(600) % 3
    votes = {name: rng.multinomial(4, 0.2 + 0.4 * np.eye(3)[labels]) / 4 for name in "ab"}
    asked = {"costs": [1, 2], "logit_kind": "probabilities", "methods": ["base", "rf", "margin", "duo"]}
    _, messages = caught(lambda: cauc_ray.compare(votes, labels, **asked))
    assert messages
    assert len(set(messages)) == len(messages)


def test_the_command_warns_on_standard_error_each_message_once(cauc):
    code, out, err = cauc("fit", "LOGITS", *FALLING, "-o", "p.json", "--json")
    assert code == 0
    messages = err.splitlines()
    assert all(line.startswith("cauc: warning: ") for line in messages)
    assert len(set(messages)) == len(messages)
    assert SAID_OF_FALLING in messages[0]
    guards = [Guard(**guard) for guard in json.loads(out)["guards"] if guard["fired"]]
    assert messages[-len(guards) :] == [f"cauc: warning: {text}" for text in fired(guards)]
    code, out, strict = cauc("fit", "LOGITS", *FALLING, "--strict", "-o", "strict.json")
    assert (code, out, Path("strict.json").exists()) == (3, "", False)
    assert strict.splitlines()[0] == messages[0]
    assert strict.splitlines()[-1].startswith(f"cauc: error: {guards[0].name}: ")
    code, out, err = cauc("compare", "LOGITS", *FALLING, "--methods", "single,base,rf,margin", "--json")
    assert (code, json.loads(out)["models"]) == (0, ["m0", "m1"])
    assert [line for line in err.splitlines() if SAID_OF_FALLING in line] == [messages[0]]


def test_a_run_warns_while_it_is_still_going_on(tmp_path, ray_session, monkeypatch, capsys):
    """Its model answers only when the warning has been seen."""
    gate = tmp_path / "gate"
    pool = python_pool(tmp_path, [("by_x_once", {"path": str(gate)}), ("by_x", {})], cost={"gflops": 2})
    two_model_policy().save(tmp_path / "p.json")
    words = ["run", pool, "--policy", tmp_path / "p.json", "--input", numbered_input(tmp_path), "-o", tmp_path / "out"]
    stderr, ended = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", stderr)

    def run():
        try:
            main([*map(str, words), "--json"])
        except SystemExit as end:
            ended.append(end.code)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        until(lambda: "'small' a cost of 2" in stderr.getvalue(), 30)
        still_running = not (tmp_path / "out" / "summary.json").exists()
    finally:
        gate.touch()
        thread.join(120)
    assert (still_running, ended) == (True, [0])
    assert json.loads(capsys.readouterr().out)["n"] == 40
    assert stderr.getvalue().splitlines()[0].startswith("cauc: warning: the pool gives 'small' a cost of 2")


def test_a_progress_bar_leaves_warnings_whole(cauc, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "1000")
    _, _, plain = cauc("fit", "LOGITS", *FALLING, "-o", "p.json", "--json")
    warned = next(line for line in plain.splitlines() if SAID_OF_FALLING in line)
    monkeypatch.setattr(live, "PATIENCE_S", 0.0)
    code, _, err = cauc("compare", "LOGITS", *FALLING, "--methods", "single,base,rf", "--json")
    assert code == 0
    assert "\x1b[" in err  # there was a bar
    lines = [line.rpartition("\x1b[2K")[2] for line in err.splitlines() if SAID_OF_FALLING in line]
    assert lines == [warned]


def test_what_tasks_warn_of_is_on_standard_error(home, tmp_path, ray_session, command):
    sets = [{"name": "falling", "logits": str(home / "LOGITS"), "chains": [["m2", "m0"]]}]
    config = {**SWEEP, "sets": sets, "methods": ["base"], "seeds": [0], "output": "out"}
    code, out, error = command(
        "compare", "--config", write_config(tmp_path, "config", config), "--address", "local", "--json"
    )
    (line,) = error.splitlines()
    assert (code, line.startswith("cauc: warning: falling"), "warning" in out) == (0, True, False)
    assert "'m0' costs 1 GFLOPs" in line
