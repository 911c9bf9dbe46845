"""A stage's worker: it has the model answer and the policies decide, so that only deferred rows carry anything.

Runs and services use this one. It knows nothing of Ray. It answers one call at a time, in one thread; the next call may
be prepared in another thread meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.cascade.bundles import Bundle, Part, chosen, gathered, states_of
from cauc_ray.cascade.isolation import Isolated, answer_isolated, reason_of, row_of
from cauc_ray.cascade.rows import CallResult, Fault, Vector
from cauc_ray.errors import ConfigError, DataError, ExecutionError, PolicyError
from cauc_ray.models.answers import (
    SAID,
    Answers,
    AsDeclared,
    Batch,
    Model,
    ModelFacts,
    PreparingModel,
    choices_in,
    matched,
)
from cauc_ray.models.costs import measured
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.python import PythonSpec
from cauc_ray.numbers.answer_keys import confidences_in, said_keys
from cauc_ray.numbers.chain import UNNAMED_UNIT
from cauc_ray.numbers.logits import VECTOR_KINDS
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, Step


def require_agreement(stages: tuple[StageSpec, ...], policy: Policy) -> None:
    """Raise PolicyError where a stage gives other logits than the policy was fitted on, or costs in another unit.

    That is logits of another kind, or asked for with another prompt. Unknown prompts and unnamed units are not
    compared.
    """
    for spec, stage, fitted in zip(stages, policy.stages, policy.logit_kinds, strict=True):
        stage.require_format(spec.model.answer_format)
        logit_kind = spec.model.answers_kind
        if fitted != logit_kind:
            raise PolicyError(
                f"stage {spec.name!r} returns logits of kind {logit_kind}; the policy was fitted on {fitted}: declare "
                "the right logit_kind in the stage's model, or fit a policy on such logits"
            )
        if stage.prompt is not None and spec.model.shown not in (None, stage.prompt):
            raise PolicyError(
                f"stage {spec.name!r} asks with another prompt than the policy was fitted on; `cauc show` prints both: "
                "restore the prompt, or collect logits with the new one and fit again"
            )
        unit = spec.cost.unit if spec.cost is not None else None
        if unit is None and policy.costs == "per-call":
            unit = spec.model.cost_unit
        if unit is not None and policy.cost_unit not in (unit, UNNAMED_UNIT):
            raise PolicyError(
                f"the pool has the cost of stage {spec.name!r} in {unit}, the policy has costs in {policy.cost_unit}: "
                "give the pool's cost in the policy's unit or omit it, or fit a policy with costs in the pool's unit"
            )


# Seconds, in place of Python's 5 ms, for which a thread that prepares may hold up the one that computes.
SWITCH_S = 0.0005
# A worker keeps so many policies, the latest ones.
MOST_POLICIES = 32


@dataclass(frozen=True, slots=True)
class Collected:
    """A model's answers to a whole call as they are.

    Attributes:
        answers: The answers.
        gflops: Of an example, measured on the worker's first call; None where nothing can be measured.
        noise: How much a row's numbers differed with other neighbours, in that call.
    """

    answers: Answers
    gflops: float | None
    noise: float | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A batch as the model has prepared it.

    Attributes:
        batch: What the model makes of it before it answers.
        n_choices: Of the rows, as choices_in.
        began: When that began, on the performance counter.
    """

    batch: Any
    n_choices: Sequence[int | None] | None
    began: float


def find_user_code(spec: StageSpec) -> None:
    """Have this process import a stage's own modules from the folders that may contain them."""
    if isinstance(spec.model, PythonSpec):
        sys.path[:0] = [path for path in spec.model.import_paths if path not in sys.path]


def prepare_process(spec: StageSpec) -> None:
    """Make a process ready to load a stage's model: user code is found, and no GPU taken that was not asked for."""
    find_user_code(spec)
    sys.setswitchinterval(SWITCH_S)
    sys.unraisablehook = _said
    if not spec.resources.num_gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _said(raised: sys.UnraisableHookArgs) -> None:
    """Print what was raised where nothing can take it, but for a process's end: Ray has it raised anywhere."""
    if raised.exc_type is not SystemExit:
        sys.__unraisablehook__(raised)


# A policy's step for rows of a call, int (m,).
PolicyStep: TypeAlias = tuple[Policy, Ints, Step]


class Worker:
    """A model, which is loaded once, and the policies that decide on its answers.

    policies: by the keys that parts name them by; more may come with calls.   node: where it is, for results.
    """

    def __init__(self, spec: StageSpec, stage: int, policies: Mapping[str, Policy], *, node: str = "") -> None:
        self._spec, self._stage, self._policies, self._node = spec, stage, dict(policies), node
        self._model: Model | None = None
        self._as_declared: Callable[[Answers], Answers] = AsDeclared(ModelFacts(spec.name))
        self._gives_vectors = False
        self._good_row: Batch | None = None
        self._gflops: float | None = None
        self._noise: float | None = None
        self._preparing = threading.Lock()
        self._busy_threads: dict[int, float] = {}
        self._ended = 0.0

    @property
    def busy_since(self) -> float | None:
        """Return when the model began what it has computed for longest, on the monotonic clock; None if it does not."""
        return min(tuple(self._busy_threads.values()), default=None)

    @property
    def prepares(self) -> bool:
        """Return whether the model has a preparation step, so that calls can be prepared ahead."""
        return isinstance(self._model, PreparingModel)

    def load(self) -> ModelFacts:
        """Load the model and return its facts. Raises CaucError, or what the user's code raises."""
        self._model = self._spec.load()
        self._gives_vectors = self._model.facts.logit_kind in VECTOR_KINDS
        self._as_declared = _as_they_are if self._gives_vectors else AsDeclared(self._model.facts)
        return replace(self._model.facts, prepares=self.prepares)

    def close(self) -> None:
        """Close the model, which answers no more."""
        model, self._model = self._model, None
        with suppress(Exception):  # a user's code: its process ends in any case
            if model is not None:
                model.close()

    def prepare(self, parts: Sequence[Part], bundles: Sequence[Bundle]) -> Prepared | None:
        """Prepare a call ahead, while the model answers another in its own thread.

        Returns what decide and collect take as ahead. None where there is nothing to prepare, or where that failed:
        they then prepare the call again, and find out which row is at fault.
        """
        if not self.prepares:
            return None
        try:
            return self._prepared(self._rows(parts, bundles))
        except BaseException:  # a model may raise what it likes
            return None

    def decide(
        self,
        parts: Sequence[Part],
        bundles: Sequence[Bundle],
        *,
        policies: Mapping[str, Policy] | None = None,
        keeps: Bools | None = None,
        wants: frozenset[Vector] = frozenset(),
        carries_columns: bool = True,
        good_row: Batch | None = None,
        stopped: Callable[[], bool] = lambda: False,
        ahead: Prepared | None = None,
    ) -> tuple[CallResult, Bundle]:
        """Answer a call's rows and decide which of them stop.

        Args:
            parts: The rows.
            bundles: What the parts point into.
            policies: By key, those that this worker may not have yet.
            keeps: Rows whose state is wanted even if they stop, bool (n,); None for none.
            wants: Requested vectors.
            carries_columns: Whether deferred rows bring their columns, too.
            good_row: A row that the stage has answered before, each column (1, ...), which distinguishes a bad row from
                a broken replica; the worker keeps the first one.
            stopped: Whether the answer is no longer wanted.
            ahead: What prepare has returned for these rows.

        Returns:
            The result, and what the deferred rows carry, in their order. A fault of the model is a result.

        Raises:
            ConfigError: Of the model: it is not the rows' fault.
            ExecutionError: The same.
        """
        began = self._began(ahead)
        self._learn(policies or {})
        unknown = next((part.policy for part in parts if part.policy not in self._policies), None)
        if unknown is not None:
            return self._broken(began, f"the worker does not have policy {unknown!r}", "policy"), Bundle({})
        try:
            isolated = self._isolated(self._as_declared, parts, bundles, good_row, ahead, stopped)
            if isolated.answers is None:
                return self._broken(began, isolated.error, isolated.fault), Bundle({})
            return self._decided(parts, bundles, isolated, began, keeps, wants, carries_columns)
        except (ConfigError, ExecutionError, SystemExit):
            raise
        except BaseException as error:  # a model may raise what it likes
            return self._broken(began, reason_of(error), "unknown"), Bundle({})
        finally:
            self._ended = time.perf_counter()

    def collect(
        self,
        parts: Sequence[Part],
        bundles: Sequence[Bundle],
        *,
        good_row: Batch | None = None,
        ahead: Prepared | None = None,
    ) -> tuple[CallResult, Collected | None]:
        """Answer a call's rows, deciding nothing: every row that the model answers is accepted.

        Returns the result, whose predictions and confidences mean nothing, and the model's answers; None for a call
        that failed. Arguments and errors are those of decide.
        """
        began = self._began(ahead)
        isolated = self._isolated(_as_they_are, parts, bundles, good_row, ahead)  # the table records the kind
        answers = isolated.answers
        if answers is None:
            return self._broken(began, isolated.error, isolated.fault), None
        facts = _facts(isolated) | self._when(began)
        if self._gflops is None and answers.costs is None and answers.wire is None:
            assert self._model is not None
            batch = self._rows(parts, bundles)
            gflops, self._noise = measured(self._model, batch, answers)
            self._gflops = gflops or 0.0
        n = len(answers.logits)
        result = CallResult(
            predictions=np.full(n, -1, dtype=np.int32),
            confidences=np.full(n, np.nan),
            accepted=_all_but(n, answers.failures),
            costs=np.zeros(n) if answers.costs is None else answers.costs,
            failures=answers.failures,
            **facts,
        )
        self._ended = time.perf_counter()
        return result, Collected(answers, self._gflops or None, self._noise)

    def _learn(self, policies: Mapping[str, Policy]) -> None:
        if policies:
            policies_left = {key: policy for key, policy in self._policies.items() if key not in policies}
            policies_left |= policies
            self._policies = dict(islice(policies_left.items(), max(0, len(policies_left) - MOST_POLICIES), None))

    def _isolated(
        self,
        taken: Callable[[Answers], Answers],
        parts: Sequence[Part],
        bundles: Sequence[Bundle],
        good_row: Batch | None,
        ahead: Prepared | None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Isolated:
        """Have the model answer a call's rows, and keep the first row that it answers.   taken: reads its answers."""
        batch = partial(self._rows, parts, bundles)
        self._good_row = self._good_row or good_row

        def ask(rows: Batch) -> Answers:
            return taken(self._answered(self._prepared(rows)))

        def first() -> Answers:
            return ask(batch()) if ahead is None else taken(self._answered(ahead))

        isolated = answer_isolated(first, ask, batch, self._good_row, stopped)
        if self._good_row is None and isolated.answers is not None:
            failures = isolated.answers.failures
            good = next((row for row in range(len(isolated.answers.logits)) if row not in failures), None)
            self._good_row = None if good is None else row_of(batch(), good)
        return isolated

    def _prepared(self, batch: Batch) -> Prepared:
        began = time.perf_counter()
        n_choices = choices_in(batch)  # asked before: the model may do with its batch what it likes
        if not isinstance(self._model, PreparingModel):
            return Prepared(batch, n_choices, began)
        with self._preparing, self._busy():
            return Prepared(self._model.prepare(batch), n_choices, began)

    def _answered(self, prepared: Prepared) -> Answers:
        """Have the model answer, and hold its logits against the number of choices where rows offer some."""
        assert self._model is not None
        with self._busy():
            ask = self._model.answer if isinstance(self._model, PreparingModel) else self._model
            answers = ask(prepared.batch)
        cost, wire, n = self._spec.cost, answers.wire, len(answers.logits)
        if cost is not None and wire is not None:  # the pool's cost, not what the server reports
            costs = np.full(n, wire.seconds / n) if cost.is_round_trip else None
            answers = replace(answers, costs=costs, cost_unit=None)
        return answers if self._gives_vectors else matched(answers, prepared.n_choices)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        thread = threading.get_ident()
        self._busy_threads[thread] = time.monotonic()
        try:
            yield
        finally:
            del self._busy_threads[thread]

    def _began(self, ahead: Prepared | None) -> float:
        return time.perf_counter() if ahead is None else ahead.began

    def _when(self, began: float) -> dict[str, Any]:
        """Return when and where a call was computed, and how long that took on the wall, as CallResult has them.

        It counts from the end of the call before, if that is later: no time counts twice.
        """
        compute_s = time.perf_counter() - max(began, self._ended)
        started_at = time.time() - compute_s
        return {"started_at": started_at, "compute_s": compute_s, "node": self._node}

    def _broken(self, began: float, error: str, fault: Fault) -> CallResult:
        return CallResult.broken(error=error, fault=fault, **self._when(began))

    def _decided(
        self,
        parts: Sequence[Part],
        bundles: Sequence[Bundle],
        isolated: Isolated,
        began: float,
        keeps: Bools | None,
        wants: frozenset[Vector],
        carries_columns: bool,
    ) -> tuple[CallResult, Bundle]:
        """Take the policies' steps for answers, and put them together."""
        answers = isolated.answers
        assert answers is not None
        n, answered_at = len(answers.logits), time.perf_counter()
        failures = dict(answers.failures)
        steps = [
            step
            for key, key_parts, rows in _by_policy(parts)
            for step in self._steps(self._policies[key], rows, answers.logits, states_of(key_parts, bundles), failures)
        ]
        policy_s = time.perf_counter() - answered_at
        decisions = self._decisions(steps, answers)
        answered = _all_but(n, failures)
        carried = answered & (~decisions.accepted if keeps is None else ~decisions.accepted | keeps)
        states = [(rows, step.state) for _, rows, step in steps]
        goes_on = Bundle({})
        if carried.any():
            columns = chosen(parts, bundles, carried) if carries_columns else {}
            if columns and answers.texts is not None:
                columns[SAID] = self._with_said(columns.get(SAID), answers, carried)
            goes_on = Bundle(columns, _laid_out(states, carried))
        result = replace(
            decisions,
            policy_s=policy_s,
            failures=failures,
            tokens=answers.tokens,
            state_bytes=max((state.shape[1] * state.itemsize for _, state in states), default=0.0),
            carried=carried,
            vectors={name: _vector(name, steps, answers) for name in wants},
            own_costs=answers.costs if "given" in wants else None,
            **_facts(isolated),
            **self._when(began),
        )
        return result, goes_on

    def _with_said(self, before: Any, answers: Answers, carried: Bools) -> npt.NDArray[Any]:
        """Return what stages up to this one have said of deferred rows, object (m,), for people."""
        rows = np.flatnonzero(carried).tolist()
        names = self._spec.model.answer_format.confidences if self._spec.model.answer_format else ()
        numbers, texts = confidences_in(answers.logits[rows]), answers.texts or ()
        column = np.empty(len(rows), dtype=object)
        for place, row in enumerate(rows):
            sure = {
                name: None if value != value else value
                for name, value in zip(names, numbers[place].tolist(), strict=True)
            }
            entry = {"stage": self._spec.name, "answer": texts[row], "confidences": sure}
            column[place] = [*(() if before is None else before[place]), entry]
        return column

    def _rows(self, parts: Sequence[Part], bundles: Sequence[Bundle]) -> Batch:
        """Return a call's rows as the model may see them."""
        batch = gathered(parts, bundles)
        hides = not self._spec.model.TAKES_LONG
        return {name: column for name, column in batch.items() if not (hides and name == SAID)}

    def _decisions(self, steps: Sequence[PolicyStep], answers: Answers) -> CallResult:
        """Return what steps decide on the rows of a call: the arrays of its result.

        Raises:
            ConfigError: The model reports its costs in another unit than a policy has.
        """
        n = len(answers.logits)
        predictions, confidences = np.full(n, -1, dtype=np.int32), np.full(n, np.nan)
        accepted, costs = np.zeros(n, dtype=bool), np.zeros(n)
        likeliest = following = None
        for policy, rows, step in steps:
            predictions[rows], confidences[rows], accepted[rows] = step.predictions, step.confidences, step.accepted
            per_call = answers.costs if policy.costs == "per-call" else None
            if per_call is not None and not _agree(answers, policy):
                raise ConfigError(
                    f"stage {self._spec.name!r} reports costs in {answers.cost_unit}, the policy has costs in "
                    f"{policy.cost_unit}: give the stage's cost in the policy's unit, or fit a policy with such costs"
                )
            costs[rows] = policy.stages[self._stage].cost if per_call is None else per_call[rows]
            if policy.reference is not None:
                likeliest = np.full(n, -1, dtype=np.int16) if likeliest is None else likeliest
                likeliest[rows] = step.likeliest()
            if step.next is not None:
                following = np.full(n, self._stage + 1, dtype=np.int8) if following is None else following
                following[rows] = step.next
        texts = None
        if answers.texts is not None:
            texts = np.array([*answers.texts, None], dtype=object)[:-1]  # of objects, whatever they are
            texts[said_keys(answers.logits) != predictions] = None
        return CallResult(predictions, confidences, accepted, costs, likeliest=likeliest, next=following, texts=texts)

    def _steps(
        self, policy: Policy, rows: Ints, logits: Floats, state: Floats | None, failures: dict[int, str]
    ) -> list[PolicyStep]:
        """Take a policy's step for rows, int (m,), of a call; rows on which it cannot decide are added to failures.

        It cannot where a row has options that it did not have at an earlier stage.
        """
        if failures:
            answered = np.array([row not in failures for row in rows.tolist()], dtype=bool)
            rows, state = rows[answered], None if state is None else state[answered]
        if not len(rows):
            return []
        try:
            values = logits if len(rows) == len(logits) else logits[rows]  # no copy where all rows are of one policy
            return [(policy, rows, policy.step(self._stage, values, state))]
        except DataError as error:
            if len(rows) == 1:
                failures[int(rows[0])] = reason_of(error)
                return []
        half = len(rows) // 2
        halves = [(rows[part], None if state is None else state[part]) for part in (slice(half), slice(half, None))]
        return [
            step for half_rows, states in halves for step in self._steps(policy, half_rows, logits, states, failures)
        ]


def _facts(isolated: Isolated) -> dict[str, Any]:
    """Return what a call's answers report that decisions do not change, as CallResult has it."""
    answers = isolated.answers
    assert answers is not None
    return {
        "device_s": answers.device_s,
        "waiting": answers.waiting,
        "wire": answers.wire,
        "raised": isolated.raised,
    }


def _by_policy(parts: Sequence[Part]) -> list[tuple[str, list[Part], Ints]]:
    """Return for each policy its key, its parts, and their rows in the call, int (m,)."""
    if len({part.policy for part in parts}) == 1:
        return [(parts[0].policy, list(parts), np.arange(sum(map(len, parts))))]
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    groups: list[tuple[str, list[Part], Ints]] = []
    for key in dict.fromkeys(part.policy for part in parts):
        positions = [position for position, part in enumerate(parts) if part.policy == key]
        groups.append((key, [parts[position] for position in positions], np.flatnonzero(np.isin(owners, positions))))
    return groups


def _vector(name: Vector, steps: Sequence[PolicyStep], answers: Answers) -> Floats:
    """Return a requested vector of all rows, float64 (n, K)."""
    values = answers.as_returned if name == "given" else answers.logits
    pieces = [(rows, step.scores if name == "scores" else values[rows]) for _, rows, step in steps]
    return _laid_out(pieces, np.ones(len(values), dtype=bool))


def _laid_out(pieces: Sequence[tuple[Ints, Floats]], mask: Bools) -> Floats:
    """Return the rows of a call that a mask (n,) marks, in their order, float64 (m, K), padded with -inf.

    pieces: rows of the call, int (p,), and values of each, (p, k).
    """
    positions = np.cumsum(mask) - 1
    chosen_pieces = [(positions[rows[part]], values[part]) for rows, values in pieces if (part := mask[rows]).any()]
    n, k = int(mask.sum()), max((values.shape[1] for _, values in chosen_pieces), default=0)
    table = np.full((n, k), -np.inf)
    for rows, values in chosen_pieces:
        table[rows, : values.shape[1]] = values
    return table


def _agree(answers: Answers, policy: Policy) -> bool:
    """Return whether the costs that calls report are in a policy's unit, as far as is known."""
    return answers.cost_unit in (None, policy.cost_unit) or policy.cost_unit == UNNAMED_UNIT


def _as_they_are(answers: Answers) -> Answers:
    return answers


def _all_but(n: int, rows: Mapping[int, str]) -> Bools:
    mask = np.ones(n, dtype=bool)
    mask[list(rows)] = False
    return mask
