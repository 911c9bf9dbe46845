"""All that a report says, before any of it is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cauc_ray.policies.evidence import Guard
from cauc_ray.reporting.budgets import Budgets, find_budgets
from cauc_ray.reporting.calibration import ModelCalibration, measure_calibration
from cauc_ray.reporting.comparison import MethodCurves, trace_methods, with_own_curves
from cauc_ray.reporting.finding import Found
from cauc_ray.reporting.measured import Measured, measure_policy
from cauc_ray.reporting.mistakes import StageMistakes, find_mistakes
from cauc_ray.reporting.provenance import Origin, trace_origin
from cauc_ray.reporting.timing import RunTiming, read_timing
from cauc_ray.reporting.verdict import Verdict, judge


@dataclass(frozen=True, slots=True)
class Content:
    """What a report of a folder says.

    guards: of the policy's file, and of its costs on test.   timing: None where no run of the policy is there.
    """

    folder: Path
    found: Found
    measured: Measured
    verdict: Verdict
    guards: tuple[Guard, ...]
    curves: MethodCurves
    budgets: Budgets | None
    calibration: tuple[ModelCalibration, ...]
    mistakes: tuple[StageMistakes, ...]
    timing: RunTiming | None
    origin: Origin


def gather(folder: Path, found: Found, split: str) -> Content:
    """Measure and read all that a report says. Raises CaucError where the table or a file does not serve."""
    measured = measure_policy(found, split)
    found = with_own_curves(found, measured)
    curves = trace_methods(found, measured)
    return Content(
        folder=folder,
        found=found,
        measured=measured,
        verdict=judge(measured, curves.singles),
        guards=(*found.policy.guards, *measured.evaluation.guards),
        curves=curves,
        budgets=find_budgets(measured),
        calibration=measure_calibration(measured),
        mistakes=find_mistakes(measured),
        timing=None if found.run is None else read_timing(found.run),
        origin=trace_origin(found, folder, split),
    )
