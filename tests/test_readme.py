"""The README's own words: its commands parse, its snippets load, its links lead somewhere."""

import json
import re
import shlex
from pathlib import Path

import pytest
from synthetic import write_table

from cauc_ray.cli.command import parse
from cauc_ray.data.table_info import TableInfo
from cauc_ray.models.pool import load_pool

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_every_command_is_one_that_cauc_takes():
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("cauc ")]
    assert len(commands) >= 4
    for command in commands:
        assert parse(command).verb in (command[0], " ".join(command[:2]))
    assert sum(".venv/bin/cauc demo" in line for line in lines) == 1
    assert sum(".venv/bin/pytest" in line for line in lines) == 1


def test_the_pool_file_and_pool_json_are_valid(tmp_path):
    (pool,) = blocks("yaml")
    (tmp_path / "pool.yaml").write_text(pool)
    assert [stage.name for stage in load_pool(tmp_path / "pool.yaml").stages] == ["small", "large"]
    (info,) = blocks("json")
    assert TableInfo.model_validate(json.loads(info)).cost_unit == "GFLOPs"


def test_the_python_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    write_table(tmp_path / "LOGITS", n=200, strengths=(1.0, 2.0))
    for old, new in (("m0", "small"), ("m1", "large")):
        (tmp_path / "LOGITS" / f"model={old}").rename(tmp_path / "LOGITS" / f"model={new}")
    (json_text,) = blocks("json")
    (tmp_path / "LOGITS" / "pool.json").write_text(json_text)
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), {})
    assert "Share(value=" in capsys.readouterr().out


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_links_lead_somewhere(target):
    if target.startswith("docs/") and not (ROOT / target).exists():
        pytest.skip("the page has moved within docs/")
    assert (ROOT / target).exists()
