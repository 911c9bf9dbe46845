"""A stage's worker as a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import ray

from cauc_ray.cascade.bundles import Bundle, Part, gathered, in_batches, joined
from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.worker import Collected, Worker, prepare_process
from cauc_ray.execution.output import STAGE
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy


class StageWorker:
    """Loads a model and answers calls; a fault of a call is an answer, not an exception.

    Ray has it take two calls at a time: one is prepared while the model answers the other in a thread of its own.
    Loading is a call of its own: of what a constructor raises, Ray keeps only the text. Bundles are arguments of their
    own, so that Ray fetches them.
    """

    def __init__(self, spec: StageSpec, stage: int, policy: Policy | None, import_paths: Sequence[str]) -> None:
        self._name = f"{STAGE}{spec.name!r}"
        os.environ.setdefault("TQDM_DISABLE", "1")  # nobody watches a replica's own progress bars
        prepare_process(spec, import_paths)
        self._batch_size = spec.batch_size
        self._node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else socket.gethostname()
        self._worker = Worker(spec, stage, {} if policy is None else {"": policy}, node=self._node)
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")

    def __repr__(self) -> str:
        """Return what Ray calls this worker where it passes on what the model prints."""
        return self._name

    def place(self) -> str:
        """Return the node that the worker has been placed on."""
        return self._node

    def load(self) -> ModelFacts:
        """Load the model, as Worker does."""
        return self._model.submit(self._worker.load).result()

    def decide(self, parts: Sequence[Part], good: Part | None, *bundles: Bundle) -> tuple[list[CallResult], Bundle]:
        """Answer a call's rows, in batches, and decide which of them stop, as Worker does.

        good: a row known to be good. Returns the result of each batch, and what the rows that go on carry.
        """
        batches = in_batches(parts, self._batch_size)
        ahead = self._worker.prepare(batches[0], bundles)
        good_row = None if good is None else gathered([good], bundles)

        def answered() -> tuple[list[CallResult], Bundle]:
            first = self._worker.decide(batches[0], bundles, good_row=good_row, ahead=ahead)
            others = [self._worker.decide(batch, bundles, good_row=good_row) for batch in batches[1:]]
            results, onward = zip(first, *others, strict=True)
            return list(results), joined(onward)

        return self._model.submit(answered).result()

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
