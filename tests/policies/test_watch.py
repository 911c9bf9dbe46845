"""Watching a policy: its reference, the sums, and what is announced of traffic that has changed or has not."""

from collections import Counter

import numpy as np
import pytest
from synthetic import chain, steps

from cauc_ray.data.logits import LogitTable
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.monitor import NEEDED, Watch, Watched, watch_report
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, trace_policy


def fitted(fit=fit_rf, **options):
    return fit(chain(1, 1500, **options), chain(1, 1500, shift=1, **options), ThresholdRule(budget=12.0))


def outcomes(policy, data):
    """Return a policy's answers on a chain, which are right, and which the whole cascade would have given."""
    trace = trace_policy(policy, data, likeliest=True)
    answered = trace.at(policy.threshold, data)
    return answered, answered.predictions == data.labels, answered.predictions == trace.predictions[:, -1]


def watched(policy, data, watch=None):
    watch = watch or Watch(policy)
    answered, correct, agreed = outcomes(policy, data)
    early = answered.stages < len(policy.stages) - 1
    watch.add(answered)
    watch.add_outcomes(answered.stages, answered.confidences, correct)
    watch.add_agreements(answered.stages[early], agreed[early])
    return watch


@pytest.mark.parametrize("per_call", [False, True])
def test_answers_are_those_of_a_replay_and_the_reference_counts_them(fit, per_call):
    policy = fitted(fit, per_call=per_call)
    validation = chain(1, 1500, shift=1, per_call=per_call)
    result, measures = measure_replay(policy, validation)
    _, correct, agreed = outcomes(policy, validation)
    for place, stage in enumerate(policy.reference.stages):
        answered_here = result.stages == place
        counts = sum(stage.confidences), sum(stage.likeliest.values()), measures.stages[place].answered
        assert counts == (answered_here.sum(),) * 3
        assert sum(stage.right) == correct[answered_here].sum()
        assert stage.agreed == agreed[answered_here].sum()
        assert stage.cost == pytest.approx(result.costs[answered_here].mean())
        for b, n in enumerate(stage.confidences):
            inside = (result.confidences >= b / 10) & (result.confidences < (b + 1) / 10 + (b == 9))
            assert n == (answered_here & inside).sum()
        scores = list(steps(policy, validation.logits))[place].scores[answered_here]
        three = ["".join(map(str, np.argsort(-row, kind="stable")[:3])) for row in scores]
        assert Counter(three) == stage.likeliest
    report = watch_report(policy, watched(policy, validation).watched())
    assert report["cost"][0] == pytest.approx(report["reference_cost"])
    for stage in report["stages"]:
        assert stage["answered"] == pytest.approx(stage["reference_answered"])
        assert stage["accepted_accuracy"][0] == pytest.approx(stage["reference_accepted_accuracy"])
        assert stage["calibration_error"] == pytest.approx(stage["reference_calibration_error"])


def test_new_rows_of_the_same_models_stay_quiet_and_changed_ones_do_not(fit):
    policy = fitted(fit)
    for seed in range(12):
        assert watched(policy, chain(seed + 50, 1000)).watched().valid
    for change, expected in (
        ({"strengths": (0.2, 0.9, 2.4)}, {"confidence", "answers", "calibration"}),
        ({"strengths": (2.2, 2.4, 2.6)}, {"confidence"}),
    ):
        evidence = watched(policy, chain(60, 500, **change)).watched().evidence
        against = {name for name, statistic in evidence.items() if not statistic.valid}
        assert against & expected
        assert all(0 < evidence[name].at <= 500 and evidence[name].log10 >= NEEDED for name in against)


def test_several_watches_share_the_error_rate_and_their_sums_add_up():
    policy = fitted()
    parts = [watched(policy, chain(80 + seed, 400), Watch(policy, n_watches=2)).watched() for seed in range(2)]
    merged = Watched.merged(parts)
    assert merged.valid
    for place, sums in enumerate(merged.stages):
        assert sums.n == sum(part.stages[place].n for part in parts)
    alone = watched(policy, chain(80, 400)).watched()
    for name, statistic in alone.evidence.items():
        assert statistic.log10 - parts[0].evidence[name].log10 == pytest.approx(np.log10(2))
        assert merged.evidence[name].n == sum(part.evidence[name].n for part in parts)
    changed = watched(policy, chain(60, 2000, strengths=(0.2, 0.9, 2.4)), Watch(policy, n_watches=2)).watched()
    assert not Watched.merged([parts[0], changed]).valid


def holds_on(policy, data, seed, n):
    """Say whether a policy holds after n rows in some order."""
    answered, correct, _ = outcomes(policy, data)
    rows = np.random.default_rng(seed).permutation(len(correct))[:n]
    watch = Watch(policy)
    watch.add(answered.of_rows(rows))
    watch.add_outcomes(answered.stages[rows], answered.confidences[rows], correct[rows])
    return watch.watched().valid


# Their third likeliest options are rare in many ways, of which a reference knows a part: no change, however many come.
@pytest.mark.parametrize(
    ("table", "models"),
    [
        ("cifar10", ("resnet20", "resnet32", "resnet44", "resnet56")),
        ("cifar100", ("efs_lenet_5", "efs_densenet_bc_100", "efs_wideresnet_16_4")),
    ],
)
def test_options_that_a_reference_lacks_do_not_count_as_a_change(shared_logits, fit, table, models):
    split = {name: LogitTable(shared_logits / table).read_chain(models, name) for name in ("calibration", "validation")}
    policy, test = fit(*split.values()), LogitTable(shared_logits / table).read_chain(models, "test")
    assert all(holds_on(policy, test, seed, 5000) for seed in range(3))
