"""What every method promises, whatever it learns: answers, costs, gains, notes and seeds."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from planted import changed, gain_over_mixture, of_rows, problem, train_quickly

from cauc_ray.policies.methods import METHODS, cascade_of
from cauc_ray.policies.trace import EmbeddingCall

# The label expert calls no model, rf-shared has the points of base, and hidden states are of a model.
OTHERS = ("embedding", "rf-shared", "post-hoc-embed-hidden")
FROM_OUTPUTS = [name for name, method in METHODS.items() if not method.needs_texts and name not in OTHERS]
ROUTERS = [name for name in FROM_OUTPUTS if METHODS[name].paradigm == "router"]
LEARNED = [*ROUTERS, "frugalgpt", "cascade-routing", "post-hoc-embed"]
DRAWN = ["routerdc", "routellm-mf", "graphrouter", "embedllm", "post-hoc-embed"]
FUSING = ["base", "rf", "duo", "shuffled", "stacked", "stacked-competence", "stacked-both", "auto"]
# What trains for fewer steps here; the others are the same.
HURRIED = ["routerdc", "graphrouter", "embedllm"]


def each_of(methods):
    """Run a test for methods trained quickly, and for those that are as published, too."""
    whole = [pytest.param("as published", name, marks=pytest.mark.slow) for name in methods if name in HURRIED]
    # Every sub-chain by every method of ours takes seconds; the quick tests of comparisons have it.
    quick = [pytest.param("quick", name, marks=pytest.mark.slow if name == "auto" else ()) for name in methods]
    ways = [*quick, *whole]
    return pytest.mark.parametrize(("_training", "method"), ways, indirect=["_training"], scope="module")


every, learned, routers = map(each_of, (FROM_OUTPUTS, LEARNED, ROUTERS))


@pytest.fixture(scope="module", autouse=True)
def _training(request):
    """Train at a higher rate for fewer steps, or as published."""
    fitted.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "quick":
            train_quickly(patch)
        yield


def fit(method, fitting):
    return METHODS[method].load()(fitting)


@cache
def fitted(method, **how):
    """Return a fitted method, its splits and the test split; all are frozen, so that tests may share them."""
    fitting, test = problem(1, **how)
    return fit(method, fitting), fitting, test


def small(method, m=3, *, embedded=True):
    """Return the like for few examples of any number of options."""
    embedded = embedded or METHODS[method].needs_embedding
    return fitted(method, n=80, n_test=60, m=m, embedded=embedded, ragged=True, per_call=m == 3)


def numbers(own, test):
    """Return all that a fitted method says of examples whose labels it does not see."""
    if hasattr(own, "cascade"):
        return own.cascade(test.without_labels()).compared
    if hasattr(own, "n_policies"):
        traces = [cascade_of(own.policy(index))(test.without_labels()) for index in range(own.n_policies)]
        return np.column_stack([trace.compared for trace in traces])
    read = own.read(own.unsolved, test.without_labels())
    return np.column_stack([*read.qualities.values()]) if hasattr(read, "qualities") else read


@learned
@pytest.mark.parametrize("embedded", [True, False])
def test_it_beats_the_mixture_at_equal_cost_where_something_says_who_is_right(method, embedded):
    own, _, test = fitted(method, embedded=embedded)
    assert gain_over_mixture(own, test) > 0.06
    if embedded:
        answers = own.answers(test.without_labels(), own.default)
        assert np.mean(answers.predictions == test.chain.labels) > test.correct().mean(axis=0).max() + 0.03


@learned
def test_it_gains_nothing_where_nothing_says_who_is_right(method):
    own, _, test = fitted(method, strength=0.0)
    assert abs(gain_over_mixture(own, test)) < 0.03


@every
@pytest.mark.parametrize(("m", "embedded"), [(1, True), (2, False), (3, True), (4, False)])
def test_every_example_gets_an_option_of_its_own_at_the_cost_that_the_curve_states(method, m, embedded):
    own, fitting, test = small(method, m, embedded=embedded)
    logits = np.stack(test.chain.logits)
    seen = test if METHODS[method].sees_labels else test.without_labels()
    for examples, known in ((test, None), (fitting.validation, own.points)):
        curve = own.curve(examples, own.points.settings)
        for point in {0, own.points.index_of_best(), len(curve.cost) - 1}:
            setting = float(own.points.settings[point])
            answers = own.answers(seen if examples is test else examples, setting)
            assert answers.calls.any(axis=1).all()
            assert curve.cost[point] == pytest.approx(answers.costs(examples.chain).mean())
            assert curve.accuracy[point] == pytest.approx(np.mean(answers.predictions == examples.chain.labels))
            assert curve.last_share[point] == pytest.approx(answers.calls[:, -1].mean())
            if known is not None:
                assert (curve.cost[point], curve.accuracy[point]) == pytest.approx(
                    (known.cost[point], known.quality[point])
                )
    for setting in (own.default, *own.points.settings[[0, -1]]):
        answers = own.answers(seen, float(setting))
        assert np.isfinite(logits[:, np.arange(60), answers.predictions]).all()
        if method not in FUSING:
            own_answer = logits.argmax(axis=2) == answers.predictions
            assert (own_answer & answers.calls.T).any(axis=0).all()  # of a model that was called


@routers
@pytest.mark.parametrize(("m", "embedded"), [(1, True), (2, False), (3, True), (4, False)])
def test_a_router_pays_for_one_model_and_for_what_it_reads(method, m, embedded):
    own, _, test = small(method, m, embedded=embedded)
    paid = m > 1 and not embedded
    assert own.note.endswith("features: the first model's outputs, its call paid") == paid
    assert ("first and last model only" in own.note) == (method.startswith("routellm") and m > 2)
    each = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
    for setting in own.points.settings:
        answers = own.answers(test.without_labels(), float(setting))
        chosen = m - 1 - answers.calls[:, ::-1].argmax(axis=1)
        assert (answers.calls.sum(axis=1) == 1 + (paid & (chosen > 0))).all()
        assert (answers.predictions == each[np.arange(60), chosen]).all()
        if method.startswith("routellm"):
            assert not (chosen % (m - 1 or 1)).any()


@every
def test_no_fitted_number_and_no_answer_depends_on_the_labels_of_test(method):
    own, _, test = small(method)
    settings, default = own.points.settings.copy(), own.default
    before = own.answers(test, default)
    shuffled = replace(test, chain=replace(test.chain, labels=np.random.default_rng(0).permutation(test.chain.labels)))
    own.curve(shuffled, own.points.settings)
    after = own.answers(shuffled, default)
    assert (own.points.settings == settings).all()
    assert own.default == default
    same = (before.predictions == after.predictions).all() and (before.calls == after.calls).all()
    assert same != METHODS[method].sees_labels  # the oracle is there to show what seeing them would do


@every
def test_the_seed_alone_decides_on_any_number_of_threads_and_global_generators_stay(method):
    own, fitting, test = small(method)
    threads = torch.get_num_threads()
    torch.rand(3), np.random.rand(3)  # wherever the global generators are  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    torch.set_num_threads(threads + 1)
    try:
        again = fit(method, fitting)
        assert (numbers(again, test) == numbers(own, test)).all()
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
    assert (again.points.settings == own.points.settings).all()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    other = numbers(fit(method, replace(fitting, seed=3)), test)
    assert (other == numbers(own, test)).all() != (method in [*DRAWN, "random", "shuffled"])


# The oracle knows what all would say, and shuffled confidences are other examples' own.
@each_of(sorted({*FROM_OUTPUTS} - {"oracle", "shuffled"}))
@pytest.mark.parametrize("embedded", [True, False])
def test_what_a_model_would_say_that_is_not_called_makes_no_difference(method, embedded):
    own, _, test = small(method, embedded=embedded)
    rng, settings, asked = np.random.default_rng(0), own.points.settings, test.without_labels()
    for setting in (own.default, *settings[:: max(1, len(settings) // 5)]):
        answers = own.answers(asked, setting)
        if method in ("base", "rf", "margin", "post-hoc-embed", "max-probability"):
            assert (np.diff(answers.calls.astype(int), axis=1) <= 0).all()  # one model after another
        logits = tuple(
            np.where(called[:, None], z, rng.permutation(z))
            for z, called in zip(test.chain.logits, answers.calls.T, strict=True)
        )
        other = own.answers(replace(asked, chain=replace(asked.chain, logits=logits)), setting)
        assert (other.predictions == answers.predictions).all()
        assert (other.calls == answers.calls).all()


@learned
def test_an_example_is_seen_alone_as_it_is_among_others(method):
    own, _, test = small(method)
    rows = np.array([7, 3, 59, 20])
    few = numbers(own, of_rows(test, rows))
    together = numbers(own, test)
    assert np.array_equal(few, together[rows])


@learned
@pytest.mark.parametrize("width", [3, 6])
def test_questions_may_have_more_or_fewer_options_than_any_that_it_was_fitted_on(method, width):
    own, _, test = small(method, 2, embedded=False)
    short = np.isinf(test.chain.logits[0][:, 3]) if width == 3 else np.ones(60, bool)
    padded = (np.pad(z, ((0, 0), (0, 2)), constant_values=-np.inf)[:, :width] for z in test.chain.logits)
    other = numbers(own, replace(test, chain=replace(test.chain, logits=tuple(padded))))
    expected = numbers(own, test)
    np.testing.assert_allclose(other[short], expected[short], atol=1e-5)


@each_of(["frugalgpt", "cascade-routing", *(name for name in ROUTERS if not name.startswith("routellm"))])
def test_a_model_that_is_called_for_its_embedding_costs_nothing_more(method):
    fitting, _ = problem(1, n=80, n_test=1)
    own = fit(method, changed(fitting, lambda split: replace(split, embedding_call=EmbeddingCall("m1", 1))))
    assert own.points.cost.min() == pytest.approx(fitting.validation.chain.costs.means[1])


@learned
@pytest.mark.parametrize("n", [1, 3])
def test_a_handful_of_queries_is_enough(method, n):
    fitting, test = problem(6, n=n, n_test=20)
    assert not np.isnan(numbers(fit(method, fitting), test)).any()
