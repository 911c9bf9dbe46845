"""Writing logit tables, and LOGITS/pool.json: the costs of a table's models and the kind of their logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import Settings, make_folder, read_model, write_json
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.chain import UNKNOWN_LABEL, UNNAMED_UNIT
from cauc_ray.numbers.logits import LogitKind, kind_of
from cauc_ray.numbers.types import Floats, Ints

# pool.json's value if no kind was declared.
UNDECLARED = "unknown"

# LOGITS/labels/*.parquet: example_id and label of examples whose label became known after their logits were written.
LABELS = "labels"
# How the names of a service's files begin. Those of one flush have one name, and the same rows, for each model.
LOGGED = "log-"

# The limit of one Arrow list array with int32 offsets.
MOST_VALUES = 2**31 - 1


class PoolModel(Settings):
    """One model of a table: its name, the cost of a call, the origin of its logits, how it was asked.

    A model that answers in words has a rule by which its answers are the same, and the names of its confidences.
    """

    name: str
    cost: float = Field(ge=0, allow_inf_nan=False)
    source: str | None = None
    logit_kind: LogitKind | None = None
    dtype: str | None = None
    noise: float | None = None
    prompt: str | None = None
    rule: str | None = None
    confidences: list[str] | None = None


class TableInfo(Settings):
    """LOGITS/pool.json.

    Attributes:
        logit_kind: Of models without a kind of their own.
        labels: Names of the options in order.
    """

    cost_unit: str
    logit_kind: str = UNDECLARED
    note: str | None = None
    labels: list[str] | None = None
    models: list[PoolModel]

    @model_validator(mode="after")
    def _distinct(self) -> TableInfo:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"duplicate model {name!r}")
        return self

    @property
    def costs(self) -> dict[str, float]:
        """Return the cost of a call of each model, by name."""
        return {model.name: model.cost for model in self.models}

    def kind(self, model: str) -> LogitKind | None:
        """Return the declared kind of a model's logits, None if none was declared."""
        declared = next((entry for entry in self.models if entry.name == model), None)
        if declared is not None and declared.logit_kind is not None:
            return declared.logit_kind
        return None if self.logit_kind == UNDECLARED else kind_of(self.logit_kind)


def read_info(table: str | AnyPath) -> TableInfo | None:
    """Return a table's pool.json, None without one. Raises DataError if it is malformed."""
    path = path_of(table) / "pool.json"
    return read_model(path, TableInfo, strict=True) if path.is_file() else None


def write_info(table: str | AnyPath, info: TableInfo) -> None:
    """Write a table's pool.json."""
    write_json(path_of(table) / "pool.json", info.model_dump(exclude_none=True))


def write_logits(
    path: str | AnyPath,
    model: str,
    split: str,
    example_ids: Iterable[str],
    logits: Floats | Sequence[Floats],
    labels: Ints | None = None,
    costs: Floats | None = None,
    *,
    cost: float | None = None,
    cost_unit: str | None = None,
    logit_kind: LogitKind | None = None,
) -> AnyPath:
    """Write one model's rows of one split as LOGITS/model=<model>/split=<split>/part-0.parquet.

    Args:
        path: The table: a local folder or a URI. It is created if it does not exist.
        model: The model's name.
        split: The split's name, such as "calibration", "validation" or "test".
        example_ids: (N,), unique in the split; models are joined on them.
        logits: float (N, K), or N vectors of any lengths; -inf where a row has no such option.
        labels: int (N,), the index of the right option, -1 if unknown; None if no label is known.
        costs: float (N,), of each call, if calls have different costs.
        cost: The cost of one call of this model; recorded with cost_unit and logit_kind in LOGITS/pool.json.
        cost_unit: Such as "GFLOPs"; the same for all models of a table.
        logit_kind: "raw", "log-probabilities", "probabilities" or "surrogate".

    Returns:
        The file. A file of that name is replaced atomically.

    Raises:
        ConfigError: For a name that cannot be a folder's, arrays of different lengths, another unit than the table's,
            or a kind or unit without a cost.
    """
    require_folder_names(model, split)
    if cost is None and (cost_unit is not None or logit_kind is not None):
        raise ConfigError(f"model {model!r}: cost_unit and logit_kind need a cost; give cost=")
    table = logit_columns(example_ids, labels, logits, costs)
    if cost is not None:
        record_model(path_of(path), PoolModel(name=model, cost=cost, logit_kind=logit_kind), cost_unit)
    folder = path_of(path) / f"model={model}" / f"split={split}"
    make_folder(folder)
    write_parquet(folder / "part-0.parquet", table)
    return folder / "part-0.parquet"


def require_folder_names(*names: str) -> None:
    """Raise ConfigError for a name of a model or a split that cannot be a folder's."""
    for name in names:
        if not name or "/" in name or "=" in name:
            raise ConfigError(f"{name!r} cannot be a folder's name in a table: empty, or with '/' or '='")


def record_model(table: AnyPath, model: PoolModel, unit: str | None) -> None:
    """Declare a model in pool.json, replacing one of that name."""
    info = read_info(table) or TableInfo(cost_unit=unit or UNNAMED_UNIT, models=[])
    if unit is not None and unit != info.cost_unit:
        raise ConfigError(f"{table} has costs in {info.cost_unit}, but those of model {model.name!r} are in {unit}")
    models = [entry for entry in info.models if entry.name != model.name]
    make_folder(table)
    write_info(table, info.model_copy(update={"models": [*models, model]}))


def logit_columns(
    example_ids: Iterable[str], labels: Ints | None, logits: Floats | Sequence[Floats], costs: Floats | None
) -> pa.Table:
    """Return rows of a logit table; arguments and errors as for write_logits."""
    ids, rows = pa.array(example_ids, pa.string()), list(logits)
    numbers = np.full(len(ids), UNKNOWN_LABEL) if labels is None else np.asarray(labels)
    for name, n in (
        ("labels", len(numbers)),
        ("rows of logits", len(rows)),
        ("costs", len(ids if costs is None else costs)),
    ):
        if n != len(ids):
            raise ConfigError(f"{len(ids)} example ids and {n} {name}; give one for each")
    columns = {
        "example_id": ids,
        "label": pa.array(numbers.astype(np.int32), mask=numbers == UNKNOWN_LABEL),
        "logits": float_lists(rows),
    }
    if costs is not None:
        columns["cost"] = pa.array(np.asarray(costs, dtype=np.float32))
    return pa.table(columns)


def float_lists(rows: Sequence[Floats]) -> pa.Array:
    """Return rows as list<float32>, or as large lists if there are more values than int32 offsets can address."""
    rows = [np.asarray(row, dtype=np.float32) for row in rows]
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.concatenate(rows) if rows else np.empty(0, np.float32)
    kind = pa.LargeListArray if len(values) > MOST_VALUES else pa.ListArray
    return kind.from_arrays(offsets if kind is pa.LargeListArray else offsets.astype(np.int32), values)
