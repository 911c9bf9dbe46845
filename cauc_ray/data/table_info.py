"""LOGITS/pool.json: the costs of a logit table's models and the kind of their logits."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cauc_ray.files.documents import read_model, write_json
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.logits import LogitKind, kind_of

# pool.json's value if no kind was declared.
UNDECLARED = "unknown"


class PoolModel(BaseModel):
    """One model of a logit table: its name, the cost of a call and the origin of its logits."""

    model_config = ConfigDict(extra="forbid")
    name: str
    cost: float = Field(ge=0, allow_inf_nan=False)
    source: str | None = None
    logit_kind: LogitKind | None = None
    dtype: str | None = None


class TableInfo(BaseModel):
    """LOGITS/pool.json.

    logit_kind: of models without a kind of their own.   labels: names of the options in order.
    """

    model_config = ConfigDict(extra="forbid")
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
        own = next((one for one in self.models if one.name == model), None)
        if own is not None and own.logit_kind is not None:
            return own.logit_kind
        if self.logit_kind == UNDECLARED:
            return None
        # If models differed, earlier versions wrote each model's kind at the end of its source.
        source = own.source or "" if own is not None else ""
        return kind_of(self.logit_kind) or kind_of(source.rpartition("; ")[2])


def read_info(table: str | AnyPath) -> TableInfo | None:
    """Return a table's pool.json, None without one. Raises DataError if it is malformed."""
    path = path_of(table) / "pool.json"
    return read_model(path, TableInfo, strict=True) if path.is_file() else None


def write_info(table: str | AnyPath, info: TableInfo) -> None:
    """Write a table's pool.json."""
    write_json(path_of(table) / "pool.json", info.model_dump(exclude_none=True))
