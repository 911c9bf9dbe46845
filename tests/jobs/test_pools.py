"""The pools of the paper's models and the configs of its tables: they load, and fit each other."""

from pathlib import Path

from cauc_ray.models.pool import load_pool
from jobs.paper.config import Chain, PaperConfig, published_tables

ROOT = Path(__file__).parents[2]
POOLS = sorted((ROOT / "jobs" / "pools").glob("*.yaml"))
PUBLISHED = published_tables()
TASKS = ("mmlu", "logiqa", "mathqa", "medmcqa", "piqa", "socialiqa")
LANGUAGE = load_pool(ROOT / "jobs" / "pools" / "language.yaml").stages


def original_chains():
    return PaperConfig.read(ROOT / "jobs" / "paper" / "original.yaml")


def test_every_chain_of_the_paper_is_configured_from_models_of_a_pool_cheapest_first():
    config, pools = original_chains(), {path.stem: load_pool(path) for path in POOLS}
    for pool in pools.values():
        costs = [stage.cost.value for stage in pool.stages]
        assert None in costs or costs == sorted(costs)
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
            assert {*entry.required_models} <= {stage.name for stage in pool.stages}


def test_costs_are_those_of_the_papers_tables():
    config, costs = original_chains(), {stage.name: stage.cost.value for stage in LANGUAGE}
    for part in ("two-model-language", "three-model-language"):
        for entry in config.parts[part]:
            of_paper = PUBLISHED[part]["columns"][entry.published]
            assert [costs[model] for model in entry.models] == [
                of_paper[f"single:{model}"][1] for model in PUBLISHED[part]["models"]
            ]
