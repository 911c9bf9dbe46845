"""A stage's worker for two calls at a time: one is prepared while the model answers the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from cauc_ray.cascade.bundles import Bundle, Part, gathered, in_batches, joined
from cauc_ray.cascade.rows import CallResult
from cauc_ray.cascade.worker import Collected, Worker
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy


class PreparingWorker:
    """Loads a model and answers calls; a fault of a call is an answer, not an exception.

    Two threads call it: what one prepares, the model answers in a thread of its own while the other prepares. A model
    that overlaps answers the calls of both.
    """

    def __init__(self, spec: StageSpec, stage: int, policy: Policy | None, node: str = "") -> None:
        self._batch_size = spec.batch_size
        self._worker = Worker(spec, stage, {} if policy is None else {"": policy}, node=node)
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")

    def load(self) -> ModelFacts:
        """Load the model, as Worker does."""
        facts = self._model.submit(self._worker.load).result()
        if facts.overlaps:
            self._model = ThreadPoolExecutor(2, thread_name_prefix="model")
        return facts

    def close(self) -> None:
        """Close the model, as Worker does."""
        self._model.submit(self._worker.close).result()

    def decide(self, parts: Sequence[Part], good: Part | None, *bundles: Bundle) -> tuple[list[CallResult], Bundle]:
        """Answer a call's rows, in batches, and decide which of them stop, as Worker does.

        good: a row known to be good. Returns the result of each batch, and what the deferred rows carry.
        """
        good_row = None if good is None else gathered([good], bundles)
        answered = []
        for batch in in_batches(parts, self._batch_size):
            ahead = self._worker.prepare(batch, bundles)
            answered.append(self._model.submit(self._worker.decide, batch, bundles, good_row=good_row, ahead=ahead))
        results, onward = zip(*(future.result() for future in answered), strict=True)
        return list(results), joined(onward)

    def decide_last(self, parts: Sequence[Part], good: Part | None, *bundles: Bundle) -> list[CallResult]:
        """Answer a call's rows after which nothing comes: all of them stop."""
        return self.decide(parts, good, *bundles)[0]

    def collect(
        self, parts: Sequence[Part], good: Part | None, *bundles: Bundle
    ) -> tuple[list[CallResult], Collected | None]:
        """Answer a call's rows, deciding nothing, as Worker.collect does."""
        ahead = self._worker.prepare(parts, bundles)
        good_row = None if good is None else gathered([good], bundles)
        result, collected = self._model.submit(
            self._worker.collect, parts, bundles, good_row=good_row, ahead=ahead
        ).result()
        return [result], collected
