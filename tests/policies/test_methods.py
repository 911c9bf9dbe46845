"""The conformance suite: what every method promises, whatever it learns, fitted alone and published as a policy.

Methods that read texts are trained in tests/baselines; `auto` is published by a search (tests/comparison).
"""

from dataclasses import replace
from functools import cache

import numpy as np
import planted
import pytest
import torch
from planted import changed, gain_over_mixture, problem, scores

import cauc_ray
from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.numbers.chain import Costs
from cauc_ray.policies.by_method import method_of
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.testing import check_method

SINGLE = "single:m1"
NAMES = [*(name for name, method in METHODS.items() if method.needs != "texts" and method.reads != "answers"), SINGLE]
ROUTERS = [name for name in NAMES if name in METHODS and METHODS[name].paradigm == "router"]
HIDDEN = "post-hoc-embed-hidden"
# Methods that read an embedding where there is one, and the first model's outputs elsewhere.
LEARNED = [*ROUTERS, "frugalgpt", "cascade-routing", "post-hoc-embed"]
DRAWN = {"routerdc", "routellm-mf", "graphrouter", "embedllm", "post-hoc-embed", HIDDEN, "random", "shuffled"}
# Trained for fewer steps here; the others are trained as published.
SHORTENED = ["routerdc", "graphrouter", "embedllm"]

CASES = [(name, name in METHODS and METHODS[name].needs == "embedding") for name in NAMES]
CASES += [(name, True) for name in (*LEARNED, "stacked")]
LONGEST = [(name, False) for name in ("cascade-routing", "graphrouter", "embedllm")] + [("cascade-routing", True)]
# Those whose only setting takes no budget, and one that a search publishes.
WITHOUT_BUDGET = ("duo", SINGLE, "auto")


def case_id(value):
    return str(value) if not isinstance(value, bool) else "embedding" if value else "outputs"


def of_cases(cases):
    """Parametrise with cases; those that train longest are in the suite with embeddings alone."""
    params = [pytest.param(*case, marks=[pytest.mark.soak("full")] * (case in LONGEST)) for case in cases]
    return pytest.mark.parametrize(("method", "embedded"), params, ids=case_id)


learned = of_cases([case for case in CASES if case[0] in LEARNED])


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


@of_cases(CASES)
def test_a_method_keeps_its_promises(method, embedded):
    check_method(method, embedding=embedded)


@pytest.mark.parametrize("method", [name for name, of in METHODS.items() if of.reads == "answers"])
def test_a_method_of_answers_in_words_keeps_its_promises(method):
    check_method(method)


@of_cases([case for case in CASES if case[0] != "oracle" and (case[1] or case[0] not in LEARNED)])
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
    assert (scores(again, test) == scores(fitted, test)).all()
    reseeded = scores(fitted_to(method, replace(fitting, seed=3)), test)
    assert (reseeded == scores(fitted, test)).all() != (method in DRAWN)


def assert_learns_who_is_right(method, embedded):
    fitted, _, test = fit(method, embedded=embedded)
    assert gain_over_mixture(fitted, test) > 0.06
    if embedded:
        answers = fitted.answers(test.without_labels(), fitted.default)
        assert np.mean(answers.predictions == test.chain.labels) > test.correct().mean(axis=0).max() + 0.03
        fitted, _, test = fit(method, strength=0.0)
        assert abs(gain_over_mixture(fitted, test)) < 0.03


@learned
def test_accuracy_beats_the_mixture_at_equal_cost_only_where_something_predicts_who_is_right(method, embedded):
    assert_learns_who_is_right(method, embedded)


@pytest.mark.soak("full")
@pytest.mark.parametrize("method", SHORTENED)
def test_training_as_published_beats_the_mixture_too(method, short_training):
    short_training.undo()
    fit.cache_clear()
    try:
        for embedded in (True, False):
            assert_learns_who_is_right(method, embedded)
    finally:
        fit.cache_clear()
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
def test_questions_may_have_fewer_options_than_those_of_the_fit(method, embedded):
    fitted, _, test = fit_few(method, 2, embedded=embedded)
    short = np.isinf(test.chain.logits[0][:, 3])
    resized = scores(
        fitted, replace(test, chain=replace(test.chain, logits=tuple(z[:, :3] for z in test.chain.logits)))
    )
    np.testing.assert_allclose(resized[short], scores(fitted, test)[short], atol=1e-5)


ODD = {
    "one row": (1, {}),
    "two rows": (2, {}),
    "one class": (40, {"labels": np.zeros(40, np.int32)}),
    "constant logits": (40, {"logits": (np.zeros((40, 4), np.float32),) * 3}),
    "free calls": (40, {"costs": Costs("USD", np.zeros(3))}),
    "one price": (40, {"costs": Costs("USD", np.full(3, 2.0))}),
}


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # a few rows cannot be calibrated
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "method", [name for name in NAMES if name not in WITHOUT_BUDGET and not METHODS[name].unpublished]
)
def test_few_rows_one_class_constant_logits_and_models_of_one_price_are_enough(method, kind):
    n, changes = ODD[kind]
    fitting, test = problem(3, n=n, n_test=40, m=3, embedded=method in LEARNED, ragged=True)
    fitting = changed(fitting, lambda split: replace(split, chain=replace(split.chain, **changes)))
    budget = float(fitting.validation.chain.costs.means.sum())
    policy = fitted_to(method, fitting).published(fitting, ThresholdRule(budget=budget))
    answers = replay(policy, chain_of(policy, test))
    assert not np.isnan(answers.confidences).any()
    assert np.isfinite(np.stack(test.chain.logits))[:, np.arange(40), answers.predictions].all()
    assert policy.expected.cost <= budget


# --- published policies


@pytest.mark.parametrize(
    ("method", "rule", "words", "error"),
    [
        ("margin", {"threshold": -0.1}, "at least 0", ConfigError),
        ("frugalgpt", {"objective": "macro-f1"}, "frugalgpt chooses by accuracy alone", ConfigError),
        ("frugalgpt", {"budget": 0.01}, "budget 0.01", BudgetError),
        ("benchmark-routing", {"budget": 0.01}, "budget 0.01", BudgetError),
    ],
)
def test_a_rule_that_a_method_cannot_follow_is_refused_in_one_line(method, rule, words, error):
    fitted, fitting, _ = fit_few(method)
    with pytest.raises(error, match=words) as refused:
        fitted.published(fitting, ThresholdRule(**rule))
    assert "\n" not in str(refused.value)


PACKAGE = """
from typing import Literal

import numpy as np

from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.scored import ScoredPolicy


class GapPolicy(ScoredPolicy):
    method: Literal["gap", "neighbourly"]

    def score(self, stage, logits, embeddings):
        ranked = np.sort(logits, axis=1)
        gap = 1 / (1 + np.exp(ranked[:, -2] - ranked[:, -1]))
        return gap if self.method == "gap" else gap - gap.mean()


GAP = Method("gap", "cascade", lambda fitting: [fitting.policy(GapPolicy, method="gap")])
NEIGHBOURLY = Method("neighbourly", "cascade", lambda fitting: [fitting.policy(GapPolicy, method="neighbourly")])
"""
ENTRIES = """[cauc_ray.methods]
gap = gaps:GAP
neighbourly = gaps:NEIGHBOURLY
absent = no_such_module:METHOD
misnamed = gaps:GAP
rf = gaps:GAP
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package with methods: one that keeps its promises, one that does not, and broken entry points."""
    folder = tmp_path / "gaps-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: gaps\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "gaps.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_method_of_another_package_is_fitted_published_loaded_and_compared(package):
    check_method("gap")
    with pytest.raises(AssertionError, match="rows"):
        check_method("neighbourly")
    compared = cauc_ray.compare(cauc_ray.sample_logits(), methods=["gap", "rf"])
    assert [row["method"] for row in compared.rows] == ["rf", "gap"]


@pytest.mark.parametrize("name", ["absent", "misnamed"])
def test_a_broken_entry_point_is_named_in_one_line_and_breaks_no_other(package, name):
    with pytest.raises(ConfigError, match=name) as error:
        cauc_ray.fit(cauc_ray.sample_logits(), method=name)
    assert "\n" not in str(error.value)
    assert METHODS["rf"].fit.__module__.startswith("cauc_ray.")
    assert {"gap", "rf", name} <= set(METHODS)
