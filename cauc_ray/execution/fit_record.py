"""Fits that are kept in a file as they are made, so that a calibration which was ended goes on after them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from cauc_ray.data.files import read_json, write_json
from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import Fit
from cauc_ray.numbers.offsets import OffsetFit
from cauc_ray.numbers.temperature import FitStatus, PairFit, TemperatureFit
from cauc_ray.policies.weighed import Shifted, Weighed


class FitRecord:
    """A JSON file of fits by what was fitted.   of: what the data are; a record of other data is begun anew."""

    def __init__(self, path: Path, of: dict[str, Any]) -> None:
        self._path, self._of = path, of
        self._fits: dict[str, dict[str, Any]] = {}
        if path.is_file():
            content = read_json(path)
            if not isinstance(content, dict) or not isinstance(content.get("fits"), dict):
                raise DataError(f"{path} is no record of fits; remove it")
            if content.get("of") == json.loads(json.dumps(of)):
                self._fits = content["fits"]

    def remembered(self, what: Weighed | Shifted, compute: Callable[[], Fit]) -> Fit:
        """Return a fit that is on record, else compute it and put it there."""
        key = json.dumps(asdict(what), sort_keys=True)
        if key not in self._fits:
            fit = compute()
            # A file has no NaN, which the standard error of a clamped weight is.
            self._fits[key] = {name: None if value != value else value for name, value in asdict(fit).items()}
            write_json(self._path, {"of": self._of, "fits": self._fits})
            return fit
        return cast(Fit, _fit_of(what, self._fits[key]))


def _fit_of(what: Weighed | Shifted, numbers: dict[str, Any]) -> TemperatureFit | OffsetFit | PairFit:
    values: dict[str, Any] = {name: float("nan") if value is None else value for name, value in numbers.items()}
    values |= {name: FitStatus(value) for name, value in values.items() if name.endswith("status")}
    if isinstance(what, Shifted):
        return OffsetFit(**values | {"offsets": tuple(values["offsets"])})
    return PairFit(**values) if what.before else TemperatureFit(**values)
