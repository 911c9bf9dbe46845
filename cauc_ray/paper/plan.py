"""What of a config can be measured here, and what cannot and why."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from cauc_ray.comparison.quoted import columns_of
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.execution.tasks import Task
from cauc_ray.files.listing import content_digest
from cauc_ray.files.paths import AnyPath
from cauc_ray.paper.config import Chain, ComparedChain, GrowingChain, PaperConfig
from cauc_ray.paper.measured import compare_chain, grow, measure_gains, measure_pair, measure_reliability

RELIABILITY = "calibration-reliability"
GAINS = "complementarity-gain"


@dataclass(frozen=True, slots=True)
class NotRun:
    """A table's column, or an entry of the config, that is not measured, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Tasks that may run side by side, those that run alone after them, and what is not run."""

    tasks: tuple[Task, ...]
    alone: tuple[Task, ...]
    not_run: tuple[NotRun, ...]


def plan_of(config: PaperConfig) -> Plan:
    """Return what to run, in the order of the config; entries whose logits are not here are left out and told.

    Raises ConfigError where there is no folder of sets.
    """
    root = config.logits
    if not root.is_dir():
        raise ConfigError(f"there is no folder {root} with sets of logits; name it with logits:")
    digest = cache(content_digest)  # many entries are of the same set
    tasks: list[Task] = []
    alone: list[Task] = []
    not_run: list[NotRun] = []
    for part, chains in config.tables.by_name.items():
        for chain in chains:
            why = _missing(root, chain.set, chain.wanted)
            if why is not None:
                not_run.append(NotRun(f"{part} / {chain.name}", why))
            else:
                (alone if part == "setup-time" else tasks).append(_table_task(config, part, chain, digest))
        published = {chain.published for chain in chains}
        not_run += [
            NotRun(f"{part} / {column}", "no logit table of it is configured")
            for column in columns_of(part)
            if column not in published
        ]
    for figure in config.figures.calibration_reliability:
        why = _missing(root, figure.set, figure.wanted)
        if why is None:
            measure = partial(measure_reliability, root, figure)
            identity = json.dumps([digest(root / figure.set), figure.model_dump(mode="json")])
            tasks.append(Task(RELIABILITY, figure.name, measure, identity))
        else:
            not_run.append(NotRun(f"{RELIABILITY} / {figure.name}", why))
    not_run += [NotRun(f"{RELIABILITY} / {c}", "no logit table of it is configured") for c in columns_of(RELIABILITY)]
    for name in config.figures.complementarity_gain:
        why = _missing(root, name, ())
        if why is None:
            tasks.append(Task(GAINS, name, partial(measure_gains, root, name), json.dumps([digest(root / name)])))
        else:
            not_run.append(NotRun(f"{GAINS} / {name}", why))
    return Plan(tuple(tasks), tuple(alone), tuple(not_run))


def _table_task(config: PaperConfig, part: str, chain: Chain, digest: Callable[[AnyPath], str | None]) -> Task:
    """Return a task whose identity has all that its value depends on: its entry, and what the files hold."""
    root = config.logits
    files = [digest(path) for path in chain.reads(root)]
    identity = json.dumps([files, chain.model_dump(mode="json"), config.methods, config.seed])
    if isinstance(chain, ComparedChain):
        return Task(part, chain.name, partial(compare_chain, root, chain, config.methods, config.seed), identity)
    if isinstance(chain, GrowingChain):
        return Task(part, chain.name, partial(grow, root, chain), identity)
    return Task(part, chain.name, partial(measure_pair, root, chain), identity)


def _missing(root: AnyPath, set_name: str, models: Sequence[str]) -> str | None:
    """Say what of an entry is not here, None where all of it is."""
    try:
        table = LogitTable(root / set_name)
    except DataError as error:
        return str(error)
    absent = next((model for model in models if model not in table.models), None)
    return None if absent is None else f"{table.path}: {unknown_name('model', absent, table.models)}"
