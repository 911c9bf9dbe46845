"""What the paper's tasks measured, as files hold it: dataclasses as JSON and back, curves as Parquet."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel

from cauc_ray.comparison.comparing import Comparison
from cauc_ray.comparison.kept import Kept, Written
from cauc_ray.execution.tasks import Task
from cauc_ray.numbers.types import Ints
from cauc_ray.paper.measured import GrownChain, ModelReliability, PairMeasures
from cauc_ray.paper.plan import GAINS, RELIABILITY

_KINDS: Mapping[str, Any] = {
    "complementarity": PairMeasures,
    "growing-chain": list[GrownChain],
    RELIABILITY: dict[str, ModelReliability],
    GAINS: list[PairMeasures],
}


def kept_in(folder: Path) -> Kept:
    """Return the folder that keeps the values of the paper's tasks."""
    return Kept(folder, _write, _read)


def _write(value: Any) -> Written:
    if isinstance(value, Comparison):
        return Written({"about": value.about, "rows": value.rows, "not_run": value.not_run}, value.curves)
    return Written(plain(value))


def _read(task: Task, written: Written) -> Any:
    if task.part in _KINDS:
        return typed(_KINDS[task.part], written.content)
    return Comparison(curves=written.table, **written.content)


def plain(value: Any) -> Any:
    """Return dataclasses, arrays and containers of them as JSON has them; NaN is null."""
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def typed(kind: Any, value: Any) -> Any:
    """Return what plain() made of a value of a type as that again. Arrays are float64, or int64 where typed so."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: typed(hints[name], value[name]) for name in hints})  # type: ignore[operator]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate(value)
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else typed(next(each for each in of if each is not type(None)), value)
    if origin is np.ndarray:
        whole = kind == Ints
        return np.array(value, dtype=np.int64) if whole else np.array([typed(float, each) for each in value])
    if origin is dict:
        return {name: typed(of[1], each) for name, each in value.items()}
    if origin is list:
        return [typed(of[0], each) for each in value]
    if origin is tuple:
        return tuple(typed(of[0], each) for each in value)
    return math.nan if kind is float and value is None else value
