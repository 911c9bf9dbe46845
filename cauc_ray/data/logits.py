"""The logit table: models' logits on labelled examples, embeddings and texts of the same; hive-partitioned Parquet.

LOGITS/model=<name>/split=<split>/*.parquet with example_id, label, logits and optionally cost, and
LOGITS/pool.json with the models' costs and the kind of logits. Embeddings lie next to them, texts in other files.
Labels that became known later are in LOGITS/labels/*.parquet, for rows whose own label is null.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.model_rows import (
    ModelHead,
    ModelRows,
    joined_head,
    joined_labels,
    read_head,
    read_part,
    typed_column,
    unfit_row,
)
from cauc_ray.data.writing import LABELS, LOGGED, read_info
from cauc_ray.errors import CaucWarning, ConfigError, DataError, unknown_name
from cauc_ray.files.parquet import parquet_below, parquet_files, read_parquet
from cauc_ray.files.paths import AnyPath, hive_values, path_of
from cauc_ray.numbers.arrays import require_no_probabilities
from cauc_ray.numbers.chain import UNKNOWN_LABEL, UNNAMED_UNIT, ChainLogits, ChainPart, Costs
from cauc_ray.numbers.logits import LOGIT_KINDS, LogitKind, SumsToOne, stacked, widened
from cauc_ray.numbers.types import Bools, Floats, Ints

# LOGITS/failed/model=<name>/split=<split>/*.parquet: rows that a model could not answer, with reasons.
FAILED = "failed"
# The declared kind of a table's logits: one for all models, or by model.
LogitKinds: TypeAlias = str | Mapping[str, str] | None
# Costs of calls: one number for each model of a chain; "per-call" for each call's own cost where the table has them,
# else pool.json's; "per-model" for pool.json's; None for "per-call" if the table has any.
CallCosts: TypeAlias = Sequence[float] | Literal["per-call", "per-model"] | None


@dataclass(frozen=True, slots=True)
class ChainHeads:
    """A chain on a split without its logits.   known: the arguments of a Chain.   heads: each model's rows."""

    known: dict[str, Any]
    heads: tuple[ModelHead, ...]

    def __len__(self) -> int:
        return len(self.known["labels"])

    @property
    def labelled(self) -> Bools:
        """Return which examples have a label, bool (N,)."""
        known: Bools = self.known["labels"] != UNKNOWN_LABEL
        return known

    def of_rows(self, rows: Ints) -> ChainHeads:
        """Return the chain of some examples.   rows: int (n,), ascending."""
        ids = pa.array(self.known["example_ids"], pa.string())
        others = ids.filter(pa.array(np.isin(np.arange(len(self)), rows, invert=True)))
        own = {"labels": self.known["labels"][rows], "costs": self.known["costs"].of_rows(rows)}
        known = {**self.known, **own, "example_ids": tuple(ids.take(pa.array(rows)).to_pylist())}
        return ChainHeads(known, tuple(head.without(others) for head in self.heads))


_Rows = TypeVar("_Rows", bound=ModelHead)


class LogitTable:
    """A folder of logit tables, opened by its path.

    models: the names of the models with rows.   info: its pool.json, None without one.   kinds: of each model's logits:
    as given, else as declared in pool.json, else raw.
    """

    def __init__(
        self,
        path: str | AnyPath,
        logit_kind: LogitKinds = None,
        *,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
    ) -> None:
        """Open a table. Raises DataError if there is none or its pool.json is malformed.

        logit_kind: of all models or by model, takes precedence over pool.json.   undeclared: the kind of models for
        which neither declares one; by default raw.
        """
        self.path = path_of(path)
        if not self.path.is_dir():
            raise DataError(f"there is no logit table at {self.path}: it is not a folder")
        self.models = hive_values(self.path, "model")
        if not self.models:
            raise DataError(f"{self.path} is not a logit table: it has no folders model=<name>")
        self.info = read_info(self.path)
        declared = {model: self.info.kind(model) for model in self.models} if self.info else {}
        known = {model: kind for model, kind in declared.items() if kind is not None}
        self.kinds = model_kinds(str(self.path), self.models, logit_kind, {**undeclared, **known})

    @property
    def declared_costs(self) -> dict[str, float]:
        """Return the cost of each model's call from pool.json, empty without one."""
        return self.info.costs if self.info else {}

    def read_failed(self, model: str, split: str) -> pa.Array:
        """Return the ids of a split's rows that a model could not answer, str (n,)."""
        folder = self.path / FAILED / f"model={model}" / f"split={split}"
        if not folder.is_dir():
            return pa.array([], pa.string())
        ids = [typed_column(read_parquet(f), "example_id", pa.string(), str(f)) for f in parquet_files(folder)]
        return pa.chunked_array(ids, pa.string()).combine_chunks()

    def splits(self, model: str) -> list[str]:
        """Return the names of a model's splits."""
        return hive_values(self._folder(model), "split")

    def read_model(self, model: str, split: str, *, as_stored: bool = False) -> ModelRows:
        """Read one model's rows of one split.

        as_stored: leave masks and probabilities unchanged, as needed for a model that answers from the table.
        Raises DataError, naming file, model and example, for NaN or +inf, a duplicate id, a label outside the
        row's options, a row without options, an empty split, a wrong column type or an unreadable file; and for
        probabilities that are not declared, or declared ones that are none.
        """
        return self._read_rows(model, split, self._files(model, split), None if as_stored else self.kinds[model])

    def _read_rows(self, model: str, split: str, files: Sequence[AnyPath], kind: LogitKind | None) -> ModelRows:
        where = f"{self.path}: model {model!r}, split {split!r}"
        parts = [read_part(file, model, kind) for file in files]
        sums = sum((part.sums for part in parts), SumsToOne())
        require_no_probabilities(where, sums)
        head = joined_head(parts, where)
        logits = parts[0].logits if len(parts) == 1 else stacked([part.logits for part in parts])
        in_order = bool((np.diff(head.positions) == 1).all())
        n_options = np.concatenate([part.n_options for part in parts])[head.positions]
        return head.with_logits(logits if in_order else logits[head.positions], n_options, sums)

    def read_head(self, model: str, split: str) -> ModelHead:
        """Read one model's rows of one split without logits. Raises DataError as read_model does."""
        return self._read_head(model, split, self._files(model, split))

    def _read_head(self, model: str, split: str, files: Sequence[AnyPath]) -> ModelHead:
        return read_head(files, model, f"{self.path}: model {model!r}, split {split!r}")

    def _files_of_all(self, models: Sequence[str], split: str) -> list[list[AnyPath]]:
        """Return each model's files of a split, but those of a service's log that are not there for all models.

        A service writes the files of one flush one after another, under the same name; while it does, or where it died
        over that, or files are being deleted, some models have a file that others lack. That is warned of.
        """
        files = [self._files(model, split) for model in models]
        logged = [{file.name for file in own if file.name.startswith(LOGGED)} for own in files]
        partial = set[str]().union(*logged) - logged[0].intersection(*logged)
        if partial:
            warnings.warn(
                f"{self.path}, split {split!r}: {len(partial):,} files of a service's log are left out: not all of "
                f"{', '.join(models)} have them",
                CaucWarning,
                stacklevel=5,
            )
        return [[file for file in own if file.name not in partial] for own in files]

    def _late_labels(self, example_ids: pa.Array, labels: Ints) -> Ints:
        """Return labels with those that the folder of labels has for examples without one, int32 (N,)."""
        folder = self.path / LABELS
        if (labels != UNKNOWN_LABEL).all() or not folder.is_dir():
            return labels
        columns = _read_column(parquet_below(folder), "label", pa.int32())
        ids, late = (column.combine_chunks() for column in columns)
        order = pc.array_sort_indices(ids)
        ids, late = ids.take(order), late.take(order).fill_null(UNKNOWN_LABEL)
        other = pc.and_(pc.equal(ids[1:], ids[:-1]), pc.not_equal(late[1:], late[:-1]))
        if pc.any(other).as_py():
            row = pc.index(other, True).as_py()
            raise DataError(
                f"{folder}: example {ids[row].as_py()!r} has label {late[row]} and label {late[row + 1]}; "
                "remove the wrong one"
            )
        at = pc.index_in(example_ids, value_set=ids)
        found = late.take(at).fill_null(UNKNOWN_LABEL).to_numpy(zero_copy_only=False)
        return np.where(labels == UNKNOWN_LABEL, found, labels).astype(np.int32)

    def _files(self, model: str, split: str) -> list[AnyPath]:
        splits = self.splits(model)
        if split not in splits:
            raise DataError(f"{self.path}: model {model!r}: {unknown_name('split', split, splits)}")
        return parquet_files(self._folder(model) / f"split={split}")

    def read_chain(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainLogits:
        """Read a chain of models on one split, joined on example_id.

        costs: of calls, for each model in the order of models or from the table; see CallCosts.
        Examples recorded as failed for some model of the chain are left out, with a CaucWarning that counts them.
        Raises DataError as read_model does, and if the models' ids, lengths or labels disagree or costs are unknown;
        ConfigError if the numbers of costs and models differ or a model is a duplicate.
        """
        known, tables = self._read_joined(
            models, split, lambda model, files: self._read_rows(model, split, files, self.kinds[model]), costs
        )
        width = max(t.logits.shape[1] for t in tables)
        logits = tuple(widened(t.logits, width) for t in tables)
        part = ChainPart(logits, known["labels"], np.arange(len(known["labels"])))
        gaps = any(np.isneginf(own).any() for own in logits)
        require_fit_rows(known, [unfit_row(models, [table.n_options for table in tables], part, gaps=gaps)])
        return ChainLogits(logits=logits, **known)

    def read_chain_heads(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainHeads:
        """Read a chain as read_chain does, without its logits. Raises as read_chain does."""
        known, heads = self._read_joined(
            models, split, lambda model, files: self._read_head(model, split, files), costs
        )
        return ChainHeads(known, tuple(heads))

    def _read_joined(
        self, models: Sequence[str], split: str, read: Callable[[str, Sequence[AnyPath]], _Rows], costs: CallCosts
    ) -> tuple[dict[str, Any], list[_Rows]]:
        """Return the arguments of a Chain except its logits, and each model's rows of the common examples."""
        if not models:
            raise ConfigError("a chain needs at least one model")
        twice = next((m for m in models if list(models).count(m) > 1), None)
        if twice is not None:
            raise ConfigError(f"model {twice!r} is a duplicate in the chain")
        if costs is not None and not isinstance(costs, str) and len(costs) != len(models):
            raise ConfigError(f"{len(costs)} costs for {len(models)} models: give one cost for each model, in order")
        tables = self._answered_by_all(models, split, read)
        source = f"{self.path}, split {split!r}"
        labels = self._late_labels(tables[0].example_ids, joined_labels(source, models, tables))
        own = [table.costs for table in tables]
        if costs is None:
            costs = "per-call" if any(each is not None for each in own) else "per-model"
        return {
            "models": tuple(models),
            "example_ids": tuple(tables[0].example_ids.to_pylist()),
            "labels": labels,
            "source": source,
            "costs": self._costs(models, costs, own, len(labels)),
            "per_call_costs": costs == "per-call",
            "logit_kind": tuple(self.kinds[model] for model in models),
        }, tables

    def _answered_by_all(
        self, models: Sequence[str], split: str, read: Callable[[str, Sequence[AnyPath]], _Rows]
    ) -> list[_Rows]:
        """Read each model's rows without the examples on which another model failed."""
        files = self._files_of_all(models, split)
        tables = [read(model, own) for model, own in zip(models, files, strict=True)]
        failed = pa.chunked_array([self.read_failed(model, split) for model in models], pa.string()).unique()
        if not len(failed):
            return tables
        kept = [table.without(failed) for table in tables]
        n_lost = max(len(t.example_ids) - len(k.example_ids) for t, k in zip(tables, kept, strict=True))
        if not len(kept[0].example_ids):
            raise DataError(f"{self.path}, split {split!r}: no example was answered by all of {', '.join(models)}")
        if n_lost:
            warnings.warn(
                f"{self.path}, split {split!r}: {len(failed):,} examples are left out because some model of the chain "
                "failed on them (see failed/)",
                CaucWarning,
                stacklevel=4,
            )
        return kept

    def _costs(self, models: Sequence[str], costs: CallCosts, own: Sequence[Floats | None], n: int) -> Costs:
        """Return the costs of n examples' calls.   own: of each model's calls, if its table has them."""
        unit = self.info.cost_unit if self.info else UNNAMED_UNIT
        if not isinstance(costs, str):
            return Costs(unit, np.array(costs, dtype=np.float64))
        if self.info is None:
            raise DataError(
                f"{self.path} has no pool.json with the cost of each model's call; "
                "give --costs, one number for each model of --models"
            )
        columns: list[Floats] = []
        for model, calls in zip(models, own, strict=True):
            if calls is not None and costs == "per-call":
                columns.append(calls)
            elif model in self.info.costs:
                columns.append(np.array(self.info.costs[model]))
            else:
                raise DataError(f"{self.path / 'pool.json'} has no cost for model {model!r}; add it or give --costs")
        if costs == "per-model":
            return Costs(unit, np.array(columns))
        return Costs(unit, np.stack([np.broadcast_to(column, n) for column in columns], axis=1))

    def _folder(self, model: str) -> AnyPath:
        if model not in self.models:
            raise ConfigError(f"{self.path}: {unknown_name('model', model, self.models)}")
        return self.path / f"model={model}"


def model_kinds(
    where: str, models: Sequence[str], given: LogitKinds, declared: Mapping[str, LogitKind]
) -> dict[str, LogitKind]:
    """Return the kind of each model's logits: as given, as declared, else raw.

    Raises ConfigError for an unknown model or kind.
    """
    kinds = dict.fromkeys(models, given) if isinstance(given, str) else dict(given or {})
    for model, kind in kinds.items():
        if model not in models:
            raise ConfigError(f"{where}: {unknown_name('model', model, models)}")
        if kind not in LOGIT_KINDS:
            raise ConfigError(unknown_name("logit kind", kind, LOGIT_KINDS))
    return {model: cast("LogitKind", kinds.get(model) or declared.get(model, "raw")) for model in models}


def require_fit_rows(known: Mapping[str, Any], unfit: Iterable[tuple[int, str] | None]) -> None:
    """Raise DataError for the first row that cannot be used.   known: of the chain.   unfit: results of unfit_row."""
    row = min((each for each in unfit if each is not None), default=None)
    if row is not None:
        raise DataError(f"{known['source']}: example {known['example_ids'][row[0]]!r} {row[1]}")


def encoders(logits: AnyPath) -> list[str]:
    """Return the names of the encoders with embeddings in a logit table."""
    return hive_values(logits, "embedding")


def read_embeddings(logits: AnyPath, encoder: str, split: str, example_ids: Sequence[str]) -> Floats:
    """Return the embeddings of examples of a split, float32 (N, d), in the order of their ids.

    Raises ConfigError for an encoder that the table does not have; DataError, naming the encoder and the example,
    if one is missing, duplicate, of another length than the others, or not finite.
    """
    ids, lists = _embeddings(logits, encoder, split)
    where = f"{logits}: encoder {encoder!r}, split {split!r}"
    vectors = lists.take(_positions(ids, example_ids, where)).combine_chunks()
    lengths = pc.list_value_length(vectors).fill_null(0).to_numpy(zero_copy_only=False)
    other = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
    if len(other):
        odd = int(other[0])
        raise DataError(
            f"{where}: example {example_ids[odd]!r} has {lengths[odd]} numbers, {example_ids[0]!r} {lengths[0]}"
        )
    values: Floats = vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(vectors), lengths[0])
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise DataError(f"{where}: the embedding of example {example_ids[bad[0]]!r} is not finite")
    return values


def embedding_ids(logits: AnyPath, encoder: str, split: str) -> list[str]:
    """Return the ids of all examples of a split that have an embedding. Raises as read_embeddings does."""
    ids: list[str] = _embeddings(logits, encoder, split)[0].to_pylist()
    return ids


def _embeddings(logits: AnyPath, encoder: str, split: str) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    known = encoders(logits)
    if encoder not in known:
        remedy = "compute embeddings with cauc collect --embedding"
        raise ConfigError(f"{logits}: {unknown_name('encoder', encoder, known)}; {remedy}")
    folder = logits / f"embedding={encoder}" / f"split={split}"
    if not folder.is_dir():
        where = f"{logits}: encoder {encoder!r}, split {split!r}"
        raise DataError(f"{where}: there is no such split; collect the encoder's embeddings of it")
    return _read_column(parquet_files(folder), "embedding", pa.large_list(pa.float32()))


class Texts:
    """The texts of queries by example_id, from a Parquet file or folder."""

    def __init__(self, path: str | AnyPath, column: str) -> None:
        """Read them. Raises DataError if the file, its column example_id or its column of texts is missing."""
        self._where = f"{path}, column {column!r}"
        self._ids, self._texts = _read_column(parquet_files(path_of(path)), column, pa.string())

    def of(self, example_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of examples. Raises DataError naming one without a text, or with several."""
        found = self._texts.take(_positions(self._ids, example_ids, self._where))
        if found.null_count:
            example = example_ids[pc.index(found.is_null(), True).as_py()]
            raise DataError(f"{self._where}: example {example!r} has no text")
        return tuple(found.to_pylist())


def _read_column(files: Iterable[AnyPath], name: str, kind: pa.DataType) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the ids and one column of files. Raises DataError if a column is missing or has another type."""
    ids, values = [], []
    for file in files:
        table = read_parquet(file)
        ids.append(typed_column(table, "example_id", pa.string(), str(file)))
        values.append(typed_column(table, name, kind, str(file)))
    return pa.chunked_array(ids, pa.string()), pa.chunked_array(values, kind)


def _positions(ids: pa.ChunkedArray, wanted: Sequence[str], where: str) -> pa.Array:
    """Return the positions of the wanted ids. Raises DataError naming one that is missing or a duplicate."""
    asked = pa.array(wanted, pa.string())
    positions = pc.index_in(asked, value_set=ids)
    if positions.null_count:
        example = wanted[pc.index(positions.is_null(), True).as_py()]
        raise DataError(f"{where}: example {example!r} is missing ({positions.null_count:,} in all)")
    rows = ids.filter(pc.is_in(ids, value_set=asked))
    if len(rows) > len(asked):
        counts = pc.value_counts(rows.combine_chunks())
        double = next(count["values"].as_py() for count in counts if count["counts"].as_py() > 1)
        raise DataError(f"{where}: example {double!r} is a duplicate")
    return positions
