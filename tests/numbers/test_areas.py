from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial import ConvexHull

from cauc_ray.errors import DataError
from cauc_ray.numbers import areas
from cauc_ray.numbers.areas import aiq, apgr, cpt, deferral_area, oracle_deferral_area, upper_hull

seeds = st.integers(0, 2**32 - 1)


def pair(seed, n=60):
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.uniform(0.2, 0.8), rng.random(n) < rng.uniform(0.2, 0.9)


def deferring(order, first, last):
    """Return shares and quality where rows are deferred one after the other, by a loop."""
    answers = first.copy()
    points = [(0.0, answers.mean())]
    for count, row in enumerate(order, 1):
        answers[row] = last[row]
        points.append((count / len(order), answers.mean()))
    return np.array(points).T


def some_points(seed, largest_n=30):
    """Few distinct shares, so that equal ones are common, in any order."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, largest_n))
    return rng.integers(0, 11, n) / 10, rng.integers(30, 90, n) / 100


def extended(shares, quality, first, last):
    means = {s: np.mean([q for t, q in zip(shares, quality, strict=True) if t == s]) for s in shares}
    return sorted({0.0: first, 1.0: last, **means}.items())


def line(points, x):
    """Return the height at x of the line through points in order of x, by a loop."""
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise AssertionError(x)


def fine_area(points, low, high, n=2000):
    """Integrate by midpoints; n is a multiple of the distances between kinks, so that it is exact."""
    width = (high - low) / n
    return sum(line(points, low + (i + 0.5) * width) for i in range(n)) * width


@given(seeds)
def test_the_area_is_the_integral_of_the_extended_curve(seed):
    shares, quality = some_points(seed)
    expected = fine_area(extended(shares, quality, 0.4, 0.7), 0.0, 1.0)
    assert deferral_area(shares, quality, 0.4, 0.7) == pytest.approx(expected, abs=1e-9)


@given(seeds)
def test_no_number_depends_on_the_order_of_the_points_or_on_rounding_of_shares(seed):
    shares, quality = some_points(seed)
    rng = np.random.default_rng(seed)
    other = rng.permutation(len(shares))
    moved = np.clip(shares + rng.uniform(-1e-15, 1e-15, len(shares)), 0, 1)[other]
    for number in (deferral_area, apgr, lambda *points: cpt(*points, q=0.5)):
        assert number(moved, quality[other], 0.4, 0.7) == pytest.approx(number(shares, quality, 0.4, 0.7), abs=1e-9)
    assert aiq(shares[other], quality[other], 2.0) == pytest.approx(aiq(shares, quality, 2.0), abs=1e-12)


@given(seeds)
def test_the_oracles_area_is_that_of_its_order_and_normalises_to_one(seed):
    first, last = pair(seed)
    order = np.argsort(first.astype(int) - last.astype(int), kind="stable")
    curve = deferring(order, first, last)
    oracle = oracle_deferral_area(first, last)
    assert deferral_area(*curve, first.mean(), last.mean()) == pytest.approx(oracle, abs=1e-12)
    assert deferral_area(*curve, first.mean(), last.mean(), oracle) == pytest.approx(1.0, abs=1e-9)
    # Turned round it is the worst there is, as far below chance as the oracle is above it.
    worst = deferring(order[::-1], first, last)
    assert deferral_area(*worst, first.mean(), last.mean(), oracle) == pytest.approx(-1.0, abs=1e-9)


@given(seeds)
def test_no_order_beats_the_oracle(seed):
    first, last = pair(seed)
    drawn = deferring(np.random.default_rng(seed).permutation(len(first)), first, last)
    assert deferral_area(*drawn, first.mean(), last.mean()) <= oracle_deferral_area(first, last) + 1e-12


def test_deferral_by_lot_is_worth_nothing_on_average():
    first, last = pair(3, 500)
    oracle = oracle_deferral_area(first, last)
    rng = np.random.default_rng(0)
    drawn = [
        deferral_area(*deferring(rng.permutation(500), first, last), first.mean(), last.mean(), oracle)
        for _ in range(200)
    ]
    assert np.std(drawn) > 0.01
    assert np.mean(drawn) == pytest.approx(0.0, abs=4 * np.std(drawn) / np.sqrt(200))


def test_ends_of_its_own_count_and_can_exceed_the_oracle():
    first, last = pair(1)
    ends, pure = np.array([0.0, 1.0]), np.array([first.mean(), last.mean()])
    oracle = oracle_deferral_area(first, last)
    assert deferral_area(ends, pure, *pure, oracle) == pytest.approx(0.0, abs=1e-12)
    assert deferral_area(ends, np.ones(2), *pure, oracle) > 1


@pytest.mark.parametrize("last", [np.array([True, False, True]), np.ones(3, bool), np.zeros(3, bool)])
def test_where_nothing_can_be_chosen_there_is_no_normalised_area(last):
    first = last if last.any() and not last.all() else ~last
    oracle = oracle_deferral_area(first, last)
    point = np.array([0.5]), np.array([0.6])
    assert deferral_area(*point, first.mean(), last.mean(), oracle) is None
    assert deferral_area(*point, np.nextafter(first.mean(), -1), last.mean(), oracle) is None  # a sum in other order


@given(seeds)
def test_apgr_is_routellms_ratio_of_areas(seed):
    shares, quality = some_points(seed)
    points = extended(shares, quality, 0.4, 0.7)
    router, weak, strong = (
        fine_area([(x, pick(y)) for x, y in points], 0.0, 1.0) for pick in (lambda y: y, lambda _: 0.4, lambda _: 0.7)
    )
    assert apgr(shares, quality, 0.4, 0.7) == pytest.approx((router - weak) / (strong - weak), abs=1e-9)


def test_apgr_of_known_curves():
    ends = np.array([0.0, 1.0])
    assert apgr(ends, np.array([0.4, 0.7]), 0.4, 0.7) == pytest.approx(0.5)  # by lot
    assert apgr(ends, np.array([0.7, 0.7]), 0.4, 0.7) == pytest.approx(1.0)
    assert apgr(ends, np.array([0.4, 0.4]), 0.4, 0.7) == pytest.approx(0.0)
    assert apgr(ends, np.array([0.4, 1.2]), 0.4, 0.7) > 1


@given(seeds, st.floats(0.01, 1.0))
def test_cpt_is_where_the_running_maximum_gets_there_first(seed, q):
    shares, quality = some_points(seed)
    points = extended(shares, quality, 0.4, 0.7)
    highest = [(x, max(y for other, y in points if other <= x)) for x, _ in points]
    got, asked = cpt(shares, quality, 0.4, 0.7, q), 0.4 + q * 0.3
    if got is None:
        assert highest[-1][1] < asked + 1e-12
        return
    assert line(highest, got) >= asked - 1e-9
    before = [x for x in np.linspace(0, got, 50) if x < got - 1e-6]
    assert all(line(highest, x) < asked for x in before)


def test_cpt_of_known_curves():
    ends = np.array([0.0, 1.0])
    assert cpt(ends, np.array([0.4, 0.7]), 0.4, 0.7, 0.8) == pytest.approx(0.8)
    assert cpt(ends, np.array([0.4, 0.7]), 0.4, 0.7, 1.0) == 1.0
    assert cpt(ends, np.array([0.65, 0.7]), 0.4, 0.7, 0.5) == 0.0
    # The dip between the two visits to 0.55 asks for no more calls, and does not make them fewer.
    dip = np.array([0.0, 0.2, 0.4, 0.6, 1.0]), np.array([0.4, 0.55, 0.45, 0.6, 0.7])
    assert cpt(*dip, 0.4, 0.7, 0.5) == pytest.approx(0.2)
    assert cpt(ends, np.array([0.4, 0.6]), 0.4, 0.7, 0.9) is None


@pytest.mark.parametrize("last", [0.4, 0.1 + 0.2 + 0.1, 0.3])
def test_without_a_gap_nothing_can_be_recovered(last):
    point = np.array([0.5]), np.array([0.6])
    assert apgr(*point, 0.4, last) is None
    assert cpt(*point, 0.4, last, 0.5) is None


def operating_points(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 40))
    return rng.uniform(1, 10, n), rng.uniform(0.3, 0.9, n)


@given(seeds)
def test_the_hull_is_scipys(seed):
    costs, quality = operating_points(seed)
    hull = upper_hull(costs, quality)
    # Two points more make the upper side of the convex hull level after the best point, and give it an area.
    around = np.r_[np.c_[costs, quality], [[11.0, quality.max()], [costs.min(), 0.0]]]
    sides = ConvexHull(around).equations
    a, b, c = sides[sides[:, 1] > 1e-9].T
    for cost in np.linspace(costs.min(), 11.0, 57):
        height = np.interp(cost, costs[hull], quality[hull])
        assert height == pytest.approx(((-c - a * cost) / b).min(), abs=1e-9)


@given(seeds)
def test_hulls_are_concave_rising_and_above_every_point(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    costs, quality = rng.integers(1, 6, n) / 2, rng.integers(0, 9, n) / 8  # many equal and on one line
    hull = upper_hull(costs, quality)
    x, y = costs[hull], quality[hull]
    assert (np.diff(x) > 0).all()
    assert (np.diff(y) > 0).all()
    assert (np.diff(np.diff(y) / np.diff(x)) < 0).all()
    assert (x[0], y[-1]) == (costs.min(), quality.max())
    assert x[-1] == costs[quality == quality.max()].min()
    assert (np.interp(costs, x, y) >= quality - 1e-12).all()


@given(seeds, st.integers(1, 7))
def test_a_falling_hull_lies_above_all_points_up_to_the_most_expensive(seed, m):
    rng = np.random.default_rng(seed)
    costs, quality = rng.integers(1, 6, m).astype(float), rng.random(m)
    on = upper_hull(costs, quality, falling=True)
    assert costs[on[0]] == costs.min()
    assert costs[on[-1]] == costs.max()
    line = np.interp(costs, costs[on], quality[on])
    assert (quality <= line + 1e-12).all()
    slopes = np.diff(quality[on]) / np.diff(costs[on])
    assert (np.diff(slopes) <= 1e-12).all()


@given(seeds)
def test_aiq_is_the_integral_under_the_level_hull(seed):
    rng = np.random.default_rng(seed)
    costs, quality = rng.integers(1, 9, 12).astype(float), rng.random(12)
    hull = upper_hull(costs, quality)
    points = [*zip(costs[hull], quality[hull], strict=True), (10.0, quality.max())]
    # 1 / 280 divides every distance between whole costs, from 2 to 9 of them.
    n = 280 * int(10 - points[0][0])
    assert aiq(costs, quality, 10.0) == pytest.approx(fine_area(points, points[0][0], 10.0, n) / 10, abs=1e-9)


@given(seeds)
def test_a_further_point_never_lowers_aiq_unless_it_is_the_cheapest(seed):
    costs, quality = operating_points(seed)
    cheapest = costs.argmin()
    fewer = np.r_[cheapest, np.random.default_rng(seed).permutation(len(costs))[: len(costs) // 2]]
    assert aiq(costs, quality, 10.0) >= aiq(costs[fewer], quality[fewer], 10.0) - 1e-12


def test_numbers_are_plain_floats_to_be_stored_as_json():
    first, last = pair(2)
    models = first.mean(), last.mean()
    point = np.array([0.5]), np.array([0.9])
    oracle = oracle_deferral_area(first, last)
    numbers = [oracle, deferral_area(*point, *models, oracle), apgr(*point, 0.4, 0.7), cpt(*point, 0.4, 0.7, 0.5)]
    assert {type(number) for number in [*numbers, aiq(*point, np.float64(2))]} == {float}


def test_one_point():
    point = np.array([0.25]), np.array([0.7])
    assert deferral_area(*point, 0.5, 0.6) == pytest.approx(0.25 * 0.6 + 0.75 * 0.65)
    assert apgr(*point, 0.5, 0.6) == pytest.approx((0.25 * 0.6 + 0.75 * 0.65 - 0.5) / 0.1)
    assert cpt(*point, 0.5, 0.6, 0.5) == pytest.approx(0.25 / 4)
    assert upper_hull(*point).tolist() == [0]
    assert aiq(*point, largest_cost=1.0) == pytest.approx(0.75 * 0.7)
    assert aiq(*point, largest_cost=0.25) == 0
    assert aiq(np.zeros(1), np.ones(1), largest_cost=0.0) is None


def by_name(name, points):
    arguments = {
        "deferral_area": (*points, 0.4, 0.7),
        "apgr": (*points, 0.4, 0.7),
        "cpt": (*points, 0.4, 0.7, 0.5),
        "aiq": (*points, 10.0),
        "upper_hull": points,
    }
    return getattr(areas, name)(*arguments[name])


@pytest.mark.parametrize("name", ["deferral_area", "apgr", "cpt", "aiq", "upper_hull"])
@pytest.mark.parametrize(
    ("points", "words"),
    [
        ((np.array([]), np.array([])), "at least one; got"),
        ((np.zeros(2), np.zeros(3)), r"got \(2,\) and \(3,\)"),
        ((np.zeros((2, 1)), np.zeros((2, 1))), "a curve needs"),
        ((np.array([0.1, np.nan]), np.zeros(2)), "point 1 of a curve is not a number"),
        ((np.zeros(1), np.array([np.nan])), "quality nan"),
    ],
)
def test_points_that_make_no_curve_are_refused_in_one_line(name, points, words):
    with pytest.raises(DataError, match=words) as refused:
        by_name(name, points)
    assert "\n" not in str(refused.value)


def test_what_else_is_refused():
    with pytest.raises(DataError, match=r"must lie in \[0, 1\]; got 50 to 50"):
        deferral_area(np.array([50.0]), np.array([0.5]), 0.4, 0.7)
    with pytest.raises(DataError, match="the two models alone must be numbers"):
        apgr(np.array([0.5]), np.array([0.5]), 0.4, float("nan"))
    with pytest.raises(DataError, match="largest cost of the comparison, 3"):
        aiq(np.array([4.0]), np.array([0.5]), largest_cost=3.0)
    with pytest.raises(DataError, match="the oracle needs"):
        oracle_deferral_area(np.zeros(0, bool), np.zeros(0, bool))


def test_every_number_has_its_convention_in_one_sentence():
    for name in ("deferral_area", "oracle_deferral_area", "apgr", "cpt", "aiq"):
        assert areas.CONVENTIONS[name].count(".") == 1
        assert areas.CONVENTIONS[name].endswith(".")
