"""The evidence against shares: by its definition, by its mean, and on streams drawn from the truth."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import gammaln
from scipy.stats import binom

from cauc_ray.numbers.drift import SPACING, ShareDrift

# The definition's own: what a row of the reference counts for, rows of each context that no category has had yet, and
# how many rows the changed shares are known by, and by which factor the odds of the second of two categories change.
TRUST, UNSEEN, CHANGES = 0.4, 2.0, ((100.0, 1.0), (300.0, 1.0))
OF_TWO = (*CHANGES, (300.0, np.exp(-0.3)), (300.0, np.exp(-0.7)))


def log_dirichlet(counts, pseudo):
    """Return the log probability of a sequence with these counts under shares of a Dirichlet distribution."""
    total = gammaln(pseudo.sum()) - gammaln(pseudo.sum() + counts.sum())
    return total + (gammaln(pseudo + counts) - gammaln(pseudo)).sum()


def log_predicted(reference, cells, k, concentration=None, before=(), factor=1.0):
    """Return the log probability of rows; concentration: of shares that change after those before, None for no change.

    before: earlier rows; with the reference they give the shares that change.   factor: of the odds of the last one.
    """
    new, old = (
        np.bincount(np.asarray(rows, dtype=np.int64), minlength=reference.size).reshape(reference.shape)
        for rows in (cells, before)
    )
    total = 0.0
    for expected, earlier, counts in zip(reference + UNSEEN / k, old, new, strict=True):
        same = TRUST * expected.sum()
        size = same if concentration is None else min(concentration, same / 2)
        pseudo = (TRUST * expected + earlier) * np.array([*[1.0] * (k - 1), factor])
        total += log_dirichlet(counts, size * pseudo / pseudo.sum())
    return total


def slow_evidence(reference, contexts, categories):
    """Return the log of the evidence after all rows: every beginning's ratio by itself."""
    k = reference.shape[1]
    cells = contexts * k + categories
    n, terms = len(cells), []
    for j, begin in enumerate(range(0, n, SPACING)):
        weight = 0.5 if j == 0 else 0.5 / (j * (j + 1))
        same = log_predicted(reference, cells, k) - log_predicted(reference, cells[:begin], k)
        for concentration, factor in OF_TWO if k == 2 else CHANGES:
            changed = log_predicted(reference, cells[begin:], k, concentration, cells[:begin], factor)
            terms.append(np.log(weight / (4 if k == 2 else 2)) + changed - same)
    return np.logaddexp.reduce(terms)


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("n", [1, 63, 64, 65, 300])
def test_evidence_is_the_weighed_ratio_of_two_predictions(n, k):
    rng = np.random.default_rng(n)
    reference = rng.integers(0, 60, (3, k))
    contexts, categories = rng.integers(0, 3, n), rng.integers(0, k, n)
    evidence = ShareDrift(reference).add(contexts, categories)
    assert evidence[-1] == pytest.approx(slow_evidence(reference, contexts, categories), abs=1e-9)


@given(st.integers(0, 2**32), st.lists(st.integers(0, 90), min_size=1, max_size=9))
def test_rows_may_come_in_any_parts(seed, sizes):
    rng = np.random.default_rng(seed)
    reference, n = rng.integers(0, 30, (2, 3)), sum(sizes)
    contexts, categories = rng.integers(0, 2, n), rng.integers(0, 3, n)
    whole, parts = ShareDrift(reference), ShareDrift(reference)
    ends = np.cumsum([0, *sizes])
    in_parts = [parts.add(contexts[a:b], categories[a:b]) for a, b in pairwise(ends)]
    assert np.concatenate(in_parts) == pytest.approx(whole.add(contexts, categories), abs=1e-9)
    assert parts.n == whole.n == n
    assert parts.since == whole.since


@pytest.mark.parametrize("n_runs", [100, pytest.param(300, marks=pytest.mark.soak("full"))])
@pytest.mark.parametrize(("n_categories", "n_reference"), [(2, 400), (12, 2000), (60, 1000)])
def test_it_is_seldom_large_for_rows_of_the_reference_s_own_shares(n_categories, n_reference, n_runs):
    rng = np.random.default_rng(n_categories)
    false, none = 0, np.zeros(700, dtype=np.int64)
    for _ in range(n_runs):
        shares = rng.dirichlet(np.full(n_categories, 0.5))
        test = ShareDrift(rng.multinomial(n_reference, shares).reshape(1, -1))
        false += bool(test.add(none, rng.choice(n_categories, 700, p=shares)).max() >= np.log(20))
    # A true share of 5 % would show more than this in one of a thousand such tests.
    assert false <= binom.ppf(0.999, n_runs, 0.05)


def test_a_late_change_is_found_and_placed():
    rng = np.random.default_rng(3)
    before, after = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.4, 0.3])
    for begin in (0, 1000, 6000):
        test = ShareDrift(rng.multinomial(2500, before).reshape(1, -1))
        rows = np.r_[rng.choice(3, begin, p=before), rng.choice(3, 500, p=after)]
        evidence = test.add(np.zeros(begin + 500, dtype=np.int64), rows)
        assert evidence[:begin].max(initial=-np.inf) < np.log(20) < evidence[-1]
        assert abs(test.since - begin) <= 2 * SPACING
