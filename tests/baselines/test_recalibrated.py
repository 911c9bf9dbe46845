"""Methods on recalibrated logits: calibration rows are recalibrated as new rows are."""

import numpy as np
import pytest
from synthetic import chain_of

from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.multinomial import nll_of
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.recalibrated import fit_recalibrated
from cauc_ray.policies.trace import Examples


def confused(seed, n, k=16):
    """Return two models whose highest logit is at the option after the label, among noise."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, k, n)
    logits = [2.0 * rng.standard_normal((n, k)) for _ in range(2)]
    for model in logits:
        model[np.arange(n), (labels + 1) % k] += 4.0
    return Examples(chain_of(labels, logits, [f"{seed}-{row}" for row in range(n)], np.array([1.0, 2.0])))


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # a few rows cannot be calibrated
@pytest.mark.parametrize("n", [1, 2, 300])
def test_calibration_rows_are_recalibrated_by_fits_that_did_not_see_them(n):
    fittings = []

    def fit(fitting):
        fittings.append(fitting)
        return Family([], fitting.validation)

    family = fit_recalibrated(fit, Fitting(confused(0, n), confused(1, 60)))
    splits = fittings[0].calibration.chain, family.reading(confused(2, 3000)).chain
    calibration, new = (
        np.array([nll_of(logits, chain.labels) / len(chain) for logits in chain.logits]) for chain in splits
    )
    confidences = [np.mean([top_option(logits)[1].mean() for logits in chain.logits]) for chain in splits]
    assert np.isfinite(new).all()
    if n > 2:
        assert (new < np.log(16) - 0.4).all()  # they are recalibrated
        assert calibration == pytest.approx(new, abs=0.15)
        assert confidences[0] == pytest.approx(confidences[1], abs=0.05)
