"""Cascade routing (Dekoninck et al., ICML 2025): the next model, or an answer, chosen anew after every call.

The original estimates, for each set of models called, the probability that each model is right, and weighs the highest
of a set against its cost. Its prices, one for each number of calls, are searched on labelled rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.logits import log_softmax, real_options
from cauc_ray.numbers.multinomial import fit_classifier
from cauc_ray.numbers.sweep import pareto
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.baselines.frugalgpt import logistic
from cauc_ray.policies.baselines.routing import fit_single
from cauc_ray.policies.baselines.solved import Solved
from cauc_ray.policies.cascade_routing import Called, CascadeRoutingPolicy, features_of, name_of, onward, sets_of
from cauc_ray.policies.features import Scaler
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples, costs_to_come

# Prices are drawn at random, then near the best so far, so many each time.
N_DRAWN, N_ROUNDS = 250, 4
# Log odds of the second of two options.
_ODDS = np.array([-1.0, 1.0])


@dataclass(frozen=True, slots=True)
class Read:
    """What is known of rows after every set of calls.

    qualities: float64 (N, M) by set.   costs: of the models' calls, float64 (M,).
    """

    qualities: Mapping[Called, Floats]
    costs: Floats


@dataclass(frozen=True, slots=True)
class Prices:
    """A price of a unit of cost after 0, 1, … calls.   order: of all models, that of the chain."""

    order: tuple[int, ...]
    numbers: tuple[float, ...]

    def replay(self, read: Read) -> tuple[Ints, Bools]:
        """Return whose answer each row takes, int (N,), and which models it calls, bool (N, M)."""
        first = read.qualities[()]
        takers, calls = np.zeros(len(first), dtype=np.int64), np.zeros(first.shape, dtype=bool)
        waiting: dict[Called, Ints] = {(): np.arange(len(first))}
        for called, qualities in read.qualities.items():
            if called not in waiting:
                continue
            rows = waiting.pop(called)
            to = np.full(len(rows), -1)
            if len(called) < len(self.numbers):
                to = onward(qualities[rows], called, self.numbers[len(called)], read.costs)
            for model in np.unique(to).tolist():
                own = rows[to == model]
                if model < 0:
                    takers[own] = np.array(called)[qualities[own][:, list(called)].argmax(axis=1)]
                else:
                    waiting[*called, model], calls[own, model] = own, True
        return takers, calls


def fit_cascade_routing(fitting: Fitting) -> Fitted:
    """Fit the estimators on calibration, and search prices on validation.

    The original weighs sets of models by the expectation of their highest quality, with a normal error of each
    estimate; here by the highest estimate. Then more than one further model is never worth more than the best of them,
    so that only single ones are compared. Its features are those of the rated model; here those of all models called.
    """
    calibration, validation = fitting.calibration, fitting.validation
    encoded, chain = calibration.embeddings is not None, calibration.chain
    if len(chain.models) == 1:
        return fit_single(fitting, 0)
    arrays, told = dict[str, Floats](), np.zeros((len(chain), 0))
    if calibration.embeddings is not None:
        odds = [_odds_by(calibration.embeddings, right) for right in calibration.correct().T]
        weights, offsets, columns = zip(*odds, strict=True)
        arrays |= {"of_models": np.stack(weights), "model_offsets": np.array(offsets)}
        told = np.column_stack(columns)
    logs, right = _logs(calibration), calibration.correct()
    sets = sets_of(len(chain.models))
    for called in sets:
        arrays[name_of(called)] = _estimators(features_of([logs[model] for model in called], called, told), right)
    policy = fitting.policy(CascadeRoutingPolicy, encoded=encoded, solutions=()).with_arrays(arrays)
    solutions = search(policy, validation, fitting.seed)
    notes = ["no variances", f"at most {len(sets[-1])} calls" * (len(sets[-1]) < len(chain.models))]
    note = "; ".join(filter(None, (*notes, validation.embedding_note)))
    return Solved.of(policy, read_of, solutions, validation, note)


def _odds_by(embeddings: Floats, right: Bools) -> tuple[Floats, float, Floats]:
    """Return weights, (d,), and offset of the log odds that a model is right, and held-out ones; 0 if unpredictable."""
    vectors = np.asarray(embeddings, dtype=np.float64)
    fit = fit_classifier(vectors, right.astype(np.int64), 2)
    if not fit.explains:
        return np.zeros(vectors.shape[1]), 0.0, np.zeros(len(right))
    return fit.weights @ _ODDS, float(fit.offsets @ _ODDS), fit.held_out @ _ODDS


def _logs(examples: Examples) -> list[Floats]:
    return [log_softmax(real_options(logits)) for logits in examples.chain.logits]


def _estimators(features: Floats, right: Bools) -> Floats:
    """Return logistic regressions of whether each model is right, with offsets last, float64 (M, F + 1)."""
    scaler = Scaler.of(features.astype(np.float32))
    fits = [logistic(scaler(features.astype(np.float32)).astype(np.float64), own) for own in right.T]
    weights = np.array([weights for weights, _ in fits]) / scaler.scales
    offsets = np.array([offset for _, offset in fits]) - weights @ scaler.means
    return np.column_stack([weights, offsets])


def read_of(policy: CascadeRoutingPolicy, examples: Examples) -> Read:
    """Return what a policy without prices reads of examples."""
    logs = _logs(examples)
    told = policy.told(np.zeros((len(examples), 0)) if examples.embeddings is None else examples.embeddings)
    qualities = {called: policy.qualities([logs[model] for model in called], called, told) for called in policy.sets}
    return Read(qualities, np.array([stage.cost for stage in policy.answering]))


def search(policy: CascadeRoutingPolicy, validation: Examples, seed: int) -> list[Prices]:
    """Return prices by rising cost on validation: each has more right than all that cost no more.

    Prices are drawn from those at which some row changes its way; first one for all numbers of calls or one for each,
    then with one changed of those that are best so far.
    """
    read, costs, correct = read_of(policy, validation), costs_to_come(validation).per_call, validation.correct()
    n, order = policy.n_numbers, tuple(range(len(policy.answering)))
    limits = _limits(read, n)
    rng = np.random.default_rng(seed)
    found, cost, n_right = list[Prices](), np.zeros(0), np.zeros(0)

    def draw() -> list[Floats]:
        at = rng.random((N_DRAWN, n))
        at[: N_DRAWN // 2] = at[: N_DRAWN // 2, :1]
        at[:2] = [[0.0], [1.0]]  # the ends
        return [np.array([np.quantile(own, share) for own, share in zip(limits, shares, strict=True)]) for shares in at]

    def near(best: Sequence[Prices]) -> list[Floats]:
        drawn = [np.array(best[index].numbers) for index in rng.integers(len(best), size=N_DRAWN)]
        for prices, place, share in zip(drawn, rng.integers(n, size=N_DRAWN), rng.random(N_DRAWN), strict=True):
            prices[place] = np.quantile(limits[place], share)
        return drawn

    for turn in range(N_ROUNDS):
        tried = [Prices(order, tuple(prices.tolist())) for prices in (near(found) if turn else draw())]
        replayed = [prices.replay(read) for prices in tried]
        cost = np.append(cost, [np.where(calls, costs, 0.0).sum(axis=1).mean() for _, calls in replayed])
        n_right = np.append(n_right, [correct[np.arange(len(correct)), takers].sum() for takers, _ in replayed])
        best = pareto(cost, n_right)
        found, cost, n_right = [[*found, *tried][index] for index in best], cost[best], n_right[best]
    return found


def _limits(read: Read, n: int) -> list[Floats]:
    """Return, after each number of calls, prices from which on some row goes on to no other model than before."""
    found: list[list[Floats]] = [[np.zeros(1)] for _ in range(n)]
    for called, qualities in read.qualities.items():
        first = called[-1] + 1 if called else 0
        if len(called) == n or first == qualities.shape[1]:
            continue
        later, costs = qualities[:, first:], read.costs[first:]
        if called:
            best = qualities[:, list(called)].max(axis=1)
            gains = (later - best[:, None])[:, costs > 0] / costs[costs > 0]
        else:  # which model is called first
            one, other = np.triu_indices(len(costs), 1)
            differ = costs[other] != costs[one]
            gains = (later[:, other] - later[:, one])[:, differ] / (costs[other] - costs[one])[differ]
        kept = gains[gains > 0]
        found[len(called)] += [kept, np.array([2 * kept.max(initial=0.0)])]
    return [np.unique(np.concatenate(own)) for own in found]
