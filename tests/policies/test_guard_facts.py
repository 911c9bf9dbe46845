"""What real saved outputs show, verified from the logits by other means, and the guards that must see it coming."""

from itertools import combinations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from scipy.stats import mannwhitneyu
from synthetic import nll, rows_of

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.trace import measure_replay

FITS = {"base": fit_base, "rf": fit_rf}


def splits(folder, table, models):
    return tuple(
        LogitTable(folder / table).read_chain(models, split) for split in ("calibration", "validation", "test")
    )


def fired(policy):
    return {(guard.name, guard.stage) for guard in policy.guards if guard.fired}


def names(policy):
    return {name for name, _ in fired(policy)}


def weights_of(sources, labels):
    """Return the weights of least NLL, by scipy."""
    start = np.full(len(sources), np.log(0.5))
    found = minimize(lambda w: nll(np.exp(w), sources, labels), start, method="L-BFGS-B", tol=1e-12)
    return np.exp(found.x)


def calibrated(calibration, *splits):
    """Return each model's calibrated logits on some splits, by scipy's temperatures."""
    inverse = [weights_of([logits], calibration.labels)[0] for logits in calibration.logits]
    return [[logits * weight for logits, weight in zip(of.logits, inverse, strict=True)] for of in splits]


def right(logits, labels):
    return logits.argmax(axis=1) == labels


@pytest.mark.parametrize("table", ["emotion10k_task_icl1", "emotion10k_base_icl1"])
def test_recursive_fusion_that_lands_below_the_large_model_is_seen(shared_logits, table):
    calibration, validation, test = splits(shared_logits, table, ["llama-2-7b-hf", "llama-2-13b-hf"])
    fitted_on, scores = calibrated(calibration, calibration, test)
    fused = sum(w * z for w, z in zip(weights_of(fitted_on, calibration.labels), scores, strict=True))
    large = right(test.logits[1], test.labels).mean()
    assert right(fused, test.labels).mean() < large - 0.009
    policy = fit_rf(calibration, validation)
    assert measure_replay(policy, test)[1].accuracy.value < large
    assert {"cost-above-largest", "below-single-model", "fusion-within-noise"} <= names(policy)


@pytest.mark.parametrize(
    ("table", "models"),
    [
        ("cifar100", ["efs_densenet_bc_100", "efs_wideresnet_16_4"]),
        ("emotion10k_task_icl1", ["deepseek-llm-7b-base", "qwen-14b"]),
        ("emotion10k_task_icl1", ["yi-6b", "falcon-7b"]),
        ("emotion10k_base_icl1", ["llama-2-7b-hf", "qwen-14b"]),
        ("priced_mmlu", ["gpt-4o", "llama3.1-405b"]),
        ("priced_mmlu", ["llama3.1-70b", "qwen2.5-72b-instruct"]),
    ],
)
def test_a_default_threshold_more_expensive_than_the_large_model_is_seen(shared_logits, table, models):
    calibration, validation, test = splits(shared_logits, table, models)
    threshold = right(calibration.logits[1], calibration.labels).mean()
    deferred = softmax(calibrated(calibration, test)[0][0], axis=1).max(axis=1) < threshold
    per_call = np.broadcast_to(test.costs.per_call, (len(test), 2))
    ratio = (per_call[:, 0] + deferred * per_call[:, 1]).mean() / per_call[:, 1].mean()
    assert 1.07 <= ratio <= 1.35
    policy = fit_base(calibration, validation)
    assert ("cost-above-largest", None) in fired(policy)


def complementarity(small, large, labels):
    """Return the complementarity rate of two models' calibrated logits (paper, eq. 6)."""
    bolder = softmax(small, axis=1).max(axis=1) > softmax(large, axis=1).max(axis=1)
    difference = right(small, labels).astype(int) - right(large, labels)
    return (difference * bolder).sum() / len(labels)


def test_a_complementarity_rate_that_changes_sign_between_splits_of_a_thousand_is_seen(shared_logits):
    models = ["resnet32", "resnet44", "resnet56", "resnet_preact_bottleneck_164", "resnet_basic_110", "vgg_15_bn_64"]
    whole = splits(shared_logits, "cifar10", models)
    changed = seen = 0
    for start in (0, 1000):
        of_all = [rows_of(chain, np.arange(start, start + 1000)) for chain in whole]
        scores = calibrated(of_all[0], *of_all)
        for places in combinations(range(len(models)), 2):
            rates = [
                complementarity(*(own[p] for p in places), of.labels) for own, of in zip(scores, of_all, strict=True)
            ]
            if min(rates) >= 0 or max(rates) <= 0:
                continue
            changed += 1
            policy = fit_base(*(of.of_models(places) for of in of_all[:2]))
            assert policy.stages[0].complementarity_rate == pytest.approx(rates[0], abs=1e-9)
            seen += ("fusion-within-noise", policy.models[0]) in fired(policy)
    assert changed >= 8
    # A sign that is established wrongly 1 time in 20 cannot be seen to be.
    assert seen >= 0.9 * changed


def test_a_full_chain_that_is_worse_than_a_part_of_it_is_seen(shared_logits):
    models = ["qwen-1_8b", "llama-2-7b-hf", "llama-2-13b-hf", "qwen-14b"]
    calibration, validation, test = splits(shared_logits, "emotion10k_task_icl0", models)
    policy = fit_base(calibration, validation)
    (stage,) = [stage for name, stage in fired(policy) if name == "worse-than-part"]
    part = [place for place, name in enumerate(models) if name != stage]
    # The part as a fit of its own, on rows that neither has seen.
    of_part = fit_base(calibration.of_models(part), validation.of_models(part))
    whole, alone = measure_replay(policy, test)[1], measure_replay(of_part, test.of_models(part))[1]
    assert alone.accuracy.value > whole.accuracy.value
    assert alone.cost < whole.cost


def test_too_few_calibration_examples_are_seen(shared_logits):
    few, enough = (
        fit_rf(*splits(shared_logits, table, models)[:2])
        for table, models in (
            ("priced_medmcqa", ["llama3.2-3b", "gpt-4o"]),
            ("cifar10", ["resnet20", "resnet56"]),
        )
    )
    assert (few.calibration.n, enough.calibration.n) == (333, 2500)
    assert "few-examples" in names(few)
    assert {"few-examples", "temperature-uncertain"}.isdisjoint(names(enough))


def test_a_confidence_that_ranks_nothing_is_seen(shared_logits):
    calibration, validation, test = splits(shared_logits, "emotion10k_task_icl1", ["falcon-7b", "qwen-14b"])
    correct, confidences = (
        right(test.logits[0], test.labels),
        softmax(calibrated(calibration, test)[0][0], axis=1).max(1),
    )
    ranks = mannwhitneyu(confidences[correct], confidences[~correct], alternative="greater")
    assert ranks.statistic / (correct.sum() * (~correct).sum()) < 0.53
    assert ("uninformative-confidence", "falcon-7b") in fired(fit_base(calibration, validation))
    # A poor model may still know when it is right: the guards of cost notice its value.
    poor = fit_base(*splits(shared_logits, "cifar100", ["efs_lenet_5", "efs_densenet_bc_100"])[:2])
    assert ("uninformative-confidence", "efs_lenet_5") not in fired(poor)
    assert {"cost-above-largest", "below-single-model"} <= names(poor)


@pytest.mark.parametrize("method", FITS)
@pytest.mark.parametrize("budget", [None, 0.05, 0.06, 0.08, 0.1, 0.13, 0.166])
def test_all_is_quiet_on_resnet_20_to_56_of_cifar10(shared_logits, method, budget):
    folder = shared_logits / "cifar10"
    policy = cauc_ray.fit(folder, models=["resnet20", "resnet56"], method=method, budget=budget, strict=True)
    assert not fired(policy)
    assert {"cost-above-largest", "fusion-within-noise", "few-examples", "separable", "cost-shift"} <= {
        guard.name for guard in policy.guards
    }
    assert [guard.fired for guard in cauc_ray.evaluate(folder, policy).guards] == [False]
