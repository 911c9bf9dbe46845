"""Zeros and grids among probabilities: what they count as, fitted on calibration and applied wherever a policy is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked import MODELS, softmax, splits
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.special import softmax as scipy_softmax
from synthetic import steps

import cauc_ray
from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.numbers.calibration import fit_temperature
from cauc_ray.numbers.logits import as_logits
from cauc_ray.numbers.metrics import CalibrationSums
from cauc_ray.policies.policy import Policy

zeros_are_reported = pytest.warns(CaucWarning, match=r"model '\w+': probabilities are .*count as")


def calibrated(n, k, seed=0, scale=3.0):
    """Return a model's probabilities, float64 (n, k), and labels that are drawn from them."""
    rng = np.random.default_rng(seed)
    p = scipy_softmax(scale * rng.normal(size=(n, k)), axis=1)
    return p, (p.cumsum(axis=1) > rng.random((n, 1))).argmax(axis=1)


def rounded(p, step):
    return (np.round(p / step) * step).astype(np.float32)


def votes(p, n_votes, seed=1):
    """Return the shares of as many votes, each drawn from a row's probabilities."""
    rng = np.random.default_rng(seed)
    return (np.stack([rng.multinomial(n_votes, row) for row in p]) / n_votes).astype(np.float32)


def without_tails(p, _=None):
    """Return probabilities on no grid of which those below a random bound are 0."""
    bounds = np.random.default_rng(2).uniform(0, 0.05, (len(p), 1))
    cut = np.where((p < bounds) & (p < p.max(axis=1, keepdims=True)), 0.0, p)
    return (cut / cut.sum(axis=1, keepdims=True)).astype(np.float32)


def fit(p, labels, **options):
    kinds = options.pop("logit_kind", "probabilities")
    return cauc_ray.fit({"m": p}, labels, costs={"m": 1.0}, threshold=0.5, logit_kind=kinds, **options)


def held_out(policy, p, labels):
    """Return calibration error and mean negative log likelihood of a policy's probabilities."""
    scores = policy.stages[0].scores(as_logits(p, "probabilities"))
    confidences, correct = scipy_softmax(scores, axis=1).max(axis=1), scores.argmax(axis=1) == labels
    logs = log_softmax(scores, axis=1)[np.arange(len(labels)), labels]
    return CalibrationSums.of(confidences, correct).error, -logs.mean()


@pytest.mark.parametrize(
    ("seen", "n", "k"),
    [(rounded, 0.01, 4), (rounded, 0.001, 77), (votes, 5, 4), (votes, 30, 4), (votes, 1, 4), (without_tails, None, 4)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_zeros_cost_no_more_than_the_best_floor_and_temperature_do(seen, n, k):
    p, labels = calibrated(6000, k, scale=1.5 if k == 4 else 3.0)
    probabilities = seen(p, n)
    first, second = slice(0, 3000), slice(3000, 6000)
    with zeros_are_reported:
        policy = fit(probabilities[first], labels[first])

    def nll(numbers, rows):
        logits = np.exp(-numbers[0]) * np.log(np.maximum(probabilities[rows], np.exp(numbers[1])))
        return -log_softmax(logits, axis=1)[np.arange(len(logits)), labels[rows]].mean()

    starts = ([t, f] for t in (0.0, 1.0) for f in (-7.0, -4.0, -2.5))
    best = min((minimize(nll, start, (first,), "Nelder-Mead") for start in starts), key=lambda fitted: fitted.fun)
    _, loss = held_out(policy, probabilities[first], labels[first])
    assert loss == pytest.approx(best.fun, abs=2e-3)
    error, new = held_out(policy, probabilities[second], labels[second])
    assert new == pytest.approx(nll(best.x, second), abs=5e-3)
    assert error < 0.05


def test_probabilities_without_zeros_and_steps_are_read_as_their_logarithms_are():
    p, labels = calibrated(500, 4, scale=1.0)
    policy = fit(p, labels)
    assert policy.stages[0].floor is None
    logs = as_logits(p.astype(np.float32), "probabilities")
    assert policy.stages[0].temperature == fit_temperature(logs, labels).temperature
    bounded = policy.model_copy(update={"stages": (policy.stages[0].model_copy(update={"floor": 0.01}),)})
    assert bounded.id != policy.id
    assert Policy.of(bounded.packed()) == bounded


def test_a_grid_without_zeros_bounds_the_zeros_to_come():
    rng = np.random.default_rng(0)
    first = np.round(rng.uniform(0.1, 0.9, 400), 2)
    probabilities = np.stack([first, 1 - first], axis=1)
    with pytest.warns(CaucWarning, match="multiples of 0.01"):
        policy = fit(probabilities, rng.integers(0, 2, 400))
    assert policy.stages[0].floor == pytest.approx(0.005)
    answers = policy.predict({"m": np.array([[0.0, 1.0], [0.005, 1.0]])})
    assert answers.confidence[0] == pytest.approx(answers.confidence[1], rel=1e-6)


@settings(max_examples=6)
@given(seed=st.integers(0, 999), n=st.integers(5, 60), n_votes=st.sampled_from([1, 5, 30]), k=st.integers(2, 6))
def test_few_rows_and_no_right_zero_still_give_a_floor(seed, n, n_votes, k):
    p, _ = calibrated(n, k, seed)
    probabilities = votes(p, n_votes, seed)
    probabilities[0] = np.eye(k)[0]  # some zero
    with pytest.warns(CaucWarning):
        stage = fit(probabilities, probabilities.argmax(axis=1)).stages[0]
    assert 0 < stage.floor < 1 / k


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")
@pytest.mark.parametrize("method", ["base", "rf", "stacked", "duo", "single:m1"])
def test_every_method_reads_zeros_by_the_floor(method):
    chains = splits(400, ragged=False)
    logits = {split: dict(zip(MODELS, data.logits, strict=True)) for split, data in chains.items()}
    probabilities = {split: {model: votes(softmax(z), 20) for model, z in of.items()} for split, of in logits.items()}
    validation = probabilities["validation"], chains["validation"].labels
    options = {"costs": [1.0, 4.0], "logit_kind": "probabilities", "method": method, "validation": validation}
    policy = cauc_ray.fit(probabilities["calibration"], chains["calibration"].labels, **options)
    assert all(stage.floor is not None for stage in policy.stages)
    test = [as_logits(probabilities["test"][name], "probabilities") for name in policy.models]
    floors = [np.float32(np.log(stage.floor)) for stage in policy.stages]
    lifted = [np.maximum(z, floor) for z, floor in zip(test, floors, strict=True)]
    for step, of_lifted in zip(steps(policy, test), steps(policy, lifted), strict=True):
        np.testing.assert_allclose(step.confidences, of_lifted.confidences, rtol=1e-6)


def test_unlisted_log_probabilities_are_bounded_and_masks_on_labels_refused_with_the_remedy():
    p, labels = calibrated(3000, 6)
    logs = np.log(p).astype(np.float32)
    unlisted = logs < np.sort(logs, axis=1)[:, -3, None]
    assert unlisted[np.arange(3000), labels].any()
    with zeros_are_reported:
        policy = fit(np.where(unlisted, -100.0, logs), labels, logit_kind="log-probabilities")
    assert policy.stages[0].temperature == pytest.approx(1, abs=0.1)
    with pytest.raises(DataError, match=r"example '\d+'.*-100"):
        fit(np.where(unlisted, -9999.0, logs), labels, logit_kind="log-probabilities")
    # A sum over the tokens of long options may be as low, next to lower ones.
    deep = 40 * logs - 60
    assert fit(deep, labels, logit_kind="log-probabilities").stages[0].floor is None
