"""The pools and the config of the paper's own chains: they load, fit each other, and their models can be built."""

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from batches import question_batch
from language_models import tiny_language_model, tiny_network

from cauc_ray.cli.verbs import VERBS
from cauc_ray.models.pool import load_pool
from cauc_ray.paper.config import Chain
from cauc_ray.paper.run import plan_of

ROOT = Path(__file__).parents[2]
POOLS = sorted((ROOT / "jobs" / "pools").glob("*.yaml"))
PUBLISHED = json.loads(files("cauc_ray.comparison").joinpath("published.json").read_text())
TASKS = ("mmlu", "logiqa", "mathqa", "medmcqa", "piqa", "socialiqa")
# Of what architecture a checkpoint of the hub is.
FAMILIES = {
    "mistralai/Ministral-3": "mistral3",
    "Qwen/Qwen3-VL": "qwen3_vl",
    "Qwen/Qwen3.5": "qwen3_5",
    "Qwen/Qwen3-": "qwen3",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen": "qwen2",
    "google/gemma-4-26B": "gemma4-experts",
    "google/gemma-4-31B": "gemma4",
}
LANGUAGE = load_pool(ROOT / "jobs" / "pools" / "language.yaml").stages
# A stage of each architecture.
BY_FAMILY = {
    family: next(stage for stage in LANGUAGE if stage.model.model.startswith(prefix))
    for prefix, family in FAMILIES.items()
}


def own_chains():
    return VERBS["paper"].options.read(ROOT / "jobs" / "paper-own.yaml")


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_every_pool_loads_cheapest_first(path):
    pool = load_pool(path)
    costs = [stage.cost.value for stage in pool.stages]
    assert len(costs) > 1
    if None not in costs:
        assert costs == sorted(costs)


def test_every_chain_of_the_paper_is_configured_from_models_of_a_pool():
    config, pools = own_chains(), {path.stem: load_pool(path) for path in POOLS}
    configured = {
        part: {entry.published for entry in entries if isinstance(entry, Chain)}
        for part, entries in config.parts.items()
    }
    for part, of_paper in PUBLISHED.items():
        if "columns" in of_paper and part in config.tables.by_name:
            assert configured[part] == set(of_paper["columns"])
    for entries in config.parts.values():
        for entry in entries:
            pool = pools["language" if entry.set in TASKS else entry.set]
            assert {*entry.wanted} <= {stage.name for stage in pool.stages}


def test_costs_are_those_of_the_papers_tables():
    config, costs = own_chains(), {stage.name: stage.cost.value for stage in LANGUAGE}
    for part in ("two-model-language", "three-model-language"):
        for entry in config.parts[part]:
            of_paper = PUBLISHED[part]["columns"][entry.published]
            assert [costs[model] for model in entry.models] == [
                of_paper[f"single:{model}"][1] for model in PUBLISHED[part]["models"]
            ]


def test_what_is_not_collected_yet_is_named(tmp_path):
    tasks, not_run = plan_of(own_chains().model_copy(update={"logits": tmp_path}))
    assert tasks == []
    assert "two-model-image / iWildCam-OOD" in not_run


def test_published_image_weights_are_those_of_the_pool():
    models = pytest.importorskip("torchvision.models")
    stages = [stage.model for stage in load_pool(ROOT / "jobs" / "pools" / "imagenet.yaml").stages]
    gflops = {}
    for model in stages:
        if model.kind == "torchvision":
            gflops[model.arch] = models.get_model_weights(model.arch)[model.weights].meta["_ops"]
    assert list(gflops.values()) == sorted(gflops.values())
    assert gflops["mnasnet0_75"] / gflops["resnet50"] == pytest.approx(0.05, abs=0.005)


@pytest.mark.parametrize("family", BY_FAMILY)
def test_a_tiny_checkpoint_of_each_architecture_answers_as_the_pool_asks(family, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    tokenizer = tiny_language_model(tmp_path / "llama").tokenizer
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny_network(family, len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model = BY_FAMILY[family].model.model_copy(update={"model": str(tmp_path)}).load()
    questions = [("Why?", ["yes", "no"]), ("Why, of all things that there are?", ["so", "it", "x"])]
    together = model(question_batch(*questions)).logits
    for row, question in enumerate(questions):
        alone = model(question_batch(question)).logits[0]
        assert np.isfinite(alone).all()
        assert together[row, : len(alone)] == pytest.approx(alone, abs=2e-4)
