"""Cascade routing (Dekoninck et al., ICML 2025): the next model, or an answer, chosen anew after every call.

After the calls of a set R of models, model i answers rightly with probability q_i, a logistic regression on their
outputs. The next call of a row is the model k of highest max(q_k, max_R q) - price x cost_k if that is above max_R q;
otherwise the row takes the answer of the model of R of highest q. Prices, one for each number of calls, are searched
on labelled rows.
Models are called in the order of the chain, of which any may be left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Literal, TypeAlias

import numpy as np
from pydantic import Field

from cauc_ray.baselines.frugalgpt import logistic
from cauc_ray.numbers.chain import in_order
from cauc_ray.numbers.logits import LOG_FLOOR, log_softmax, real_options, same_width
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.products import products
from cauc_ray.numbers.sweep import pareto
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.features import Scaler
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.policy import Policy, Step
from cauc_ray.policies.routers import ChoosingPolicy, RoutedStage, sigmoid
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.trace import Examples, costs_to_come, of_rows

# Models by index, in order, that were called for a row.
Called: TypeAlias = tuple[int, ...]

# Each set of models that may be called has its own estimators; beyond this number the largest sets are left out.
MOST_SETS = 128


@cache
def sets_of(n_models: int) -> tuple[Called, ...]:
    """Return the sets of models that may be called for a row, the empty one first, by size."""
    sets: list[Called] = [()]
    for size in range(1, n_models + 1):
        larger = list(combinations(range(n_models), size))
        if size > 1 and len(sets) + len(larger) > MOST_SETS:
            break
        sets += larger
    return tuple(sets)


def columns_of(logs: Mapping[int, Floats]) -> dict[Called, Floats]:
    """Return what features are made of, for each model called and for each pair of them.

    Args:
        logs: The log probabilities of the models called, (n, K), by index.

    Returns:
        Of a model its highest probability and its entropy; of a pair whether they agree, and their Jensen-Shannon
        divergence, float64 (n, 2).
    """
    floored = {model: np.maximum(log, LOG_FLOOR) for model, log in logs.items()}
    shares = {model: np.exp(log) for model, log in logs.items()}
    answers = {model: log.argmax(axis=1) for model, log in logs.items()}
    columns: dict[Called, Floats] = {
        (model,): np.column_stack([p.max(axis=1), -_sum(p * floored[model])]) for model, p in shares.items()
    }
    for first, second in combinations(logs, 2):
        p, q = shares[first], shares[second]
        mean = np.log(np.maximum((p + q) / 2, np.exp(LOG_FLOOR)))
        divergence = (_sum(p * (floored[first] - mean)) + _sum(q * (floored[second] - mean))) / 2
        columns[first, second] = np.column_stack([answers[first] == answers[second], divergence])
    return columns


def features_of(columns: Mapping[Called, Floats], called: Called, query_odds: Floats) -> Floats:
    """Return the features of rows after some calls: the log odds, then columns of each model and pair, float64 (n, F).

    Args:
        columns: As columns_of returns them, of these models at least.
        called: The models called.
        query_odds: Log odds by an embedding, (n, E).
    """
    alone = [columns[model,] for model in called]
    return np.column_stack([query_odds, *alone, *(columns[pair] for pair in combinations(called, 2))])


def _sum(terms: Floats) -> Floats:
    """Return sums over options, one after the other, so that options that a row lacks change no bit."""
    total: Floats = np.cumsum(terms, axis=1)[:, -1]
    return total


def next_model(qualities: Floats, called: Called, price: float, costs: Floats) -> Ints:
    """Return the model to call next for each row.

    Args:
        qualities: The probability that each model is right, float (n, M).
        called: The models called.
        price: Of a unit of cost.
        costs: Of a call of each model, float64 (M,).

    Returns:
        The models by index, -1 for rows that stop, int (n,).
    """
    n, m = qualities.shape
    first = called[-1] + 1 if called else 0
    if first == m:
        return np.full(n, -1)
    best = qualities[:, list(called)].max(axis=1) if called else np.full(n, -np.inf)
    gains = np.maximum(qualities[:, first:], best[:, None]) - price * costs[first:]
    to = gains.argmax(axis=1)
    return np.where(gains[np.arange(n), to] > best, first + to, -1)


class CascadeRoutingPolicy(ChoosingPolicy, SolvedPolicy):
    """Cascade routing. A solution's numbers are prices of a unit of cost, after 0, 1, … calls.

    A row carries the log probabilities of the models called, option by option: S = E + K M, E = M log odds by an
    embedding where there is one, else 0. Arrays: weights of each set's estimators, (M, F + 1), the last of them
    offsets, by the set; and of log odds that each model is right by the embedding, (M, d), with offsets.
    """

    method: Literal["cascade-routing"] = "cascade-routing"
    stages: tuple[RoutedStage, ...] = Field(min_length=1)

    @property
    def sets(self) -> tuple[Called, ...]:
        """Return the sets of models that may be called."""
        return sets_of(len(self.answering))

    @property
    def n_numbers(self) -> int:
        """Return how many calls a row may take."""
        return len(self.sets[-1])

    @property
    def ends(self) -> Ints:
        """Return the stage that was called last, of each set of models that may be called."""
        return np.array([called[-1] for called in self.sets[1:]]) + self._first

    @property
    def calls(self) -> Bools:
        """Return the calls of each such set; with an encoder its call, too."""
        calls = np.zeros((len(self.sets) - 1, len(self.stages)), dtype=bool)
        for row, called in zip(calls, self.sets[1:], strict=True):
            row[[0] * self._first + [self._first + model for model in called]] = True
        return calls

    def query_odds(self, embeddings: Floats) -> Floats:
        """Return the log odds by embeddings, float (n, d), that the models are right, float64 (n, E)."""
        if self.encoder is None:
            return np.zeros((len(embeddings), 0))
        odds = products(np.asarray(embeddings, dtype=np.float64), self.arrays["of_models"])
        odds += self.arrays["model_offsets"]
        return odds

    def qualities(self, columns: Mapping[Called, Floats], called: Called, query_odds: Floats) -> Floats:
        """Return q of all models after some calls, float64 (n, M). Arguments are those of features_of."""
        weights = self.arrays[name_of(called)]
        return sigmoid(products(features_of(columns, called, query_odds), weights[:, :-1]) + weights[:, -1])

    def first(self, n: int, ids: Sequence[str] | None) -> Ints | None:
        """Return the first model, the same of all rows; None with an encoder, which is called first."""
        if self.encoder is not None:
            return None
        return self._next_model(self.qualities({}, (), np.zeros((n, 0))), (), self.solution).astype(np.int8)

    def step(self, stage: int, logits: Floats, state: Floats | None) -> Step:
        """Go on to another model, or take the answer of one of those called."""
        if stage < self._first:
            query_odds = self.query_odds(logits)
            to = self._first + self._next_model(self.qualities({}, (), query_odds), (), self.solution)
            return self.no_answer(query_odds, to.astype(np.int8))
        query_odds, seen = self._seen(stage, log_softmax(real_options(logits)), state)
        n, m = len(seen), len(self.answering)
        codes = np.isfinite(seen).any(axis=1) @ (1 << np.arange(m))
        to, takers = np.full(n, -1), np.zeros(n, dtype=np.int64)
        for code in np.unique(codes).tolist():
            rows, called = np.flatnonzero(codes == code), tuple(model for model in range(m) if code >> model & 1)
            columns = columns_of({model: seen[rows, :, model] for model in called})
            qualities = self.qualities(columns, called, query_odds[rows])
            to[rows], takers[rows] = self._next_model(qualities, called, self.solution), takers_of(qualities, called)
        step = _chosen(takers, lambda model, rows: self.own_answer(self._first + model, seen[rows, :, model]))
        carried, worth = np.column_stack([query_odds, seen.reshape(n, -1)]), np.where(to < 0, np.inf, -np.inf)
        return replace(step, accepted=to < 0, state=carried, next=(self._first + to).astype(np.int8), worth=worth)

    def readings(self, logits: Sequence[Floats]) -> Floats:
        """Return q of all models after the calls of every set, float64 (n, sets, M)."""
        query_odds, columns = self.query_odds(logits[0]), columns_of(_logs(logits[self._first :]))
        return np.stack([self.qualities(columns, called, query_odds) for called in self.sets], axis=1)

    def stops(self, readings: Floats, numbers: tuple[float, ...]) -> Ints:
        """Return the step after whose calls each row stops, int (n,)."""
        stops, empty = np.zeros(len(readings), dtype=np.int64), np.zeros(0, dtype=np.int64)
        waiting: dict[Called, Ints] = {(): np.arange(len(readings))}
        for place, called in enumerate(self.sets):
            rows = waiting.pop(called, empty)
            to = self._next_model(readings[rows, place], called, numbers)
            stops[rows[to < 0]] = place - 1  # no row stops before a call
            waiting |= {(*called, model): rows[to == model] for model in np.unique(to[to >= 0]).tolist()}
        return stops

    def every_step(self, logits: Sequence[Floats], ids: Sequence[str] | None) -> list[Step]:
        """Return the step after each set of calls, as if its models had been called for every row."""
        readings = self.readings(logits)
        stops, steps = self.stops(readings, self.solution), list[Step]()
        logs = _logs(logits[self._first :])
        alone = [self.own_answer(self._first + model, values) for model, values in logs.items()]
        for place, called in enumerate(self.sets[1:]):
            takers = takers_of(readings[:, place + 1], called)
            step = _chosen(takers, lambda model, rows: _of_rows(alone[model], rows))
            worth = np.where(stops == place, np.inf, -np.inf)
            steps.append(replace(step, worth=worth, accepted=worth > 0))
        return steps

    @property
    def _first(self) -> int:
        return int(self.encoder is not None)

    def _seen(self, stage: int, logs: Floats, state: Floats | None) -> tuple[Floats, Floats]:
        """Return the log odds by an embedding, (n, E), and the log probabilities of all models called, (n, K, M).

        Args:
            stage: The stage called last.
            logs: The log probabilities of its model, (n, K).
            state: The rows' state before that call.

        Raises:
            DataError: A row's options differ from those before.
        """
        n, m = len(logs), len(self.answering)
        n_odds = m * self._first
        before = np.zeros((n, n_odds)) if state is None else state
        query_odds, earlier = (
            before[:, :n_odds],
            before[:, n_odds:].reshape(n, (before.shape[1] - n_odds) // m, m),
        )
        names = self.stages[stage].name, "the stages before"
        logs, _ = same_width(logs, earlier.max(axis=2), names) if earlier.size else (logs, None)
        seen = np.full((n, logs.shape[1], m), -np.inf)
        seen[:, : earlier.shape[1]] = earlier
        seen[:, :, stage - self._first] = logs
        return query_odds, seen

    def _next_model(self, qualities: Floats, called: Called, numbers: tuple[float, ...]) -> Ints:
        """Return the model to call next by a solution's numbers, -1 for none, int (n,)."""
        if len(called) == self.n_numbers:
            return np.full(len(qualities), -1)
        costs = np.array([stage.cost for stage in self.answering])
        return next_model(qualities, called, numbers[len(called)], costs)


def takers_of(qualities: Floats, called: Called) -> Ints:
    """Return the model whose answer a row takes if it stops after some calls, int (n,).

    Args:
        qualities: The probability that each model is right, float64 (n, M).
        called: The models called.
    """
    takers: Ints = np.array(called)[qualities[:, list(called)].argmax(axis=1)]
    return takers


def _chosen(takers: Ints, answer: Callable[[int, Ints], Step]) -> Step:
    """Return the answers of one model for each row.

    Args:
        takers: The model that answers, by index, int (n,).
        answer: From a model and rows to the model's answers for them.
    """
    models = np.unique(takers).tolist()
    parts = [np.flatnonzero(takers == model) for model in models]
    steps = [answer(model, rows) for model, rows in zip(models, parts, strict=True)]
    if len(steps) == 1:
        return steps[0]
    fields = ("predictions", "confidences", "scores")
    joined = {name: in_order(parts, [getattr(step, name) for step in steps]) for name in fields}
    return replace(steps[0], **joined)


def _of_rows(step: Step, rows: Ints) -> Step:
    """Return the answers of some rows, of all as they are."""
    if len(rows) == len(step.predictions):
        return step
    return replace(
        step, predictions=step.predictions[rows], confidences=step.confidences[rows], scores=step.scores[rows]
    )


def name_of(called: Called) -> str:
    """Return the name of the array that holds a set's estimators.

    >>> name_of((0, 2)), name_of(())
    ('after/0,2', 'after/')
    """
    return "after/" + ",".join(map(str, called))


# Numbers of prices drawn in each round, and of rounds: the first at random, later ones near the best so far.
N_DRAWN, N_ROUNDS = 250, 4
# Log odds of the second of two options.
_ODDS = np.array([-1.0, 1.0])


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Fit the estimators on calibration, and search prices on validation.

    The original weighs sets of models by the expectation of their highest quality, with a normal error of each
    estimate; here by the highest estimate. Then more than one further model is never worth more than the best of them,
    so that only single ones are compared. Its features are those of the rated model; here those of all models called.
    """
    calibration, validation = fitting.calibration, fitting.validation
    encoded, chain = calibration.embeddings is not None, calibration.chain
    if len(chain.models) == 1:
        return fit_single(fitting, 0)
    arrays, query_odds = dict[str, Floats](), np.zeros((len(chain), 0))
    if calibration.embeddings is not None:
        odds = [_odds_by(calibration.embeddings, right) for right in calibration.correct().T]
        weights, offsets, held_out = zip(*odds, strict=True)
        arrays |= {"of_models": np.stack(weights), "model_offsets": np.array(offsets)}
        query_odds = np.column_stack(held_out)
    right, models = calibration.correct(), range(len(chain.models))
    in_blocks = of_rows(chain, lambda part, rows: (*columns_of(_logs([of[rows] for of in part.logits])).values(),))
    columns = dict(zip([*combinations(models, 1), *combinations(models, 2)], in_blocks, strict=True))
    for called in sets_of(len(models)):
        arrays[name_of(called)] = _estimators(features_of(columns, called, query_odds), right)
    policy = fitting.policy(CascadeRoutingPolicy, encoded=encoded, solutions=()).with_arrays(arrays)
    return [policy.model_copy(update={"solutions": search(policy, validation, fitting.seed)})]


def _note(fitting: Fitting) -> str:
    n_models = len(fitting.calibration.chain.models)
    if n_models == 1:
        return ""
    most = len(sets_of(n_models)[-1])
    notes = "no variances", f"at most {most} calls" * (most < n_models), fitting.validation.embedding_note
    return "; ".join(filter(None, notes))


def _odds_by(embeddings: Floats, right: Bools) -> tuple[Floats, float, Floats]:
    """Return weights, (d,), and offset of the log odds that a model is right, and held-out ones; 0 if unpredictable."""
    vectors = np.asarray(embeddings, dtype=np.float64)
    fit = fit_classifier(vectors, right.astype(np.int64), 2)
    if not fit.explains:
        return np.zeros(vectors.shape[1]), 0.0, np.zeros(len(right))
    return fit.weights @ _ODDS, float(fit.offsets @ _ODDS), fit.held_out @ _ODDS


def _logs(logits: Sequence[Floats]) -> dict[int, Floats]:
    """Return the log probabilities of each model, (n, K), by index."""
    return {model: log_softmax(real_options(values)) for model, values in enumerate(logits)}


def _estimators(features: Floats, right: Bools) -> Floats:
    """Return logistic regressions of whether each model is right, with offsets last, float64 (M, F + 1)."""
    scaler = Scaler.of(features.astype(np.float32))
    fits = [logistic(scaler(features.astype(np.float32)).astype(np.float64), labels) for labels in right.T]
    weights = np.array([weights for weights, _ in fits]) / scaler.scales
    offsets = np.array([offset for _, offset in fits]) - weights @ scaler.means
    return np.column_stack([weights, offsets])


def search(policy: CascadeRoutingPolicy, validation: Examples, seed: int) -> tuple[tuple[float, ...], ...]:
    """Return prices by rising cost on validation: each has more right than all that cost no more.

    Prices are drawn from those at which some row changes its way; first one for all numbers of calls or one for each,
    then with one changed of those that are best so far.
    """
    chain = chain_of(policy, validation)
    (readings,) = of_rows(chain, lambda part, rows: (policy.readings([logits[rows] for logits in part.logits]),))
    rows, n, correct = np.arange(len(validation)), policy.n_numbers, validation.correct()
    takers = [takers_of(readings[:, place], called) for place, called in enumerate(policy.sets) if called]
    right = np.stack([correct[rows, models] for models in takers], axis=1)
    costs = costs_to_come(validation).of_calls(policy.calls[:, len(policy.stages) - len(policy.answering) :])
    costs = np.broadcast_to(costs, right.shape)
    limits = _limits(policy, readings)
    rng = np.random.default_rng(seed)
    solutions, cost, n_right = list[tuple[float, ...]](), np.zeros(0), np.zeros(0)

    def draw() -> list[Floats]:
        at = rng.random((N_DRAWN, n))
        at[: N_DRAWN // 2] = at[: N_DRAWN // 2, :1]
        at[:2] = [[0.0], [1.0]]  # the ends
        return [
            np.array([np.quantile(prices, share) for prices, share in zip(limits, shares, strict=True)])
            for shares in at
        ]

    def near(best: Sequence[tuple[float, ...]]) -> list[Floats]:
        drawn = [np.array(best[index]) for index in rng.integers(len(best), size=N_DRAWN)]
        for prices, place, share in zip(drawn, rng.integers(n, size=N_DRAWN), rng.random(N_DRAWN), strict=True):
            prices[place] = np.quantile(limits[place], share)
        return drawn

    for turn in range(N_ROUNDS):
        tried = [tuple(prices.tolist()) for prices in (near(solutions) if turn else draw())]
        stops = [policy.stops(readings, prices) for prices in tried]
        cost = np.append(cost, [costs[rows, places].mean() for places in stops])
        n_right = np.append(n_right, [right[rows, places].sum() for places in stops])
        best = pareto(cost, n_right)
        solutions, cost, n_right = [[*solutions, *tried][index] for index in best], cost[best], n_right[best]
    return tuple(solutions)


def _limits(policy: CascadeRoutingPolicy, readings: Floats) -> list[Floats]:
    """Return, after each number of calls, prices at which some row's next model changes."""
    limits: list[list[Floats]] = [[np.zeros(1)] for _ in range(policy.n_numbers)]
    all_costs = np.array([stage.cost for stage in policy.answering])
    for called, qualities in zip(policy.sets, np.moveaxis(readings, 1, 0), strict=True):
        first = called[-1] + 1 if called else 0
        if len(called) == policy.n_numbers or first == qualities.shape[1]:
            continue
        later, costs = qualities[:, first:], all_costs[first:]
        if called:
            best = qualities[:, list(called)].max(axis=1)
            gains = (later - best[:, None])[:, costs > 0] / costs[costs > 0]
        else:  # which model is called first
            model, later_model = np.triu_indices(len(costs), 1)
            differ = costs[later_model] != costs[model]
            gains = (later[:, later_model] - later[:, model])[:, differ] / (costs[later_model] - costs[model])[differ]
        rising = gains[gains > 0]
        limits[len(called)] += [rising, np.array([2 * rising.max(initial=0.0)])]
    return [np.unique(np.concatenate(prices)) for prices in limits]


METHOD = Method("cascade-routing", "cascade", fit, packages=("sklearn",), extra="baselines", note=_note)
