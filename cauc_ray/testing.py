"""Checks of a method, ours or another package's, as scikit-learn's check_estimator has them for estimators."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cauc_ray.cascade.bundles import Bundle, Part, joined
from cauc_ray.cascade.worker import Worker
from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts
from cauc_ray.numbers.answer_keys import NO_ANSWER, answer_vectors
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits, Costs
from cauc_ray.numbers.logits import ANSWERS, VECTOR_KINDS, top_option
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.by_method import method_of
from cauc_ray.policies.family import Control, Family, chain_of
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Answered, Examples, measure_replay, replay, trace_policy

MODELS = ("m0", "m1", "m2")
N_FITTED, N_TEST, N_OPTIONS, N_FEATURES = 80, 60, 4, 8
# The share of rows on which a model in words says nothing.
_SILENT = 0.1
# Of what models say in words; any 31 bits.
_KEYS = np.random.default_rng(0).integers(2**31, size=N_OPTIONS, dtype=np.int32)


def check_method(name: str, *, embedding: bool | None = None, seed: int = 0) -> None:
    """Check that a registered method keeps what methods promise, on a small chain of three models.

    The checks: it is fitted alike twice; its answers do not depend on labels, on neighbours, on the order of rows or on
    models that are not called; its curve is that of its answers. Its policy keeps a budget on validation, and gives
    the same answers by steps in any batches, by a trace, a replay, a prediction and the worker of runs and services,
    and after saving and loading.

    Args:
        name: The method's name, or single:MODEL for a model of m0, m1 and m2.
        embedding: Whether queries have embeddings; None for methods that need them.
        seed: Random seed of the chain and of the fit.

    Raises:
        AssertionError: A promise is broken; the message names it.
        ConfigError: The method is unknown, cannot run here, or trains on texts.

    Examples:
        >>> from cauc_ray.testing import check_method
        >>> check_method("base")
    """
    method = method_of(name, MODELS)
    if method.needs == "texts":
        raise ConfigError(f"method {name!r} trains on texts, which the check's chain does not have")
    embedded = method.needs == "embedding" if embedding is None else embedding
    splits = [_examples(seed, split, embedded=embedded, hidden=method.needs == "hidden states") for split in range(3)]
    if method.reads == "answers":
        splits = [_in_words(examples) for examples in splits]
    fitting, test = Fitting(splits[0], splits[1], seed=seed), splits[2]
    family, again = method.family(fitting), method.family(fitting)
    _require(np.array_equal(family.points.cost, again.points.cost), "two fits with one seed are alike")
    _require(np.array_equal(family.points.quality, again.points.quality), "two fits with one seed are alike")
    _check_answers(method, family, test)
    _check_curve(method, family, test)
    if isinstance(family.members[0], Control):
        _require(bool(method.unpublished), "a method whose fit returns controls says why it has no policy")
    elif not method.unpublished:
        for policy, setting in _chosen(family, fitting):
            compared, answers = family.answers(test, setting), replay(policy, chain_of(policy, test))
            is_equal = np.array_equal(answers.predictions, compared.predictions)
            _require(is_equal, "a policy answers as its method in a comparison")
            _require(np.allclose(answers.costs, compared.costs(test.chain)), "a policy costs what its method does")
            _check_policy(policy, test)


def _require(holds: bool | np.bool_, promise: str) -> None:
    if not holds:
        raise AssertionError(f"broken promise: {promise}")


def _examples(seed: int, split: int, *, embedded: bool, hidden: bool) -> Examples:
    """Return examples with two to four options, of which three models have costs by call."""
    rng, n = np.random.default_rng([seed, split]), N_TEST if split == 2 else N_FITTED
    n_options = rng.integers(2, N_OPTIONS + 1, n)
    labels = rng.integers(0, n_options).astype(np.int32)
    vectors = rng.standard_normal((n, N_FEATURES)).astype(np.float32)
    directions = np.random.default_rng(seed).standard_normal((N_FEATURES, len(MODELS)))
    logits = []
    for model in range(len(MODELS)):
        scores = rng.standard_normal((n, N_OPTIONS))
        scores[np.arange(n), labels] += 0.5 * (model + 1) + np.maximum(vectors @ directions[:, model], 0)
        scores[np.arange(N_OPTIONS) >= n_options[:, None]] = -np.inf
        logits.append(scores.astype(np.float32))
    costs = Costs("GFLOPs", np.array([1.0, 5.0, 20.0]) * rng.uniform(0.5, 2.0, (n, 3)))
    ids = tuple(f"{split}-{row}" for row in range(n))
    chain = ChainLogits(
        models=MODELS,
        logits=tuple(logits),
        example_ids=ids,
        labels=labels,
        costs=costs,
        per_call_costs=True,
        source=f"split {split}",
        logit_kind="raw",
    )
    states = dict.fromkeys(MODELS, vectors) if hidden else {}
    return Examples(chain, vectors if embedded else None, hidden=states)


def _in_words(examples: Examples) -> Examples:
    """Return the examples as of models that name their likeliest option in words, some with no answer."""
    chain, vectors = examples.chain, []
    for model, logits in enumerate(chain.logits):
        rng = np.random.default_rng([model, len(chain)])
        options, confidences = top_option(logits)
        keys = np.where(rng.random(len(chain)) < _SILENT, NO_ANSWER, _KEYS[options])
        lengths = np.where(rng.random(len(chain)) < _SILENT, np.nan, np.log(confidences))
        vectors.append(answer_vectors(keys, np.column_stack([confidences, lengths])))
    labels = np.where(chain.labels == UNKNOWN_LABEL, UNKNOWN_LABEL, _KEYS[chain.labels]).astype(np.int32)
    kinds = (ANSWERS,) * len(chain.models)
    return replace(examples, chain=replace(chain, logits=tuple(vectors), labels=labels, logit_kind=kinds))


def _seen(method: Method, examples: Examples) -> Examples:
    return examples if method.sees_labels else examples.without_labels()


def _settings(family: Family) -> list[float]:
    settings = family.points.settings
    return [family.default, *settings[:: max(1, len(settings) // 4)].tolist()]


def _check_answers(method: Method, family: Family, test: Examples) -> None:
    """Check what a method's answers may depend on."""
    rng = np.random.default_rng(0)
    shuffled = replace(test, chain=replace(test.chain, labels=rng.permutation(test.chain.labels)))
    rows = rng.permutation(len(test))
    for setting in _settings(family):
        answers = family.answers(_seen(method, test), setting)
        if not method.sees_labels:
            unseen = family.answers(shuffled, setting)
            _require(np.array_equal(unseen.predictions, answers.predictions), "answers do not depend on labels")
        if not isinstance(family.members[0], Control):
            for batch in (rows, rows[:1], rows[1:10]):
                part = family.answers(_seen(method, test).of_rows(batch), setting)
                is_equal = np.array_equal(part.predictions, answers.predictions[batch])
                _require(is_equal, "an answer does not depend on other rows or their order")
                _require(np.array_equal(part.calls, answers.calls[batch]), "calls do not depend on other rows")
            _check_uncalled(family, test, setting, answers.predictions, answers.calls)


def _check_uncalled(family: Family, test: Examples, setting: float, predictions: Ints, calls: Bools) -> None:
    rng = np.random.default_rng(1)
    logits = tuple(
        np.where(called[:, None], values, rng.permutation(values))
        for values, called in zip(test.chain.logits, calls.T, strict=True)
    )
    changed = family.answers(replace(test, chain=replace(test.chain, logits=logits)), setting)
    _require(np.array_equal(changed.predictions, predictions), "models that are not called change no answer")


def _check_curve(method: Method, family: Family, test: Examples) -> None:
    """Check that a curve has the figures of the answers at its settings, and points those of validation."""
    for split in (test, family.validation):
        curve = family.curve(split, family.points.settings)
        for point in {0, family.points.index_of_best(), len(curve.cost) - 1}:
            answers = family.answers(_seen(method, split), float(family.points.settings[point]))
            right = np.mean(answers.predictions == split.chain.labels)
            _require(
                np.isclose(curve.cost[point], answers.costs(split.chain).mean()), "a curve's costs are the answers'"
            )
            _require(np.isclose(curve.accuracy[point], right), "a curve's accuracies are the answers'")
    if family.chooser is None:
        _require(np.allclose(curve.cost, family.points.cost), "points are the curve of validation")
        _require(np.allclose(curve.accuracy, family.points.quality), "points are the curve of validation")


def _chosen(family: Family, fitting: Fitting) -> Iterator[tuple[Policy, float]]:
    """Yield the policy without a budget, and that of a budget, where a budget chooses, with their settings."""
    yield family.choose(fitting.calibration, ThresholdRule()), family.default
    costs = family.points.cost
    if len(costs) < 2:
        return
    budget = float(np.median(costs))
    policy = family.choose(fitting.calibration, ThresholdRule(budget=budget))
    results = policy.on_selection or policy.expected
    _require(results is not None and results.cost <= most_within(budget), "a budget is kept on validation")
    setting = family.setting(budget)
    assert setting is not None
    yield policy, setting
    for point in policy.curve[:: max(1, len(policy.curve) // 4)]:
        later = policy.with_budget(point.cost)
        spent = measure_replay(later, chain_of(later, fitting.validation))[1].cost
        _require(spent <= most_within(point.cost), "budgets of the curve are kept on validation")
    if policy.curve:
        try:
            policy.with_budget(0.5 * policy.curve[0].cost)
        except BudgetError:
            return
        raise AssertionError("broken promise: a budget below the cheapest point is refused")


def _check_policy(policy: Policy, test: Examples) -> None:
    """Check that a policy answers alike whoever asks it."""
    chain = chain_of(policy, test.without_labels())
    answers = replay(policy, chain)
    _require_equal(trace_policy(policy, chain).at(policy.threshold, chain), answers, "the trace is the replay")
    rows = np.random.default_rng(2).permutation(len(chain))
    for batch, padding in ((rows, 0), (rows[:1], 0), (rows[1:10], 0), (rows[10:], 2)):
        live = _live(policy, chain, batch, padding)
        _require_equal(live, answers.of_rows(batch), "steps of the live worker, in any batch, are the replay")
    arrays = dict(zip(chain.models, chain.logits, strict=True))
    shuffled = {name: values[rows] for name, values in arrays.items()}
    predictions = policy.predict(shuffled, example_ids=[chain.example_ids[row] for row in rows.tolist()])
    _require(np.array_equal(predictions.prediction, answers.predictions[rows]), "a prediction is the replay")
    _require(np.array_equal(predictions.confidence, answers.confidences[rows]), "a prediction is the replay")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("policy.json", "again.json")]
        policy.save(paths[0])
        loaded = Policy.load(paths[0])
        loaded.save(paths[1])
        _require(loaded == policy == Policy.of(policy.packed()), "a policy that was saved and loaded is the same")
        _require(paths[0].read_bytes() == paths[1].read_bytes(), "a policy that is saved again has the same bytes")
    _require_equal(replay(loaded, chain), answers, "a policy that was saved and loaded answers alike")


def _require_equal(first: Answered, second: Answered, promise: str) -> None:
    for name in ("predictions", "confidences", "stages"):
        _require(np.array_equal(getattr(first, name), getattr(second, name)), f"{promise} ({name})")
    _require(np.allclose(first.costs, second.costs), f"{promise} (costs)")


class _Recorded(Model):
    """A model whose answers to rows of a chain are known."""

    def __init__(self, logits: Floats, costs: Floats, unit: str, facts: ModelFacts) -> None:
        self._logits, self._costs, self._unit, self.facts = logits, costs, unit, facts

    def __call__(self, batch: Batch) -> Answers:
        rows = batch["row"].astype(np.int64)
        return Answers(self._logits[rows], costs=self._costs[rows], cost_unit=self._unit)


def _workers(policy: Policy, chain: ChainLogits, padding: int) -> Sequence[Worker]:
    per_call = np.broadcast_to(chain.costs.per_call, (len(chain), len(chain.models)))
    workers = []
    for stage, logit_kind in enumerate(chain.logit_kinds):
        width = 0 if logit_kind in VECTOR_KINDS else padding
        logits = np.pad(chain.logits[stage], ((0, 0), (0, width)), constant_values=-np.inf)
        facts = ModelFacts(chain.models[stage], logit_kind=logit_kind)
        model = _Recorded(logits, per_call[:, stage], policy.cost_unit, facts)
        kind = SimpleNamespace(TAKES_LONG=False)
        name, load = chain.models[stage], lambda model=model: model
        spec: Any = SimpleNamespace(name=name, model=kind, cost=None, load=load)
        workers.append(Worker(spec, stage, {"": policy}))
        workers[-1].load()
    return workers


def _live(policy: Policy, chain: ChainLogits, rows: Ints, padding: int) -> Answered:
    """Answer rows as runs and services do, with a number of columns without options as padding."""
    workers, n = _workers(policy, chain, padding), len(rows)
    predictions, confidences = np.full(n, -1, dtype=np.int32), np.full(n, np.nan)
    stages, costs, place = np.full(n, -1, dtype=np.int8), np.zeros(n), np.empty(len(chain), dtype=np.int64)
    place[rows] = np.arange(n)
    first = policy.first(n, [chain.example_ids[row] for row in rows.tolist()] if policy.by_id else None)
    waiting: dict[int, list[Bundle]] = {}
    _send(waiting, Bundle({"row": rows}), np.zeros(n, dtype=np.int64) if first is None else first)
    while waiting:
        stage = min(waiting)
        bundle = joined(waiting.pop(stage))
        places: Ints = place[np.asarray(bundle.columns["row"])]
        result, onward = workers[stage].decide([Part(0, np.arange(len(places)))], [bundle])
        _require(result.error is None and not result.failures, f"the worker answers every row ({result.error})")
        costs[places] += result.costs
        done = places[result.accepted]
        predictions[done], confidences[done] = result.predictions[result.accepted], result.confidences[result.accepted]
        _require((stages[done] < 0).all(), "every row ends once")
        stages[done] = stage
        if result.carried is not None and result.carried.any():
            after = np.full(len(places), stage + 1) if result.next is None else result.next
            _send(waiting, onward, after[result.carried])
    _require((stages >= 0).all(), "every row ends")
    return Answered(predictions, confidences, stages, costs)


def _send(waiting: dict[int, list[Bundle]], bundle: Bundle, stages: Ints) -> None:
    rows = np.asarray(bundle.columns["row"])
    for stage in np.unique(stages).tolist():
        mask = stages == stage
        state = None if bundle.state is None else bundle.state[mask]
        waiting.setdefault(stage, []).append(Bundle({"row": rows[mask]}, state))
