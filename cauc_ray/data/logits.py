"""The logit table: every model's logits on labelled examples, hive-partitioned Parquet.

LOGITS/model=<name>/split=<split>/*.parquet with example_id, label, logits and optionally cost, and
LOGITS/pool.json with the models' costs and the kind of logits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cauc_ray.data.files import parquet_files, read_json, read_parquet, write_json, write_parquet
from cauc_ray.data.heads import ModelHead, joined_head, joined_labels, others, read_head, require_same
from cauc_ray.data.logit_part import read_part, typed_column
from cauc_ray.errors import CaucWarning, ConfigError, DataError, explain, unknown_name
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.types import Floats, Ints

# LOGITS/failed/model=<name>/split=<split>/*.parquet: rows that a model could not answer, and why.
FAILED = "failed"


class PoolModel(BaseModel):
    """One model of a logit table: its name, the cost of a call and where its logits come from."""

    model_config = ConfigDict(extra="forbid")
    name: str
    cost: float = Field(ge=0, allow_inf_nan=False)
    source: str | None = None


class TableInfo(BaseModel):
    """LOGITS/pool.json."""

    model_config = ConfigDict(extra="forbid")
    cost_unit: str
    logit_kind: str = "unknown"
    note: str | None = None
    models: list[PoolModel]

    @model_validator(mode="after")
    def _distinct(self) -> TableInfo:
        names = [model.name for model in self.models]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"model {name!r} stands twice")
        return self


@dataclass(frozen=True, slots=True)
class ModelTable:
    """One model's rows of one split, in order of example_id.

    example_ids: str (N,).   labels: int32 (N,), UNKNOWN_LABEL where there is none.   logits: float32 (N, K),
    -inf beyond a row's options.   n_options: int (N,).   costs: float64 (N,) or None.
    """

    example_ids: pa.Array
    labels: Ints
    logits: Floats
    n_options: Ints
    costs: Floats | None

    def without(self, example_ids: pa.Array) -> ModelTable:
        """Return the other rows."""
        kept = others(self.example_ids, example_ids)
        return ModelTable(
            example_ids=self.example_ids.filter(pa.array(kept)),
            labels=self.labels[kept],
            logits=self.logits[kept],
            n_options=self.n_options[kept],
            costs=None if self.costs is None else self.costs[kept],
        )


@dataclass(frozen=True, slots=True)
class ChainHeads:
    """A chain on a split without its logits.   known: the arguments of a Chain.   heads: of each model."""

    known: dict[str, Any]
    heads: tuple[ModelHead, ...]

    def __len__(self) -> int:
        return len(self.known["labels"])


_Rows = TypeVar("_Rows", ModelTable, ModelHead)


class LogitTable:
    """A folder of logit tables, opened by its path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise DataError(f"there is no logit table at {self.path}: not a folder")
        self.models = sorted(p.name.partition("=")[2] for p in self.path.glob("model=*") if p.is_dir())
        if not self.models:
            raise DataError(f"{self.path} is no logit table: it has no folders model=<name>")

    def info(self) -> TableInfo | None:
        """Return what pool.json says, or None where there is none. Raises DataError if it is malformed."""
        path = self.path / "pool.json"
        if not path.is_file():
            return None
        try:
            return TableInfo.model_validate(read_json(path), strict=True)
        except ValidationError as error:
            raise DataError(f"{path}: {explain(error)}") from error

    def read_failed(self, model: str, split: str) -> pa.Array:
        """Return the ids of the rows of a split that a model could not answer, str (n,)."""
        folder = self.path / FAILED / f"model={model}" / f"split={split}"
        if not folder.is_dir():
            return pa.array([], pa.string())
        ids = [typed_column(read_parquet(f), "example_id", pa.string(), str(f)) for f in parquet_files(folder)]
        return pa.chunked_array(ids, pa.string()).combine_chunks()

    def splits(self, model: str) -> list[str]:
        """Return the names of a model's splits."""
        return sorted(p.name.partition("=")[2] for p in self._folder(model).glob("split=*") if p.is_dir())

    def read_model(self, model: str, split: str) -> ModelTable:
        """Read one model's rows of one split.

        Raises DataError, naming file, model and example, for NaN or +inf, a duplicate id, a label outside the
        row's options, a row without options, an empty split, a wrong column type or an unreadable file.
        """
        where = f"{self.path}: model {model!r}, split {split!r}"
        parts = [read_part(file, model) for file in self._files(model, split)]
        head = joined_head([part.head for part in parts], where)
        width = max(part.logits.shape[1] for part in parts)
        logits = parts[0].logits if len(parts) == 1 else np.concatenate([_padded(p.logits, width) for p in parts])
        in_order = bool((np.diff(head.places) == 1).all())
        return ModelTable(
            example_ids=head.example_ids,
            labels=head.labels,
            logits=logits if in_order else logits[head.places],
            n_options=np.concatenate([part.n_options for part in parts])[head.places],
            costs=head.costs,
        )

    def read_head(self, model: str, split: str) -> ModelHead:
        """Read one model's rows of one split but the logits. Raises DataError as read_model does."""
        return read_head(self._files(model, split), model, f"{self.path}: model {model!r}, split {split!r}")

    def _files(self, model: str, split: str) -> list[Path]:
        splits = self.splits(model)
        if split not in splits:
            raise DataError(f"{self.path}: model {model!r}: {unknown_name('split', split, splits)}")
        return parquet_files(self._folder(model) / f"split={split}")

    def read_chain(
        self,
        models: Sequence[str],
        split: str,
        *,
        costs: Sequence[float] | None = None,
        per_call_costs: bool | None = None,
    ) -> ChainLogits:
        """Read a chain of models on one split, joined on example_id.

        costs: of one call of each model, in the order of models; without them the calls' own where a model's
        table has a column cost, and pool.json's for the other models. per_call_costs says whether the calls'
        own count, as a policy does that was fitted with them; None takes them where there are any.
        Examples on record as failed for some model of the chain are left out, with a CaucWarning that counts them.
        Raises DataError as read_model does, and when the models' ids, lengths or labels disagree or no
        costs are to be had; ConfigError when costs and models differ in number or a model stands twice.
        """
        self.require_chain(models, costs)
        tables = self._answered_by_all(models, split, self.read_model)
        first = tables[0]
        source = f"{self.path}, split {split!r}"
        labels = joined_labels(source, models, tables)
        for model, table in zip(models[1:], tables[1:], strict=True):
            options = (first.n_options, table.n_options)
            require_same(source, (models[0], model), first.example_ids, options, "options")
        width = max(t.logits.shape[1] for t in tables)
        logits = tuple(_padded(t.logits, width) for t in tables)
        ids = tuple(first.example_ids.to_pylist())
        require_common_option(source, ids, logits)
        own = [table.costs for table in tables]
        return ChainLogits(
            models=tuple(models),
            logits=logits,
            example_ids=ids,
            labels=labels,
            source=source,
            **self._priced(models, costs, own, per_call_costs, len(labels)),
        )

    def read_chain_heads(
        self,
        models: Sequence[str],
        split: str,
        *,
        costs: Sequence[float] | None = None,
        per_call_costs: bool | None = None,
    ) -> ChainHeads:
        """Read a chain as read_chain does, but for the logits, which stay where they are. Raises as it does."""
        self.require_chain(models, costs)
        heads = self._answered_by_all(models, split, self.read_head)
        source = f"{self.path}, split {split!r}"
        labels = joined_labels(source, models, heads)
        own = [head.costs for head in heads]
        known = {
            "models": tuple(models),
            "example_ids": tuple(heads[0].example_ids.to_pylist()),
            "labels": labels,
            "source": source,
            **self._priced(models, costs, own, per_call_costs, len(labels)),
        }
        return ChainHeads(known, tuple(heads))

    def require_chain(self, models: Sequence[str], costs: Sequence[float] | None) -> None:
        """Raise ConfigError unless models are a chain of this table, with as many costs if there are any."""
        if not models:
            raise ConfigError("a chain needs at least one model")
        twice = next((m for m in models if list(models).count(m) > 1), None)
        if twice is not None:
            raise ConfigError(f"model {twice!r} stands twice in the chain")
        if costs is not None and len(costs) != len(models):
            raise ConfigError(f"{len(costs)} costs for {len(models)} models: give one for each, in their order")
        for model in models:
            self._folder(model)

    def _answered_by_all(self, models: Sequence[str], split: str, read: Callable[[str, str], _Rows]) -> list[_Rows]:
        """Read each model's rows without the examples that another one failed on."""
        tables = [read(model, split) for model in models]
        failed = pa.chunked_array([self.read_failed(model, split) for model in models], pa.string()).unique()
        if not len(failed):
            return tables
        kept = [table.without(failed) for table in tables]
        n_lost = max(len(t.example_ids) - len(k.example_ids) for t, k in zip(tables, kept, strict=True))
        if not len(kept[0].example_ids):
            raise DataError(f"{self.path}, split {split!r}: no example was answered by all of {', '.join(models)}")
        if n_lost:
            warnings.warn(
                f"{self.path}, split {split!r}: {len(failed):,} examples that some model of the chain failed on are "
                "left out (see failed/)",
                CaucWarning,
                stacklevel=4,
            )
        return kept

    def _priced(
        self,
        models: Sequence[str],
        given: Sequence[float] | None,
        own: Sequence[Floats | None],
        per_call: bool | None,
        n: int,
    ) -> dict[str, Any]:
        """Return what a chain says of its costs and of the kind of its logits."""
        info = self.info()
        if per_call is None:
            per_call = given is None and any(costs is not None for costs in own)
        return {
            "costs": self._costs(models, given, own if per_call else None, info, n),
            "per_call_costs": per_call,
            "logit_kind": info.logit_kind if info else "unknown",
        }

    def _costs(
        self,
        models: Sequence[str],
        given: Sequence[float] | None,
        own: Sequence[Floats | None] | None,
        info: TableInfo | None,
        n: int,
    ) -> Costs:
        """Return the given costs, or each call's own where a model's table has them and else pool.json's."""
        unit = info.cost_unit if info else "cost units"
        if given is not None:
            return Costs(unit, np.array(given, dtype=np.float64))
        if info is None:
            raise DataError(
                f"{self.path} has no pool.json that says what a call of each model costs; "
                "give --costs, one number for each of --models"
            )
        declared = {m.name: m.cost for m in info.models}
        columns: list[Floats] = []
        for place, model in enumerate(models):
            calls = own[place] if own is not None else None
            if calls is None and model not in declared:
                raise DataError(f"{self.path / 'pool.json'} has no cost for model {model!r}; add it or give --costs")
            columns.append(np.array(declared[model]) if calls is None else calls)
        if own is None:
            return Costs(unit, np.array(columns, dtype=np.float64))
        return Costs(unit, np.stack([np.broadcast_to(column, n) for column in columns], axis=1))

    def _folder(self, model: str) -> Path:
        if model not in self.models:
            raise ConfigError(f"{self.path}: {unknown_name('model', model, self.models)}")
        return self.path / f"model={model}"


def write_logits(
    path: str | Path,
    model: str,
    split: str,
    *,
    example_ids: Iterable[str],
    labels: Ints | None,
    logits: Floats | Sequence[Floats],
    costs: Floats | None = None,
) -> Path:
    """Write one model's rows of one split as LOGITS/model=<model>/split=<split>/part-0.parquet.

    labels: int (N,), UNKNOWN_LABEL where there is none.   logits: float (N, K), or N vectors of any lengths.
    Returns the file. It replaces one of that name, whole or not at all.
    """
    for name in (model, split):
        if not name or "/" in name or "=" in name:
            raise ConfigError(f"{name!r} cannot name a folder of a logit table: it is empty or holds '/' or '='")
    table = logit_columns(example_ids, labels, logits, costs)
    folder = Path(path) / f"model={model}" / f"split={split}"
    folder.mkdir(parents=True, exist_ok=True)
    write_parquet(folder / "part-0.parquet", table)
    return folder / "part-0.parquet"


def logit_columns(
    example_ids: Iterable[str], labels: Ints | None, logits: Floats | Sequence[Floats], costs: Floats | None
) -> pa.Table:
    """Return rows of a logit table; arguments as write_logits has them."""
    rows = [np.asarray(row, dtype=np.float32) for row in logits]
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int32)
    values = np.concatenate(rows) if rows else np.zeros(0, np.float32)
    ids = pa.array(example_ids, pa.string())
    known = np.full(len(ids), UNKNOWN_LABEL) if labels is None else np.asarray(labels)
    columns = {
        "example_id": ids,
        "label": pa.array(known.astype(np.int32), mask=known == UNKNOWN_LABEL),
        "logits": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
    }
    if costs is not None:
        columns["cost"] = pa.array(np.asarray(costs, dtype=np.float32))
    return pa.table(columns)


def write_info(path: str | Path, info: TableInfo) -> None:
    """Write LOGITS/pool.json."""
    write_json(Path(path) / "pool.json", info.model_dump(exclude_none=True))


def _padded(logits: Floats, width: int) -> Floats:
    if logits.shape[1] == width:
        return logits
    padded = np.full((len(logits), width), -np.inf, dtype=logits.dtype)
    padded[:, : logits.shape[1]] = logits
    return padded


def require_common_option(source: str, ids: Sequence[str], logits: Sequence[Floats]) -> None:
    """Refuse an example that leaves no option with a finite logit in every model: nothing could be fused."""
    if not any(np.isneginf(z).any() for z in logits):
        return
    shared = np.isfinite(logits[0])
    for z in logits[1:]:
        shared &= np.isfinite(z)
    none = np.flatnonzero(~shared.any(axis=1))
    if len(none):
        raise DataError(f"{source}: example {ids[int(none[0])]!r} has no option that all models leave possible")
