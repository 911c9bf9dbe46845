"""What `cauc collect` refuses before Ray starts or weights are loaded: one line, exit 2."""

import json
import re

import pytest
import yaml

from cauc_ray.cli.command import main

LANGUAGE_MODEL = {"kind": "transformers-choice", "model": "m"}
ROWS = "example_id,text,label\n1,hello,yes\n2,bye,no\n3,well,yes\n4,oh,yes\n"


@pytest.mark.parametrize(
    ("model", "changes", "rows", "says"),
    [
        (LANGUAGE_MODEL, {}, ROWS.replace("no", "nope"), "row 1: label 'nope' is neither .* labels: yes, no"),
        (
            {**LANGUAGE_MODEL, "model": "org/name"},
            {"prompt": "{{ txt }}"},
            ROWS,
            "needs a column 'txt', and rows.csv has only .*text",
        ),
        (LANGUAGE_MODEL, {}, ROWS, "'.*/m' is not a complete causal language model: it was saved as BertModel"),
        ({**LANGUAGE_MODEL, "kind": "vllm"}, {}, ROWS, "not a complete causal language model"),
        ({"kind": "transformers-classifier", "model": "m"}, {"prompt": None}, ROWS, "not a complete text classifier"),
        ({**LANGUAGE_MODEL, "device": "cuda"}, {}, ROWS, "stages.0: its model needs 1 GPU, not 0"),
        (
            {**LANGUAGE_MODEL, "kind": "vllm", "engine": {"tensor_parallel_size": 4}},
            {"resources": {"num_gpus": 2}},
            ROWS,
            "its model needs 4 GPUs, not 2: set num_gpus",
        ),
    ],
)
def test_faults_are_one_line_before_anything_expensive(tmp_path, monkeypatch, capsys, model, changes, rows, says):
    def started(*_):
        raise AssertionError("Ray starts")

    monkeypatch.setattr("cauc_ray.api.collecting.ray_session", started)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    (tmp_path / "rows.csv").write_text(rows)
    stage = {"name": "s", "model": model, "resources": changes.get("resources", {})}
    pool = {"name": "p", "task": "classification", "labels": ["yes", "no"], "prompt": "{{ text }}", "stages": [stage]}
    given = {key: value for key, value in {**pool, **changes}.items() if value is not None and key != "resources"}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(given))
    paths = [str(tmp_path / name) for name in ("pool.yaml", "rows.csv", "logits")]
    with pytest.raises(SystemExit) as ended:
        main(["collect", paths[0], "--dataset", paths[1], "--split", "all", "-o", paths[2]])
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert error.count("\n") == 1
    assert re.search(says, error)
