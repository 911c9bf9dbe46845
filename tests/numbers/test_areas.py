from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from cauc_ray.numbers import areas
from cauc_ray.numbers.areas import aiq, apgr, cpt, deferral_area, oracle_deferral_area, upper_hull

FIRST, LAST = 0.4, 0.7


def pair(seed, n=60):
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.uniform(0.2, 0.8), rng.random(n) < rng.uniform(0.2, 0.9)


def deferring(order, first, last):
    """Return shares and quality where rows are deferred one after the other, by a loop."""
    points = [(count / len(order), np.where(np.isin(np.arange(len(order)), order[:count]), last, first).mean())
              for count in range(len(order) + 1)]  # fmt: skip
    return np.array(points).T


def some_points(seed):
    """Few distinct shares, so that equal ones are common, in any order."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    return rng.integers(0, 11, n) / 10, rng.integers(30, 90, n) / 100


def extended(shares, quality):
    means = {s: np.mean([q for t, q in zip(shares, quality, strict=True) if t == s]) for s in shares}
    return sorted({0.0: FIRST, 1.0: LAST, **means}.items())


def line(points, x):
    """Return the height at x of the line through points in order of x, by a loop."""
    return next(y0 + (y1 - y0) * (x - x0) / (x1 - x0) for (x0, y0), (x1, y1) in pairwise(points) if x0 <= x <= x1)


def fine_area(points, low, high, n=2000):
    """Integrate by midpoints; n is a multiple of the distances between kinks, so that it is exact."""
    width = (high - low) / n
    return sum(line(points, low + (i + 0.5) * width) for i in range(n)) * width


@given(seeds)
def test_the_areas_are_integrals_of_the_extended_curve(seed):
    shares, quality = some_points(seed)
    expected = fine_area(extended(shares, quality), 0.0, 1.0)
    assert deferral_area(shares, quality, FIRST, LAST) == pytest.approx(expected, abs=1e-9)
    # RouteLLM's ratio: over the areas of both models alone.
    assert apgr(shares, quality, FIRST, LAST) == pytest.approx((expected - FIRST) / (LAST - FIRST), abs=1e-9)


@given(seeds)
def test_no_number_depends_on_the_order_of_the_points_or_on_rounding_of_shares(seed):
    shares, quality = some_points(seed)
    rng = np.random.default_rng(seed)
    other = rng.permutation(len(shares))
    moved = np.clip(shares + rng.uniform(-1e-15, 1e-15, len(shares)), 0, 1)[other]
    for number in (deferral_area, apgr, lambda *points: cpt(*points, q=0.5)):
        assert number(moved, quality[other], FIRST, LAST) == pytest.approx(
            number(shares, quality, FIRST, LAST), abs=1e-9
        )
    assert aiq(shares[other], quality[other], 2.0) == pytest.approx(aiq(shares, quality, 2.0), abs=1e-12)


@given(seeds)
def test_the_oracle_normalises_to_one_the_worst_order_to_minus_one_and_any_lies_between(seed):
    first, last = pair(seed)
    models, oracle = (first.mean(), last.mean()), oracle_deferral_area(first, last)
    order = np.argsort(first.astype(int) - last.astype(int), kind="stable")
    assert deferral_area(*deferring(order, first, last), *models) == pytest.approx(oracle, abs=1e-12)
    assert deferral_area(*deferring(order, first, last), *models, oracle) == pytest.approx(1.0, abs=1e-9)
    assert deferral_area(*deferring(order[::-1], first, last), *models, oracle) == pytest.approx(-1.0, abs=1e-9)
    drawn = deferring(np.random.default_rng(seed).permutation(len(first)), first, last)
    assert abs(deferral_area(*drawn, *models, oracle)) <= 1 + 1e-9


def test_random_deferral_is_worth_nothing_on_average():
    first, last = pair(3)
    oracle, rng = oracle_deferral_area(first, last), np.random.default_rng(0)
    drawn = [
        deferral_area(*deferring(rng.permutation(60), first, last), first.mean(), last.mean(), oracle)
        for _ in range(200)
    ]
    assert np.std(drawn) > 0.01
    assert np.mean(drawn) == pytest.approx(0.0, abs=4 * np.std(drawn) / np.sqrt(200))


def test_a_curve_whose_own_ends_are_better_exceeds_the_oracle():
    first, last = pair(1)
    oracle = oracle_deferral_area(first, last)
    assert deferral_area(np.array([0.0, 1.0]), np.ones(2), first.mean(), last.mean(), oracle) > 1


@pytest.mark.parametrize("last", [np.array([True, False, True]), np.ones(3, bool), np.zeros(3, bool)])
def test_where_nothing_can_be_chosen_there_is_no_normalised_area(last):
    first = last if last.any() and not last.all() else ~last
    oracle, point = oracle_deferral_area(first, last), (np.array([0.5]), np.array([0.6]))
    for mean in (first.mean(), np.nextafter(first.mean(), -1)):  # a sum in other order
        assert deferral_area(*point, mean, last.mean(), oracle) is None


@given(seeds, st.floats(0.01, 1.0))
def test_cpt_is_where_the_running_maximum_gets_there_first(seed, q):
    shares, quality = some_points(seed)
    points = extended(shares, quality)
    highest = [(x, max(y for other, y in points if other <= x)) for x, _ in points]
    got, asked = cpt(shares, quality, FIRST, LAST, q), FIRST + q * (LAST - FIRST)
    if got is None:
        assert highest[-1][1] < asked + 1e-12
        return
    assert line(highest, got) >= asked - 1e-9
    assert all(line(highest, x) < asked for x in np.linspace(0, got, 50) if x < got - 1e-6)


@pytest.mark.parametrize("last", [FIRST, 0.1 + 0.2 + 0.1, 0.3])
def test_without_a_gap_nothing_can_be_recovered(last):
    point = np.array([0.5]), np.array([0.6])
    assert apgr(*point, FIRST, last) is None
    assert cpt(*point, FIRST, last, 0.5) is None


@given(seeds, st.integers(1, 30), st.booleans())
def test_hulls_are_concave_and_above_every_point(seed, n, falling):
    rng = np.random.default_rng(seed)
    costs, quality = rng.integers(1, 6, n) / 2, rng.integers(0, 9, n) / 8  # many equal and on one line
    hull = upper_hull(costs, quality, falling=falling)
    x, y = costs[hull], quality[hull]
    assert (np.diff(x) > 0).all()
    assert (np.diff(np.diff(y) / np.diff(x)) < 0).all()
    assert (np.interp(costs, x, y) >= quality - 1e-12).all()
    assert x[0] == costs.min()
    if falling:
        assert x[-1] == costs.max()
    else:
        assert (np.diff(y) > 0).all()
        assert (x[-1], y[-1]) == (costs[quality == quality.max()].min(), quality.max())


@given(seeds)
def test_aiq_is_the_integral_under_the_level_hull(seed):
    rng = np.random.default_rng(seed)
    costs, quality = rng.integers(1, 9, 12).astype(float), rng.random(12)
    hull = upper_hull(costs, quality)
    points = [*zip(costs[hull], quality[hull], strict=True), (10.0, quality.max())]
    # 1 / 280 divides every distance between whole costs, from 2 to 9 of them.
    n = 280 * int(10 - points[0][0])
    assert aiq(costs, quality, 10.0) == pytest.approx(fine_area(points, points[0][0], 10.0, n) / 10, abs=1e-9)


def test_numbers_of_one_point_are_plain_floats_to_be_stored_as_json():
    point, area = (np.array([0.25]), np.array([0.7])), 0.25 * 0.6 + 0.75 * 0.65
    found = [
        deferral_area(*point, 0.5, 0.6),
        deferral_area(*point, 0.5, 0.6, 0.7),
        apgr(*point, 0.5, 0.6),
        cpt(*point, 0.5, 0.6, 0.5),
        aiq(*point, np.float64(1)),
    ]
    assert found == pytest.approx([area, (area - 0.55) / 0.15, (area - 0.5) / 0.1, 0.25 / 4, 0.75 * 0.7])
    assert {type(number) for number in [*found, oracle_deferral_area(*pair(2))]} == {float}
    assert (aiq(*point, largest_cost=0.25), aiq(np.zeros(1), np.ones(1), largest_cost=0.0)) == (0, None)


def test_every_number_has_its_convention_in_one_sentence():
    for name in ("deferral_area", "oracle_deferral_area", "apgr", "cpt", "aiq"):
        assert areas.CONVENTIONS[name].count(".") == 1
        assert areas.CONVENTIONS[name].endswith(".")
