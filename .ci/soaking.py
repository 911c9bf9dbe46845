"""A pytest plugin that keeps soak tests of the chosen kinds and rooms which have not passed yet (see .ci/soak)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

CHOSEN = frozenset(os.environ["SOAK_KINDS"].split())
PASSED_FILE = Path(os.environ["SOAK_PASSED"])
TESTS = Path(__file__).parents[1] / "tests"
# Of this run's start: all processes that run tests must collect the same.
PASSED = frozenset(os.environ.setdefault("SOAK_PASSED_BEFORE", PASSED_FILE.read_text()).splitlines())


def kind_of(item: pytest.Item) -> str | None:
    """Return the kind of a soak test; None for other tests."""
    mark = item.get_closest_marker("soak")
    return None if mark is None else str(mark.args[0])


def is_chosen(item: pytest.Item) -> bool:
    """Return whether a test is a soak test of a chosen kind or room that has not passed yet."""
    kind = kind_of(item)
    room = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    return kind is not None and (not CHOSEN or not CHOSEN.isdisjoint((kind, room))) and item.nodeid not in PASSED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all other tests."""
    available = {kind_of(item) for item in items} | {path.name for path in TESTS.iterdir() if path.is_dir()}
    if unknown := CHOSEN - available:
        raise pytest.UsageError(f"no kind or room of soak tests: {', '.join(sorted(unknown))}")
    chosen = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def pytest_collection_finish(session: pytest.Session) -> None:
    """Print which kinds will run."""
    if session.config.option.collectonly:
        print("soak kinds:", *sorted({str(kind_of(item)) for item in session.items}))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write down what has passed, once, in the process that reports."""
    if "PYTEST_XDIST_WORKER" not in os.environ and report.when == "call" and report.passed:
        with PASSED_FILE.open("a", encoding="utf-8") as file:
            file.write(f"{report.nodeid}\n")
