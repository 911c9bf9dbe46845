"""What a method sees of a split, its answers there at every threshold, and measurements of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import DataError
from cauc_ray.numbers.answer_keys import own_answer
from cauc_ray.numbers.chain import UNKNOWN_LABEL, Chain, ChainExamples, ChainLogits, ChainPart, Costs, in_order
from cauc_ray.numbers.guarantees import StageGuarantees, stage_guarantees
from cauc_ray.numbers.intervals import share, share_to_come
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.numbers.rows import row_values, rows_at
from cauc_ray.numbers.sweep import Events, Frontier, Objective, stops_of, sweep
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import Measures, OfflineAccuracy, StageShare
from cauc_ray.policies.policy import Policy, Stage, Step, joined_states

Array: TypeAlias = npt.NDArray[Any]
AnyThreshold: TypeAlias = float | Floats | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class EmbeddingCall:
    """Call of a pool's model whose layer the embeddings are; every example pays it.

    Attributes:
        model: Name of the model.
        index: Its index in the chain; None if the chain lacks it.
        costs: Costs of its calls, float64 (N,), or one for all; 0 for a model of the chain, whose costs the chain has.
    """

    model: str
    index: int | None
    costs: Floats | float = 0.0


@dataclass(frozen=True, slots=True)
class Examples:
    """A split as a method sees it: the models' answers, and data on the queries themselves.

    Attributes:
        embeddings: Float32 (N, d), by an encoder that a router may look at before any model is called.
        embedding_call: Call that they need; None for an encoder outside the pool, whose cost is not counted.
        texts: Texts of the queries, N.
        encoder: Name of the encoder.
        hidden: Hidden states by model, float32 (N, d), available once it has answered.
    """

    chain: ChainLogits
    embeddings: Floats | None = None
    texts: tuple[str, ...] | None = None
    embedding_call: EmbeddingCall | None = None
    encoder: str = "encoder"
    hidden: Mapping[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        states = (("hidden states", vectors) for vectors in self.hidden.values())
        for what, rows in (("embeddings", self.embeddings), ("texts", self.texts), *states):
            if rows is not None and len(rows) != len(self.chain):
                raise DataError(f"{self.chain.source}: {len(rows)} {what} for {len(self.chain)} examples")

    def __len__(self) -> int:
        return len(self.chain)

    def correct(self) -> Bools:
        """Return which models' answers are right, bool (N, M); of labelled examples."""
        correct: Bools = own_answers(self.chain) == self.chain.labels[:, None]
        return correct

    def own_chain(self, models: Sequence[str], *, encoded: bool = False) -> ChainLogits:
        """Return the chain of some models, by name.   encoded: after the encoder, which every example pays."""
        indices = [self.chain.models.index(name) for name in models]
        chain = self.chain.of_models(indices)
        if not encoded:
            return chain
        assert self.embeddings is not None
        call, paid = self.embedding_call or EmbeddingCall("", None), self.chain.costs.per_call
        paid = np.asarray(call.costs) if call.index is None else paid[..., call.index]
        to_come = replace(chain, costs=costs_to_come(self).of_models(indices))
        name = f"layer of {self.encoder}" if self.encoder in models else self.encoder
        return to_come.after_encoder(name, self.embeddings, paid)

    def of_rows(self, rows: Ints, source: str | None = None) -> Examples:
        """Return some rows, int (n,).   source: their name; None for the one they had."""
        embeddings, texts, call = self.embeddings, self.texts, self.embedding_call
        chain = self.chain.of_rows(rows)
        return replace(
            self,
            chain=chain if source is None else replace(chain, source=source),
            embeddings=None if embeddings is None else embeddings[rows],
            texts=None if texts is None else tuple(texts[row] for row in rows),
            embedding_call=None if call is None else replace(call, costs=np.broadcast_to(call.costs, len(self))[rows]),
            hidden={model: states[rows] for model, states in self.hidden.items()},
        )

    def of_models(self, indices: Sequence[int]) -> Examples:
        """Return the examples with some of the models; the call of another one for its embedding is paid as before."""
        call = self.embedding_call
        if call is not None and call.index is not None:
            is_kept, costs = call.index in indices, self.chain.costs.per_call[..., call.index]
            call = (
                replace(call, index=[*indices].index(call.index)) if is_kept else EmbeddingCall(call.model, None, costs)
            )
        return replace(self, chain=self.chain.of_models(indices), embedding_call=call)

    @property
    def embedding_note(self) -> str:
        """Return the note in tables on a method that looks at the embeddings; empty where they cost nothing."""
        call = self.embedding_call
        return "" if call is None else f"features: the embedding by {call.model!r}, its call paid"

    def without_labels(self) -> Examples:
        """Return the same examples as they are when answers are asked for."""
        unknown = np.full_like(self.chain.labels, UNKNOWN_LABEL)
        return replace(self, chain=replace(self.chain, labels=unknown))


@dataclass(frozen=True, slots=True)
class Answers:
    """A method's answers.

    Attributes:
        predictions: Int32 (N,).
        calls: Bool (N, M), which models were called for each.
        other_costs: Float64 (N,), or one for all, of calls of models that the chain does not have.
    """

    predictions: Ints
    calls: Bools
    other_costs: Floats | float = 0.0

    def costs(self, chain: ChainExamples) -> Floats:
        """Return what each example cost, float64 (N,)."""
        cost: Floats = np.where(self.calls, chain.costs.per_call, 0.0).sum(axis=1)
        return cost + self.other_costs


@dataclass(frozen=True)
class Trace:
    """What a method would answer at each of its S steps; an example stops where its confidence reaches a threshold.

    Attributes:
        predictions: Int32 (N, S).
        confidences: Float64 (N, S); the last step stops every example that reaches it.
        calls: Bool (S, M), which models were called for an example that stops at a step.
        likeliest: Int16 (N, S), of each answer what Step.likeliest returns; None where not asked for.
        other_costs: Float64 (N,), or one for all, of calls of models that the chain does not have.
        worth: Float64 (N, S), what is compared with a threshold; None for the confidences.
        ends: Int (S,), the model that answers at each step; None for a cascade of all models, one after the other.
    """

    predictions: Ints
    confidences: Floats
    calls: Bools
    likeliest: Ints | None = None
    other_costs: Floats | float = 0.0
    worth: Floats | None = None
    ends: Ints | None = None

    @property
    def compared(self) -> Floats:
        """Return what is compared with a threshold, float64 (N, S)."""
        return self.confidences if self.worth is None else self.worth

    @cached_property
    def events(self) -> Events:
        """Return the moves of examples as the threshold rises, which all sweeps share."""
        return Events.of(self.compared[:, :-1])

    def of_rows(self, rows: Ints) -> Trace:
        """Return some of the rows, of arrays whose steps are contiguous: the order in which a sweep reads them."""
        predictions: Ints = self.predictions.T.take(rows, axis=1).T
        compared: Floats = self.compared.T.take(rows, axis=1).T
        paid = self.other_costs[rows] if isinstance(self.other_costs, np.ndarray) else self.other_costs
        worth = None if self.worth is None else compared
        confidences = compared if worth is None else self.confidences[rows]
        return Trace(predictions, confidences, self.calls, other_costs=paid, worth=worth, ends=self.ends)

    def frontier(self, chain: ChainExamples, objective: Objective = "accuracy", rows: Ints | None = None) -> Frontier:
        """Return all operating points on the chain's examples, which have labels.   rows: int (n,), on these alone."""
        if rows is None:
            trace, labels, costs, events = self, chain.labels, chain.costs, self.events
        else:
            trace, labels, costs = self.of_rows(rows), chain.labels[rows], chain.costs.of_rows(rows)
            events = self.events.of_rows(rows)
        points = sweep(trace.compared[:, :-1], trace.predictions, labels, costs, objective, self.calls, events)
        return replace(points, cost=points.cost + np.mean(trace.other_costs))

    def stops(self, threshold: AnyThreshold) -> Ints:
        """Return the step at which each example stops, int (N,).

        threshold: of what is compared with one, for all examples or for each, (N,); or confidences of all steps but the
        last.
        """
        if isinstance(threshold, tuple):
            return stops_of(self.confidences - np.array([*threshold, 0.0]), 0.0)
        return stops_of(self.compared, threshold)

    def answers(self, threshold: AnyThreshold) -> Answers:
        """Return the answers at a threshold."""
        return self.answers_after(self.stops(threshold))

    def answers_after(self, stops: Ints) -> Answers:
        """Return the answers of rows that stop at some steps, int (N,)."""
        return Answers(row_values(self.predictions, stops), self.calls[stops], self.other_costs)

    def at(self, threshold: AnyThreshold, chain: Chain) -> Answered:
        """Return what a policy of all of the chain's models answers at a threshold."""
        stops = self.stops(threshold)
        predictions, confidences = row_values(self.predictions, stops), row_values(self.confidences, stops)
        codes = None if self.likeliest is None else row_values(self.likeliest, stops)
        of_calls = chain.costs.of_calls(self.calls)
        costs = row_values(of_calls, stops) if of_calls.ndim > 1 else of_calls[stops]
        ends = stops if self.ends is None else self.ends[stops]
        calls = None if self.ends is None else self.calls[stops]
        return Answered(predictions, confidences, ends.astype(np.int8), costs, codes, calls)


@dataclass(frozen=True, slots=True)
class Answered:
    """A cascade's answers, replayed or live; all arrays (N,).

    Attributes:
        predictions: Int32.
        confidences: Float64.
        stages: Int8, which one answered.
        costs: Float64, of all calls made for the example.
        likeliest: Int16, as Step.likeliest has them; None where not asked for.
        calls: Bool (N, M), models called for each; None for all up to the one that answered.
    """

    predictions: Ints
    confidences: Floats
    stages: Ints
    costs: Floats
    likeliest: Ints | None = None
    calls: Bools | None = None

    def __len__(self) -> int:
        return len(self.predictions)

    def of_rows(self, rows: Ints | Bools) -> Answered:
        """Return some of the answers."""
        return Answered(*(None if of is None else of[rows] for of in self._arrays()))  # type: ignore[arg-type]

    @classmethod
    def joined(cls, parts: Sequence[Answered]) -> Answered:
        """Return the answers of several, one after another."""
        columns = zip(*(part._arrays() for part in parts), strict=True)
        return cls(*(None if of[0] is None else np.concatenate(of) for of in columns))  # type: ignore[arg-type]

    def _arrays(self) -> tuple[Array | None, ...]:
        return self.predictions, self.confidences, self.stages, self.costs, self.likeliest, self.calls


_Paid = TypeVar("_Paid", Answers, Trace)


def with_embedding_paid(unpaid: _Paid, examples: Examples) -> _Paid:
    """Return what a method found by looking at the examples' embeddings, with the call that these take."""
    call = examples.embedding_call
    if call is None:
        return unpaid
    if call.index is None:
        return replace(unpaid, other_costs=unpaid.other_costs + call.costs)
    calls = unpaid.calls.copy()
    calls[:, call.index] = True
    return replace(unpaid, calls=calls)


def costs_to_come(examples: Examples) -> Costs:
    """Return what calls cost beyond those made anyway: a model called for its embedding is free."""
    costs, call = examples.chain.costs, examples.embedding_call
    if call is None or call.index is None:
        return costs
    per_call = costs.per_call.copy()
    per_call[..., call.index] = 0.0
    return Costs(costs.unit, per_call)


def own_answers(chain: ChainLogits, models: Iterable[int] | None = None) -> Ints:
    """Return the models' own answers, int32 (N, S), the lowest index among equals.

    models: indices of S models of the chain; all in their order without it.
    """
    chosen = range(len(chain.models)) if models is None else models
    answers = [own_answer(chain.logits[model], chain.logit_kinds[model]) for model in chosen]
    return np.stack(answers, axis=1).astype(np.int32)


def trace_policy(policy: Policy, chain: Chain, *, likeliest: bool = False) -> Trace:
    """Take every step of a policy for every example of a chain.   likeliest: whether to record it."""
    names = ("predictions", "confidences", *["likeliest"] * likeliest, *["worth"] * policy.scored)
    ids = chain.example_ids if policy.by_id else None
    arrays = of_rows(chain, partial(_trace_block, policy, names, ids))
    traced: dict[str, Array | None] = dict(zip(names, arrays, strict=True))
    if policy.gains is not None:
        traced["worth"] = policy.gains.worth(arrays[1])
    elif policy.schedule is not None:
        traced["worth"] = places_in(policy.schedule, arrays[1])
    return Trace(calls=policy.calls, ends=None if policy.in_turn else policy.ends, **traced)  # type: ignore[arg-type]


def places_in(schedule: Floats, confidences: Floats) -> Floats:
    """Return the last row of a schedule at which rows stop at each step, float64 (N, S); -1 for none.

    schedule: float64 (P, S - 1), rising in each column.   confidences: float64 (N, S), those of the last are returned.
    """
    places = confidences.copy()
    for step, thresholds in enumerate(schedule.T):
        places[:, step] = np.searchsorted(thresholds, confidences[:, step], side="right") - 1.0
    return places


def _ids_of(ids: Sequence[str] | None, part: ChainPart, rows: slice) -> Sequence[str] | None:
    return None if ids is None else [ids[rank] for rank in part.ranks[rows].tolist()]


def _trace_block(
    policy: Policy, names: Sequence[str], ids: Sequence[str] | None, part: ChainPart, rows: slice
) -> tuple[Array, ...]:
    steps = policy.every_step([logits[rows] for logits in part.logits], _ids_of(ids, part, rows))
    return tuple(
        np.stack([step.likeliest() if name == "likeliest" else getattr(step, name) for step in steps]).T
        for name in names
    )


def replay(policy: Policy, chain: Chain) -> Answered:
    """Run a policy on saved logits, calling each stage for the deferred examples only."""
    policy.check_chain(chain)
    ids = chain.example_ids if policy.by_id else None
    predictions, confidences, stages, *calls = of_rows(chain, partial(_replay_block, policy, ids))
    if policy.in_turn:
        return Answered(predictions, confidences, stages, chain.costs.of_stops(stages))
    costs = Answers(predictions, calls[0]).costs(chain)
    return Answered(predictions, confidences, stages, costs, calls=calls[0])


def may_flip(policy: Policy, chain: ChainLogits, noise: Sequence[float]) -> int:
    """Return how many rows get another answer, or theirs from another stage, where noise is against it.

    noise: of each model's logits. It is added to all but the likeliest option, which loses as much; and the other way.
    """
    as_collected = replay(policy, chain)
    changed = np.zeros(len(chain), dtype=bool)
    for sign in (1.0, -1.0):
        moved = []
        for logits, size in zip(chain.logits, noise, strict=True):
            best = logits.argmax(axis=1, keepdims=True) == np.arange(logits.shape[1])
            moved.append(logits + sign * size * np.where(best, -1.0, 1.0))
        answered = replay(policy, replace(chain, logits=tuple(moved)))
        changed |= (answered.predictions != as_collected.predictions) | (answered.stages != as_collected.stages)
    return int(changed.sum())


def _replay_block(policy: Policy, ids: Sequence[str] | None, part: ChainPart, rows: slice) -> tuple[Array, ...]:
    block_ids = _ids_of(ids, part, rows)
    n = rows.stop - rows.start
    predictions, confidences, stages = np.empty(n, dtype=np.int32), np.empty(n), np.empty(n, dtype=np.int8)
    calls = np.zeros((n, len(policy.stages)), dtype=bool)
    block = [logits[rows] for logits in part.logits]
    for stage, reached, step in steps_of(
        policy, np.arange(n), lambda stage, at: block[stage] if len(at) == n else rows_at(block[stage], at), block_ids
    ):
        if not policy.in_turn:
            calls[reached, stage] = True
        # Deferred rows are answered again later.
        predictions[reached] = step.predictions
        confidences[reached] = step.confidences
        stages[reached] = stage
    return (predictions, confidences, stages) if policy.in_turn else (predictions, confidences, stages, calls)


def steps_of(
    policy: Policy, rows: Ints, logits_of: Callable[[int, Ints], Floats], ids: Sequence[str] | None = None
) -> Iterator[tuple[int, Ints, Step]]:
    """Take a policy's steps for some rows, and yield for each stage the rows that came to it and what it decided.

    A stage comes again where rows go to it later, from one that is after it.
    logits_of: called with a stage and the rows that reach it, int (n,): its logits of them, float (n, K).   ids: of the
    rows, if the policy is by_id.
    """
    first = policy.first(len(rows), ids)
    waiting: dict[int, list[tuple[Ints, Floats | None]]] = {}
    for stage, chosen in [(0, slice(None))] if first is None else by_stage(first):
        waiting[stage] = [(rows[chosen], None)]
    while waiting:
        stage = min(waiting)
        pieces = waiting.pop(stage)
        rows = pieces[0][0] if len(pieces) == 1 else np.concatenate([chosen for chosen, _ in pieces])
        if not len(rows):
            continue
        step = policy.step(
            stage, logits_of(stage, rows), joined_states([(len(chosen), state) for chosen, state in pieces])
        )
        yield stage, rows, step
        if step.next is None:
            on: list[tuple[int, Ints]] = [(stage + 1, np.flatnonzero(~step.accepted))]
        else:
            on = by_stage(np.where(step.accepted, -1, step.next))
        for to, chosen in on:
            if len(chosen):
                waiting.setdefault(to, []).append((rows[chosen], rows_at(step.state, chosen)))


def by_stage(stages: Ints) -> list[tuple[int, Ints]]:
    """Return for each stage the rows that go there, int (m,).   stages: int (n,), below 0 for nowhere."""
    return [(stage, np.flatnonzero(stages == stage)) for stage in np.unique(stages).tolist() if stage >= 0]


def answers_alone(policy: Policy, chain: Chain) -> Ints:
    """Return what each answering stage's model would answer by itself, int32 (N, M)."""
    (answers,) = of_rows(chain, partial(_block_alone, policy.answering))
    return answers


def _block_alone(stages: tuple[Stage, ...], part: ChainPart, rows: slice) -> tuple[Array]:
    logits_of_stages = zip(stages, part.logits[-len(stages) :], strict=True)
    return (np.stack([stage.best_option(logits[rows]) for stage, logits in logits_of_stages]).T.astype(np.int32),)


def of_rows(chain: Chain, compute: Callable[[ChainPart, slice], tuple[Array, ...]]) -> tuple[Array, ...]:
    """Return what is computed of every row, each array of it in the order of all rows.

    compute: from a part, wherever it is, and a block of its rows to arrays (n, ...), some for every row of the block.
    """
    ranks, parts = zip(*chain.each(partial(_of_part, compute)), strict=True)
    if isinstance(chain, ChainLogits):  # of one part, in order
        arrays: tuple[Array, ...] = parts[0]
        return arrays
    return tuple(in_order(ranks, arrays) for arrays in zip(*parts, strict=True))


def _of_part(
    compute: Callable[[ChainPart, slice], tuple[Array, ...]], part: ChainPart
) -> tuple[Ints, tuple[Array, ...]]:
    first, *later = list(part.blocks()) or [slice(0, 0)]
    arrays = compute(part, first)
    if not later:
        return part.ranks, arrays
    # Columns are contiguous, as a sweep reads them.
    whole = tuple(np.empty((*of.shape[:0:-1], len(part)), dtype=of.dtype).T for of in arrays)

    def keep(rows: slice, arrays: tuple[Array, ...]) -> None:
        for target, values in zip(whole, arrays, strict=True):
            target[rows] = values

    keep(first, arrays)
    mapped = in_threads if part.is_wide else map
    for _ in mapped(lambda rows: keep(rows, compute(part, rows)), later):
        pass
    return part.ranks, whole


def measure(answered: Answered, chain: Chain, split: str, *, with_f1: bool = True) -> Measures:
    """Measure answers to a chain's examples.   split: their name.   with_f1: whether to measure macro-F1, too."""
    labelled, reached, shares = chain.labelled, len(answered), []
    correct = (answered.predictions == chain.labels) & labelled
    answers = (
        np.bincount(of, minlength=len(chain.models))
        for of in (answered.stages, answered.stages[labelled], answered.stages[correct])
    )
    for index, (name, n, n_labelled, n_right) in enumerate(
        zip(chain.models, *(of.tolist() for of in answers), strict=True)
    ):
        if answered.calls is not None:
            reached = int(answered.calls[:, index].sum())
        shares.append(
            StageShare(
                name=name,
                reached=reached,
                answered=n,
                coverage=share(n, reached) if reached else None,
                accepted_accuracy=share(n_right, n_labelled) if n_labelled else None,
            )
        )
        reached -= n
    some, with_f1 = bool(labelled.any()), with_f1 and chain.has_classes
    cost, of_last = float(answered.costs.mean()), float(chain.costs.means[-1])
    return Measures(
        split=split,
        n=len(answered),
        accuracy=share(int(correct.sum()), int(labelled.sum())) if some else None,
        macro_f1=macro_f1(answered.predictions[labelled], chain.labels[labelled]) if some and with_f1 else None,
        cost=cost,
        relative_cost=cost / of_last if of_last > 0 else None,
        stages=tuple(shares),
        cost_deviation=float(answered.costs.std()),
    )


def measure_replay(policy: Policy, chain: Chain) -> tuple[Answered, Measures]:
    """Replay a policy and measure its answers."""
    answered = replay(policy, chain)
    return answered, measure(answered, chain, chain.source)


def measure_offline(trace: Trace, threshold: float | tuple[float, ...], chain: Chain) -> tuple[OfflineAccuracy, ...]:
    """Measure what a cascade answers where only its first stages can be reached: the first, the first two, ….

    An example that would go on to others keeps the answer that it has, as in a service that degrades.
    """
    stops = trace.stops(threshold)
    of_stages = []
    for last in range(trace.predictions.shape[1] - 1):
        predictions = row_values(trace.predictions, np.minimum(stops, last))
        n_right = int(((predictions == chain.labels) & chain.labelled).sum())
        accuracy = share_to_come(n_right, int(chain.labelled.sum()))
        of_stages.append(OfflineAccuracy(stages=last + 1, accuracy=accuracy, degraded=float((stops > last).mean())))
    return tuple(of_stages)


def measure_guarantees(policy: Policy, chain: Chain, trace: Trace | None = None) -> tuple[StageGuarantees | None, ...]:
    """Measure the paper's propositions at every stage, over the labelled examples that reach it.

    A stage's confidence is that of the answer which it would give: RF's is of the scores fused so far. Its fallback is
    the rest of the cascade, which may stop at any later stage and costs what it then calls.

    What the rest of a cascade does with an example that stops is known here too, from all of its logits.
    None for the last stage, which has no threshold, and where no labelled example comes; for all stages where it is
    not confidences that are compared with the threshold: the propositions say nothing of these.
    """
    ends = policy.ends
    last, n_silent = len(ends) - 1, len(policy.stages) - len(ends)
    if policy.scored:
        return (None,) * len(policy.stages)
    trace = trace or trace_policy(policy, chain)
    stops = trace.stops(policy.threshold)
    thresholds = [policy.threshold_of(end) for end in ends[:-1].tolist()]
    accepted = trace.confidences >= [*thresholds, 0.0]
    correct = trace.predictions == chain.labels[:, None]
    guarantees: list[StageGuarantees | None] = []
    for stage in range(last):
        rows = np.flatnonzero(chain.labelled & (stops >= stage))
        if not len(rows):
            guarantees.append(None)
            continue
        onward = np.full(len(rows), last)
        for later in range(last - 1, stage, -1):
            np.copyto(onward, later, where=accepted[rows, later])
        costs = chain.costs.of_rows(rows)
        extra = costs.of_stops(ends[onward]) - costs.of_stops(np.full(len(rows), ends[stage]))
        confidences, right = trace.confidences[rows, stage], correct[rows, stage]
        guarantees.append(stage_guarantees(confidences, right, correct[rows, onward], extra, thresholds[stage]))
    return (*(None,) * n_silent, *guarantees, None)
