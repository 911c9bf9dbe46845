"""Models that are functions of the test, and workers that have them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from cauc_ray.cascade.worker import Worker
from cauc_ray.models.answers import Answers, ModelFacts

SCRIPTED = ModelFacts("scripted")


class ScriptedModel:
    """A model that is a function from its batch to answers."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answers], facts: ModelFacts) -> None:
        self.answer, self.facts = answer, facts

    def __call__(self, batch):
        return self.answer(batch)


def worker_of(
    answer: Callable[[dict[str, Any]], Answers],
    stage: int,
    policies=(),
    *,
    facts: ModelFacts = SCRIPTED,
) -> Worker:
    """Return the worker of a stage that answers by a function; it has policies from the start, by key."""
    kind = SimpleNamespace(TAKES_LONG=False)
    spec = SimpleNamespace(name=f"stage-{stage}", cost=None, model=kind, load=lambda: ScriptedModel(answer, facts))
    worker = Worker(spec, stage, dict(policies))
    worker.load()
    return worker
