"""The numbers and drawings of reports, against slow ways to the same."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain

from cauc_ray.policies.fitting import fit_base
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.reporting.budgets import _places, _rounded_up
from cauc_ray.reporting.labels import Box, place_label
from cauc_ray.reporting.panels import draw_bars, draw_reliability, draw_stack
from cauc_ray.reporting.scales import Axis, cost_axis, share_axis
from cauc_ray.reporting.wording import escape_markdown, fenced

POSITIVE = st.floats(1e-9, 1e9)
NAMES = st.text(min_size=1, max_size=30)


@given(POSITIVE)
def test_rounding_up_takes_nothing_from_a_budget(cost):
    assert cost <= _rounded_up(cost) <= cost * (1 + 2e-5)
    assert float(f"{_rounded_up(cost):.6g}") == _rounded_up(cost)


@given(POSITIVE, st.floats(1.0, 1e4))
def test_the_sliders_places_rise_from_one_end_to_the_other(low, factor):
    places = _places(low, low * factor)
    assert places[0] == _rounded_up(low)
    assert places[-1] == _rounded_up(low * factor)
    assert all(one < other for one, other in pairwise(places))
    assert len(places) <= 130


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=9), st.integers(2, 9))
def test_ticks_lie_within_their_axis_and_values_between_its_ends(costs, most):
    for axis in (cost_axis(costs, 40, 400), share_axis([cost / 1e9 for cost in costs], 300, 10)):
        ticks = axis.ticks(most)
        assert list(ticks) == sorted(set(ticks))
        assert len(ticks) <= 2 * most + 2
        ends = sorted((axis.start, axis.end))
        assert all(ends[0] - 0.5 <= axis.at(tick) <= ends[1] + 0.5 for tick in ticks)
    assert all(40 <= cost_axis(costs, 40, 400).at(cost) <= 400 for cost in costs)


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    axis = Axis(0.1, 1000, 0, 400, is_log=True)
    assert [axis.at(10.0**power) for power in range(-1, 4)] == [0, 100, 200, 300, 400]
    assert axis.ticks(5) == pytest.approx((0.1, 1, 10, 100, 1000))


@given(st.lists(st.tuples(st.floats(80, 700), st.floats(60, 340)), min_size=1, max_size=5), NAMES)
def test_names_that_have_room_do_not_cover_each_other(points, name):
    frame, taken = Box(50, 10, 800, 390), []
    for x, y in points:
        label = place_label(name, x, y, 14, taken, np.zeros((0, 2)), frame)
        assert len(label.text) <= 22
        assert label.box.beyond(frame) == 0
        assert sum(label.box.overlap(other) for other in taken) == 0
        taken.append(label.box)


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=12))
def test_bars_and_stacks_are_as_long_as_their_counts(counts):
    bars, stack = draw_bars(counts), draw_stack(counts)
    assert [bar.n for bar in bars] == [bar.n for bar in stack] == counts
    for bar in bars:
        assert bar.height == pytest.approx(100 * bar.n / max(1, *counts, 1), abs=0.01)
        assert bar.y + bar.height == pytest.approx(100, abs=0.02)
    total = sum(counts)
    assert sum(bar.width for bar in stack) == pytest.approx(100 if total else 0, abs=0.01)
    for bar, before in zip(stack, np.concatenate([[0], np.cumsum(counts)[:-1]]), strict=True):
        assert bar.x == pytest.approx(100 * before / max(1, total), abs=0.01)


def test_reliability_marks_stand_where_their_bins_are():
    from cauc_ray.numbers.metrics import reliability_bins
    from cauc_ray.reporting.calibration import ModelCalibration

    rng = np.random.default_rng(1)
    confidences = rng.uniform(0, 1, 500)
    bins = reliability_bins(confidences, rng.random(500) < confidences)
    stage = fit_base(chain(1), rule=ThresholdRule(threshold=0.5)).stages[0]
    panel = draw_reliability(ModelCalibration(stage, 500, bins, bins, 0.0, 0.0))
    assert panel.before == panel.after
    assert len(panel.after) == (bins.counts > 0).sum() == 15
    for mark, accuracy, n in zip(panel.after, bins.accuracy, bins.counts, strict=True):
        assert (228 - mark.y) / 220 == pytest.approx(accuracy, abs=1e-3)
        assert mark.high <= mark.y <= mark.low
        assert mark.bar_height == pytest.approx(46 * n / bins.counts.max(), abs=0.01)


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=60))
def test_escaped_text_is_read_back_as_it_was(text):
    from html import unescape

    from markdown_it import MarkdownIt

    escaped = escape_markdown(f"x {text} x")
    assert "\n" not in escaped
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(escaped)
    inline = next(token for token in tokens if token.type == "inline")
    kinds = {child.type for child in inline.children}
    assert kinds <= {"text", "text_special"}
    read = "".join(child.content for child in inline.children)
    assert " ".join(unescape(read).split()) == " ".join(unescape(f"x {text} x").split())


@given(st.text(st.sampled_from("`~a \n"), max_size=20))
def test_a_command_cannot_end_its_block(text):
    from markdown_it import MarkdownIt

    (token,) = MarkdownIt("commonmark").parse(fenced(text))
    assert token.type == "fence"
    assert token.content == f"{text}\n"
