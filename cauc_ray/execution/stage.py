"""A stage's worker as a Ray actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ray

from cauc_ray.cascade.bundles import Bundle, Part, gathered
from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.worker import Collected, Worker, prepare_process
from cauc_ray.execution.output import STAGE
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

T = TypeVar("T")


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

    def decide(self, parts: Sequence[Part], good: Part | None, *bundles: Bundle) -> tuple[CallResult, Bundle]:
        """Answer a call's rows and decide which of them stop, as Worker does.   good: a row known to be good."""
        return self._answered(self._worker.decide, parts, good, bundles)

    def decide_last(self, parts: Sequence[Part], good: Part | None, *bundles: Bundle) -> CallResult:
        """Answer a call's rows after which nothing comes: all of them stop."""
        return self.decide(parts, good, *bundles)[0]

    def collect(
        self, parts: Sequence[Part], good: Part | None, *bundles: Bundle
    ) -> tuple[CallResult, Collected | None]:
        """Answer a call's rows, deciding nothing, as Worker.collect does."""
        return self._answered(self._worker.collect, parts, good, bundles)

    def _answered(
        self, ask: Callable[..., T], parts: Sequence[Part], good: Part | None, bundles: Sequence[Bundle]
    ) -> T:
        ahead = self._worker.prepare(parts, bundles)
        good_row = None if good is None else gathered([good], bundles)
        return self._model.submit(ask, parts, bundles, good_row=good_row, ahead=ahead).result()
