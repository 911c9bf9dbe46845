"""The conformance suite: what every method promises, whatever it learns, fitted alone and published as a policy.

Methods that read texts are trained in tests/text_routers; `auto` is published by a search (tests/comparison).
"""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import planted
import pytest
import torch
from planted import changed, gain_over_mixture, problem, scores

import cauc_ray
from cauc_ray.errors import BudgetError, CaucError, ConfigError
from cauc_ray.policies.by_method import OURS, fit_policy, method_of
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import EmbeddingCall, measure_replay, replay, steps_of, trace_policy

SINGLE = "single:m1"
NAMES = [*(name for name, method in METHODS.items() if not method.needs_texts), SINGLE]
ROUTERS = [name for name in NAMES if name in METHODS and METHODS[name].paradigm == "router"]
HIDDEN = "post-hoc-embed-hidden"
# Methods that read an embedding where there is one, and the first model's outputs elsewhere.
LEARNED = [*ROUTERS, "frugalgpt", "cascade-routing", "post-hoc-embed"]
DRAWN = {"routerdc", "routellm-mf", "graphrouter", "embedllm", "post-hoc-embed", HIDDEN, "random", "shuffled"}
FUSING = {"base", "rf", "rf-shared", "duo", "shuffled", "stacked", "auto"}
# Trained for fewer steps here; the others are trained as published.
SHORTENED = ["routerdc", "graphrouter", "embedllm"]

CASES = [(name, name in METHODS and METHODS[name].needs_embedding) for name in NAMES]
CASES += [(name, True) for name in (*LEARNED, "stacked")]
PUBLISHED = [(name, embedded) for name, embedded in CASES if name == SINGLE or not METHODS[name].unpublished]
PUBLISHED.remove(("auto", False))
BUDGET = 12.0
WITHIN_BUDGET = ThresholdRule(budget=BUDGET)
FIXED = ("duo", SINGLE)  # methods of one setting


def case_id(value):
    return str(value) if not isinstance(value, bool) else "embedding" if value else "outputs"


def of_cases(cases):
    return pytest.mark.parametrize(("method", "embedded"), cases, ids=case_id)


learned = of_cases([case for case in CASES if case[0] in LEARNED])
published = of_cases(PUBLISHED)


@pytest.fixture(scope="module", autouse=True)
def short_training():
    """Train networks at a higher rate for fewer steps; return the patch, to be undone by who trains as published."""
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield patch


def fitted_to(method, fitting):
    return method_of(method, fitting.calibration.chain.models).family(fitting)


@cache
def fit(method, **options):
    """Return a fitted method, its splits and the test split; all are frozen, so that tests may share them."""
    fitting, test = problem(1, **options)
    if method == HIDDEN:
        fitting, test = changed(fitting, with_hidden_states), with_hidden_states(test)
    return fitted_to(method, fitting), fitting, test


def with_hidden_states(split):
    return replace(split, hidden=dict.fromkeys(split.chain.models, split.embeddings), embeddings=None)


def fit_few(method, m=3, *, embedded=True):
    """Fit to 80 examples with two to four options, of which three models have costs by call."""
    embedded = embedded or method == HIDDEN
    return fit(method, n=80, n_test=60, m=m, embedded=embedded, ragged=True, per_call=m == 3)


@cache
def publish(method, embedded, rule=WITHIN_BUDGET):
    """Return a method's policy at the setting that a rule chooses, the fitted method and its splits."""
    fitted, fitting, test = fit_few(method, embedded=embedded)
    if method in OURS and not embedded:
        policy = fit_policy(method, fitting.calibration.chain, fitting.validation.chain, rule, fitting.names)
    else:
        policy = fitted.published(fitting, ThresholdRule() if method in FIXED else rule)
    return policy, fitted, fitting, test


# --- fitted methods


@of_cases(CASES)
def test_answers_and_fitted_numbers_are_blind_to_test_labels(method, embedded):
    fitted, _, test = fit_few(method, embedded=embedded)
    settings, default = fitted.points.settings.copy(), fitted.default
    before = fitted.answers(test, default)
    labels = np.random.default_rng(0).permutation(test.chain.labels)
    shuffled = replace(test, chain=replace(test.chain, labels=labels))
    fitted.curve(shuffled, fitted.points.settings)
    after = fitted.answers(shuffled, default)
    assert (fitted.points.settings == settings).all()
    assert fitted.default == default
    same = (before.predictions == after.predictions).all() and (before.calls == after.calls).all()
    assert same != (method == "oracle")  # which shows what reading them would change


@pytest.mark.parametrize(
    ("m", "method", "embedded"),
    [(m, *case) for m in (1, 2, 3, 4) for case in CASES if (m, case[0]) not in [(1, SINGLE), (4, "auto")]],
    ids=case_id,
)
def test_a_curve_has_the_cost_and_accuracy_of_the_answers_at_each_setting(method, embedded, m):
    fitted, fitting, test = fit_few(method, m, embedded=embedded)
    unlabelled = test if method == "oracle" else test.without_labels()
    options = np.isfinite(np.stack(test.chain.logits))
    model_answers = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
    for split, asked in ((test, unlabelled), (fitting.validation, fitting.validation)):
        curve = fitted.curve(split, fitted.points.settings)
        for point in {0, fitted.points.index_of_best(), len(curve.cost) - 1}:
            answers = fitted.answers(asked, float(fitted.points.settings[point]))
            assert answers.calls.any(axis=1).all() != (method == "embedding")  # which calls no model
            assert curve.cost[point] == pytest.approx(answers.costs(split.chain).mean())
            assert curve.accuracy[point] == pytest.approx(np.mean(answers.predictions == split.chain.labels))
            assert curve.last_share[point] == pytest.approx(answers.calls[:, -1].mean())
            if split is fitting.validation and method != "rf-shared":  # whose points are Base's
                assert curve.cost[point] == pytest.approx(fitted.points.cost[point])
                assert curve.accuracy[point] == pytest.approx(fitted.points.quality[point])
            if split is test:
                assert options[:, np.arange(60), answers.predictions].all()
            if split is test and method not in FUSING | {"embedding"}:  # the answer of a model that was called
                assert ((model_answers == answers.predictions[:, None]) & answers.calls).any(axis=1).all()


# The label expert reads the options of a question off the first model's outputs.
@of_cases([case for case in CASES if case[0] not in ("oracle", "shuffled", "embedding")])
def test_outputs_of_models_that_are_not_called_change_no_answer(method, embedded):
    fitted, _, test = fit_few(method, embedded=embedded)
    rng, settings, asked = np.random.default_rng(0), fitted.points.settings, test.without_labels()
    for setting in (fitted.default, *settings[:: max(1, len(settings) // 5)]):
        answers = fitted.answers(asked, setting)
        logits = tuple(
            np.where(called[:, None], z, rng.permutation(z))
            for z, called in zip(test.chain.logits, answers.calls.T, strict=True)
        )
        after = fitted.answers(replace(asked, chain=replace(asked.chain, logits=logits)), setting)
        assert (after.predictions == answers.predictions).all()
        assert (after.calls == answers.calls).all()


@of_cases([case for case in CASES if case[0] != "shuffled"])
def test_an_example_is_scored_alone_as_among_others_in_any_order(method, embedded):
    fitted, _, test = fit_few(method, embedded=embedded)
    rows = np.array([7, 3, 59, 20])
    expected = scores(fitted, test)
    asked = test if method == "oracle" else test.without_labels()
    for batch in (rows, rows[:1], rows[::-1]):
        if method != "oracle":
            assert np.array_equal(scores(fitted, test.of_rows(batch)), expected[batch])
        answers, whole = (fitted.answers(split, fitted.default) for split in (asked.of_rows(batch), asked))
        assert (answers.predictions == whole.predictions[batch]).all()
        assert (answers.calls == whole.calls[batch]).all()


@of_cases(CASES)
def test_the_seed_alone_decides_on_any_number_of_threads_and_global_generators_stay(method, embedded):
    fitted, fitting, test = fit_few(method, embedded=embedded)
    threads = torch.get_num_threads()
    torch.rand(3), np.random.rand(3)  # whatever state the global generators have  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch.set_num_threads(threads + 1)
    try:
        again = fitted_to(method, fitting)
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    assert (again.points.settings == fitted.points.settings).all()
    asked = [test if method == "oracle" else test.without_labels(), fitted.default]
    assert (again.answers(*asked).predictions == fitted.answers(*asked).predictions).all()
    if method == "oracle":
        return
    assert (scores(again, test) == scores(fitted, test)).all()
    reseeded = scores(fitted_to(method, replace(fitting, seed=3)), test)
    assert (reseeded == scores(fitted, test)).all() != (method in DRAWN)


@learned
def test_accuracy_beats_the_mixture_at_equal_cost_only_where_something_predicts_who_is_right(method, embedded):
    fitted, _, test = fit(method, embedded=embedded)
    beats_the_mixture(fitted, test)
    if embedded:
        fitted, _, test = fit(method, strength=0.0)
        assert abs(gain_over_mixture(fitted, test)) < 0.03


def beats_the_mixture(fitted, test):
    assert gain_over_mixture(fitted, test) > 0.06
    if test.embeddings is not None:
        answers = fitted.answers(test.without_labels(), fitted.default)
        assert np.mean(answers.predictions == test.chain.labels) > test.correct().mean(axis=0).max() + 0.03


@pytest.mark.soak("full")
@pytest.mark.parametrize("method", SHORTENED)
def test_training_as_published_beats_the_mixture_too(method, short_training):
    short_training.undo()
    try:
        for embedded in (True, False):
            fitting, test = problem(1, embedded=embedded)
            beats_the_mixture(fitted_to(method, fitting), test)
        fitting, test = problem(1, strength=0.0)
        assert abs(gain_over_mixture(fitted_to(method, fitting), test)) < 0.03
    finally:
        planted.train_quickly(short_training)


@of_cases([case for case in CASES if case[0] in ROUTERS])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_a_router_pays_for_one_model_and_for_what_it_reads(method, embedded, m):
    fitted, _, test = fit_few(method, m, embedded=embedded)
    paid = m > 1 and not embedded
    assert ("its call paid" in fitted.note) == paid
    assert ("first and last model only" in fitted.note) == (method.startswith("routellm") and m > 2)
    model_answers = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
    for setting in fitted.points.settings:
        answers = fitted.answers(test.without_labels(), float(setting))
        chosen = m - 1 - answers.calls[:, ::-1].argmax(axis=1)
        assert (answers.calls.sum(axis=1) == 1 + (paid & (chosen > 0))).all()
        assert (answers.predictions == model_answers[np.arange(60), chosen]).all()
        if method.startswith("routellm"):
            assert not (chosen % (m - 1 or 1)).any()


@learned
@pytest.mark.parametrize("width", [3, 6])
def test_questions_may_have_more_or_fewer_options_than_those_of_the_fit(method, embedded, width):
    fitted, _, test = fit_few(method, 2, embedded=embedded)
    short = np.isinf(test.chain.logits[0][:, 3]) if width == 3 else np.ones(60, bool)
    padded = (np.pad(z, ((0, 0), (0, 2)), constant_values=-np.inf)[:, :width] for z in test.chain.logits)
    resized = scores(fitted, replace(test, chain=replace(test.chain, logits=tuple(padded))))
    np.testing.assert_allclose(resized[short], scores(fitted, test)[short], atol=1e-5)


@pytest.mark.parametrize("method", [name for name in LEARNED if not name.startswith(("routellm", "post-hoc"))])
def test_a_model_that_is_called_for_its_embedding_costs_nothing_more(method):
    fitting, _ = problem(1, n=80, n_test=1)
    fitted = fitted_to(method, changed(fitting, lambda split: replace(split, embedding_call=EmbeddingCall("m1", 1))))
    assert fitted.points.cost.min() == pytest.approx(fitting.validation.chain.costs.means[1])


@pytest.mark.parametrize("method", LEARNED)
@pytest.mark.parametrize("n", [1, 3])
def test_a_handful_of_examples_is_enough(method, n):
    fitting, test = problem(6, n=n, n_test=20)
    assert not np.isnan(scores(fitted_to(method, fitting), test)).any()


# --- published policies


def on_validation(policy):
    """Return what a policy has of its answers to validation, whether that chose its threshold or not."""
    return policy.on_selection or policy.expected


@published
def test_a_policy_answers_as_the_method_does_in_a_comparison_within_the_budget(method, embedded):
    policy, fitted, fitting, test = publish(method, embedded)
    setting = fitted.default
    if policy.budget is not None:
        setting = fitted.setting(BUDGET)
        assert on_validation(policy).cost <= BUDGET * (1 + 1e-9)
    compared, answers = fitted.answers(test.without_labels(), setting), replay(policy, chain_of(policy, test))
    assert (answers.predictions == compared.predictions).all()
    assert answers.costs == pytest.approx(compared.costs(test.chain))
    assert (policy.encoder is not None) == (embedded and method != "stacked")  # they say nothing of the labels here
    measures = measure_replay(policy, chain_of(policy, fitting.validation))[1]
    assert on_validation(policy).cost == pytest.approx(measures.cost)
    assert on_validation(policy).accuracy == measures.accuracy
    for point in policy.curve[:: max(1, len(policy.curve) // 5)]:
        later = policy.with_budget(point.cost)
        assert measure_replay(later, chain_of(later, fitting.validation))[1].cost <= point.cost * (1 + 1e-9)
    if policy.curve:
        with pytest.raises(BudgetError):
            policy.with_budget(0.9 * policy.curve[0].cost)


@published
def test_steps_in_any_batches_are_the_replay_the_trace_and_the_prediction(method, embedded):
    policy, _, _, test = publish(method, embedded)
    chain = chain_of(policy, test.without_labels())
    answers, n = replay(policy, chain), len(test)
    traced = trace_policy(policy, chain).at(policy.threshold, chain)
    for name in ("predictions", "confidences", "stages", "costs"):
        assert np.array_equal(getattr(traced, name), getattr(answers, name)), name
    ids = chain.example_ids
    order = np.random.default_rng(0).permutation(n)
    for batch in (order[:1], order[1:10], order[10:]):
        ended = np.zeros(n, dtype=int)
        batch_ids = [ids[row] for row in batch]
        options = 2 if len(batch) > 10 else 0  # the last batch is padded
        for stage, at, step in steps_of(policy, np.arange(len(batch)), logits_of(chain, batch, options), batch_ids):
            rows = batch[at[step.accepted]]
            assert np.array_equal(step.predictions[step.accepted], answers.predictions[rows])
            assert np.array_equal(step.confidences[step.accepted], answers.confidences[rows])
            assert (answers.stages[rows] == stage).all()
            ended[rows] += 1
        assert ended.sum() == ended[batch].sum() == len(batch)
    arrays = dict(zip(chain.models, chain.logits, strict=True))
    predictions = policy.predict(arrays, example_ids=ids)
    assert np.array_equal(predictions.prediction, answers.predictions)
    assert np.array_equal(predictions.confidence, answers.confidences)
    assert np.array_equal(predictions.stage, answers.stages)
    reordered = policy.predict(
        {name: array[order] for name, array in arrays.items()}, example_ids=[ids[row] for row in order]
    )
    assert np.array_equal(reordered.confidence, predictions.confidence[order])


def logits_of(chain, batch, more_options):
    padding = ((0, 0), (0, more_options))

    def read(stage, rows):
        logits = chain.logits[stage][batch[rows]]
        return np.pad(logits, padding, constant_values=-np.inf) if chain.models[stage].startswith("m") else logits

    return read


@published
def test_a_policy_file_gives_the_same_bytes_and_answers(method, embedded, tmp_path):
    policy, _, _, test = publish(method, embedded)
    policy.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    assert loaded == policy == Policy.of(policy.packed())
    assert loaded.id == policy.id
    loaded.save(tmp_path / "again.json")
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written["again.json"] == written["policy.json"]
    with_arrays = method in LEARNED
    assert written.get("again.safetensors") == written.get("policy.safetensors")
    assert ("policy.safetensors" in written) == with_arrays
    assert (json.loads(written["policy.json"]).get("arrays_sha256") is not None) == with_arrays
    before, after = (replay(variant, chain_of(variant, test)) for variant in (policy, loaded))
    for name in ("predictions", "confidences", "stages", "costs"):
        assert np.array_equal(getattr(before, name), getattr(after, name))


@pytest.mark.parametrize("method", [name for name, of in METHODS.items() if of.unpublished])
def test_a_method_without_a_policy_is_refused_in_one_line(method):
    arrays = {name: np.eye(4) for name in ("m0", "m1")}
    with pytest.raises(ConfigError, match=method) as error:
        cauc_ray.fit(arrays, np.arange(4), method=method, costs=[1, 2], validation=0.5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "embedded", "rule", "words"),
    [
        ("margin", False, {"threshold": -0.1}, "at least 0"),
        ("frugalgpt", False, {"objective": "macro-f1"}, "frugalgpt chooses by accuracy alone"),
        ("cascade-routing", True, {"objective": "macro-f1"}, "cascade-routing chooses by accuracy alone"),
        *((name, embedded, {"budget": 0.01}, "budget 0.01") for name, embedded in PUBLISHED if name not in FIXED),
    ],
    ids=case_id,
)
def test_a_rule_that_a_method_cannot_follow_is_refused_in_one_line(method, embedded, rule, words):
    with pytest.raises(CaucError, match=words) as error:
        publish(method, embedded, ThresholdRule(**rule))
    assert "\n" not in str(error.value)
    assert isinstance(error.value, BudgetError if "budget" in rule else ConfigError)
