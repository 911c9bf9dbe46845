"""The logit table: models' logits on labelled examples, embeddings and texts of the same; hive-partitioned Parquet.

LOGITS/model=<name>/split=<split>/*.parquet with example_id, label, logits and optionally cost, and
LOGITS/pool.json with the models' costs and the kind of logits. Embeddings lie next to them, texts in other files.
Labels that became known later are in LOGITS/labels/*.parquet, for rows whose own label is null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import first_duplicate
from cauc_ray.data.model_rows import (
    ModelRows,
    joined_labels,
    read_rows,
    typed_column,
    unfit_row,
)
from cauc_ray.data.writing import LABELS, LOGGED, read_info
from cauc_ray.errors import ConfigError, DataError, OptionError, unknown_name, warn
from cauc_ray.files.parquet import parquet_below, parquet_files, read_parquet
from cauc_ray.files.paths import AnyPath, hive_values, path_of
from cauc_ray.numbers.answer_keys import AnswerFormat
from cauc_ray.numbers.chain import UNKNOWN_LABEL, UNNAMED_UNIT, ChainExamples, ChainLogits, ChainPart, Costs
from cauc_ray.numbers.logits import LOGIT_KINDS, LogitKind, widened
from cauc_ray.numbers.rows import in_columns
from cauc_ray.numbers.types import Floats, Ints

# LOGITS/failed/model=<name>/split=<split>/*.parquet: rows that a model could not answer, with reasons.
FAILED = "failed"
# The declared kind of a table's logits: one for all models, or by model.
LogitKinds: TypeAlias = str | Mapping[str, str] | None
# Costs of calls: one number for each model of a chain; "per-call" for each call's own cost where the table has them,
# else pool.json's; "per-model" for pool.json's; None for "per-call" if the table has any.
CallCosts: TypeAlias = Sequence[float] | Literal["per-call", "per-model"] | None


@dataclass(frozen=True, kw_only=True)
class ChainHeads(ChainExamples):
    """A chain on a split with its models' rows in a table.

    Attributes:
        heads: Each model's rows of the examples.
    """

    heads: tuple[ModelRows, ...]

    def of_rows(self, rows: Ints) -> ChainHeads:
        """Return the chain of some examples, by their ascending positions, int (n,)."""
        return self.with_rows(rows, heads=tuple(head.of_rows(rows) for head in self.heads))


class LogitTable:
    """A folder of logit tables, opened by its path.

    Attributes:
        models: The names of the models with rows.
        info: Its pool.json, None without one.
        kinds: Of each model's logits: as the caller declares, else as pool.json does, else raw.
    """

    def __init__(
        self,
        path: str | AnyPath,
        logit_kind: LogitKinds = None,
        *,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
    ) -> None:
        """Open a table.

        Args:
            path: Its folder.
            logit_kind: Of all models or by model; takes precedence over pool.json.
            undeclared: The kind of models for which neither declares one; by default raw.

        Raises:
            DataError: It is not a logit table, or its pool.json is malformed.
        """
        self.path = path_of(path)
        if not self.path.is_dir():
            raise DataError(f"no logit table at {self.path}: it is not a folder")
        self.models = hive_values(self.path, "model")
        if not self.models:
            raise DataError(f"{self.path} is not a logit table: it has no folders model=<name>")
        self.info = read_info(self.path)
        declared = {model: self.info.kind(model) for model in self.models} if self.info else {}
        kinds = {model: kind for model, kind in declared.items() if kind is not None}
        self.kinds = model_kinds(str(self.path), self.models, logit_kind, {**undeclared, **kinds})

    @property
    def declared_costs(self) -> dict[str, float]:
        """Return the cost of each model's call from pool.json, empty without one."""
        return self.info.costs if self.info else {}

    def read_failed(self, model: str, split: str) -> pa.Array:
        """Return the ids of a split's rows that a model could not answer, str (n,)."""
        files = parquet_below(self.path / FAILED / f"model={model}" / f"split={split}")
        return _read_column(files, "example_id", pa.string())[0].combine_chunks()

    def splits(self, model: str) -> list[str]:
        """Return the names of a model's splits."""
        return hive_values(self._folder(model), "split")

    def read_model(self, model: str, split: str, *, as_stored: bool = False, with_logits: bool = True) -> ModelRows:
        """Read one model's rows of one split.

        Args:
            model: The model.
            split: The split.
            as_stored: Leave masks and probabilities unchanged, as needed for a model that answers from the table.
            with_logits: Whether logits are read.

        Raises:
            DataError: A value is NaN or +inf, an id is a duplicate, a label is outside the row's options, a row has no
                options, the split is empty, a column has a wrong type, a file is unreadable, probabilities are not
                declared, or declared ones are not probabilities; names file, model and example.
        """
        kind = None if as_stored else self.kinds[model]
        files, source = self._files(model, split), self._source(model, split)
        return read_rows(files, model, source, kind, with_logits=with_logits)

    def _source(self, model: str, split: str) -> str:
        return f"{self.path}: model {model!r}, split {split!r}"

    def _files_of_all(self, models: Sequence[str], split: str) -> list[list[AnyPath]]:
        """Return each model's files of a split, but those of a service's log that are not there for all models.

        A service writes the files of one flush one after another, under the same name; while it does, or where it died
        over that, or files are being deleted, some models have a file that others lack. That is warned of.
        """
        files = [self._files(model, split) for model in models]
        logged = [{file.name for file in model_files if file.name.startswith(LOGGED)} for model_files in files]
        partial = set[str]().union(*logged) - logged[0].intersection(*logged)
        if partial:
            warn(
                f"{self.path}, split {split!r}: {len(partial):,} files of a service's log are left out: not all of "
                f"{', '.join(models)} have them"
            )
        return [[file for file in model_files if file.name not in partial] for model_files in files]

    def _late_labels(self, example_ids: pa.Array, labels: Ints) -> Ints:
        """Return labels with those that the folder of labels has for examples without one, int32 (N,)."""
        folder = self.path / LABELS
        if (labels != UNKNOWN_LABEL).all() or not folder.is_dir():
            return labels
        ids, late = _read_column(parquet_below(folder), "label", pa.int32())
        by_id = pa.table([ids, late], ["id", "label"]).group_by("id").aggregate([("label", "min"), ("label", "max")])
        contradicted = by_id.filter(pc.not_equal(by_id["label_min"], by_id["label_max"])).slice(0, 1).to_pylist()
        for row in contradicted:
            both = f"label {row['label_min']} and label {row['label_max']}"
            raise DataError(f"{folder}: example {row['id']!r} has {both}; remove the wrong one")
        positions = pc.index_in(example_ids, value_set=by_id["id"])
        late_labels = by_id["label_min"].take(positions).fill_null(UNKNOWN_LABEL).to_numpy()
        return np.where(labels == UNKNOWN_LABEL, late_labels, labels).astype(np.int32)

    def _files(self, model: str, split: str) -> list[AnyPath]:
        splits = self.splits(model)
        if split not in splits:
            raise DataError(f"{self.path}: model {model!r}: {unknown_name('split', split, splits)}")
        return parquet_files(self._folder(model) / f"split={split}")

    def read_chain(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainLogits:
        """Read a chain of models on one split, joined on example_id.

        Examples recorded as failed for some model of the chain are left out, with a CaucWarning that counts them.

        Args:
            models: The chain.
            split: The split.
            costs: Of calls, for each model in the order of models or from the table; see CallCosts.

        Raises:
            DataError: As read_model, or the models' ids, lengths or labels disagree, or costs are unknown.
            ConfigError: The numbers of costs and models differ, or a model is a duplicate.
        """
        chain = self.read_chain_heads(models, split, costs=costs, with_logits=True)
        width = max(head.logits.shape[1] for head in chain.heads)
        logits = tuple(in_columns(widened(head.logits, width)) for head in chain.heads)
        part = ChainPart(logits, chain.labels, np.arange(len(chain)))
        gaps = any(np.isneginf(model_logits).any() for model_logits in logits)
        require_fit_rows(chain, [unfit_row(models, [head.n_options for head in chain.heads], part, gaps=gaps)])
        return chain.held_as(ChainLogits, logits=logits)

    def read_chain_heads(
        self, models: Sequence[str], split: str, *, costs: CallCosts = None, with_logits: bool = False
    ) -> ChainHeads:
        """Read a chain as read_chain does, and return its models' rows, of which logits are read only if asked for."""
        self._require_chain(models, costs)
        files = self._files_of_all(models, split)
        rows = [
            read_rows(model_files, model, self._source(model, split), self.kinds[model], with_logits=with_logits)
            for model, model_files in zip(models, files, strict=True)
        ]
        failed = pa.chunked_array([self.read_failed(model, split) for model in models], pa.string()).unique()
        n_before = [len(model_rows.example_ids) for model_rows in rows]
        rows = [model_rows.without(failed) for model_rows in rows] if len(failed) else rows
        source = f"{self.path}, split {split!r}"
        if not len(rows[0].example_ids):
            raise DataError(f"{source}: no example was answered by all of {', '.join(models)}")
        if n_before != [len(model_rows.example_ids) for model_rows in rows]:
            warn(
                f"{source}: {len(failed):,} examples are left out because some model of the chain failed on them "
                "(see failed/)"
            )
        labels = self._late_labels(rows[0].example_ids, joined_labels(source, models, rows))
        reported = [model_rows.costs for model_rows in rows]
        if costs is None:
            costs = "per-model" if all(model_costs is None for model_costs in reported) else "per-call"
        return ChainHeads(
            models=tuple(models),
            example_ids=tuple(rows[0].example_ids.to_pylist()),
            labels=labels,
            source=source,
            costs=self._costs(models, costs, reported, len(labels)),
            per_call_costs=costs == "per-call",
            logit_kind=tuple(self.kinds[model] for model in models),
            heads=tuple(rows),
        )

    @property
    def answer_formats(self) -> dict[str, AnswerFormat]:
        """Return how models answer in words, by their names; none, since they score options."""
        return {}

    def _require_chain(self, models: Sequence[str], costs: CallCosts) -> None:
        if not models:
            raise ConfigError("a chain needs at least one model")
        twice = next((m for m in models if list(models).count(m) > 1), None)
        if twice is not None:
            raise ConfigError(f"model {twice!r} is a duplicate in the chain")
        if costs is not None and not isinstance(costs, str) and len(costs) != len(models):
            raise ConfigError(f"{len(costs)} costs for {len(models)} models: give one cost for each model, in order")

    def _costs(self, models: Sequence[str], costs: CallCosts, reported: Sequence[Floats | None], n: int) -> Costs:
        """Return the costs of n examples' calls, which each model's table may report."""
        unit = self.info.cost_unit if self.info else UNNAMED_UNIT
        if not isinstance(costs, str):
            return Costs(unit, np.array(costs, dtype=np.float64))
        if self.info is None:
            raise DataError(
                f"{self.path} has no pool.json with the cost of each model's call; "
                "give --costs, one number for each model of --models"
            )
        columns: list[Floats] = []
        for model, calls in zip(models, reported, strict=True):
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
    source: str, models: Sequence[str], kinds: LogitKinds, declared: Mapping[str, LogitKind]
) -> dict[str, LogitKind]:
    """Return the kind of each model's logits: of `kinds`, else as declared, else raw.

    Raises:
        ConfigError: A model or a kind is unknown.
    """
    kinds = dict.fromkeys(models, kinds) if isinstance(kinds, str) else dict(kinds or {})
    for model, kind in kinds.items():
        if model not in models:
            raise ConfigError(f"{source}: {unknown_name('model', model, models)}")
        if kind not in LOGIT_KINDS:
            raise OptionError(f"{{logit_kind}}: {unknown_name('kind', kind, LOGIT_KINDS)}")
    return {model: cast("LogitKind", kinds.get(model) or declared.get(model, "raw")) for model in models}


def require_fit_rows(chain: ChainExamples, unfit: Iterable[tuple[int, str] | None]) -> None:
    """Raise DataError for the first row of a chain that cannot be used, among results of unfit_row."""
    row = min((fault for fault in unfit if fault is not None), default=None)
    if row is not None:
        raise DataError(f"{chain.source}: example {chain.example_ids[row[0]]!r} {row[1]}")


def encoders(logits: AnyPath) -> list[str]:
    """Return the names of the encoders with embeddings in a logit table."""
    return hive_values(logits, "embedding")


def read_embeddings(logits: AnyPath, encoder: str, split: str, example_ids: Sequence[str]) -> Floats:
    """Return the embeddings of examples of a split, float32 (N, d), in the order of their ids.

    Raises:
        ConfigError: The table does not have the encoder.
        DataError: An embedding is missing, a duplicate, of another length than the others, or not finite; names the
            encoder and the example.
    """
    ids, lists = _embeddings(logits, encoder, split)
    source = f"{logits}: encoder {encoder!r}, split {split!r}"
    vectors = lists.take(_positions(ids, example_ids, source)).combine_chunks()
    return vectors_of(vectors, source, lambda row: f"example {example_ids[row]!r}")


def vectors_of(vectors: pa.Array, source: str, place: Callable[[int], str]) -> Floats:
    """Return lists of numbers as an array, float32 (N, d).

    Args:
        vectors: Large lists of float32.
        source: Source of the lists, for errors.
        place: Names a row.

    Raises:
        DataError: A list is missing, of another length than the others, or not finite.
    """
    lengths = pc.list_value_length(vectors).fill_null(0).to_numpy(zero_copy_only=False)
    odd = (lengths != lengths[0]) | (lengths == 0)
    if odd.any():
        row = int(odd.argmax())
        counts = f"{place(row)} has {lengths[row]} numbers, {place(0)} {lengths[0]}"
        raise DataError(f"{source}: the embedding of {counts}")
    values: Floats = vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(vectors), lengths[0])
    finite = np.isfinite(values).all(axis=1)
    if not finite.all():
        raise DataError(f"{source}: the embedding of {place(int(finite.argmin()))} is not finite")
    return values


def embedding_ids(logits: AnyPath, encoder: str, split: str) -> list[str]:
    """Return the ids of all examples of a split that have an embedding. Raises as read_embeddings does."""
    ids: list[str] = _embeddings(logits, encoder, split)[0].to_pylist()
    return ids


def _embeddings(logits: AnyPath, encoder: str, split: str) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    names = encoders(logits)
    if encoder not in names:
        remedy = "compute embeddings with cauc collect --embedding"
        raise ConfigError(f"{logits}: {unknown_name('encoder', encoder, names)}; {remedy}")
    folder = logits / f"embedding={encoder}" / f"split={split}"
    if not folder.is_dir():
        source = f"{logits}: encoder {encoder!r}, split {split!r}"
        raise DataError(f"{source}: no such split; collect the encoder's embeddings of it")
    return _read_column(parquet_files(folder), "embedding", pa.large_list(pa.float32()))


class Texts:
    """The texts of queries by example_id, from a Parquet file or folder."""

    def __init__(self, path: str | AnyPath, column: str) -> None:
        """Read them. Raises DataError if the file, its column example_id or its column of texts is missing."""
        self._source = f"{path}, column {column!r}"
        self._ids, self._texts = _read_column(parquet_files(path_of(path)), column, pa.string())

    def of(self, example_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of examples. Raises DataError naming one without a text, or with several."""
        texts = self._texts.take(_positions(self._ids, example_ids, self._source))
        if texts.null_count:
            example = example_ids[pc.index(texts.is_null(), True).as_py()]
            raise DataError(f"{self._source}: example {example!r} has no text")
        return tuple(texts.to_pylist())


def _read_column(files: Iterable[AnyPath], name: str, kind: pa.DataType) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the ids and one column of files. Raises DataError if a column is missing or has another type."""
    ids, values = [], []
    for file in files:
        table = read_parquet(file)
        ids.append(typed_column(table, "example_id", pa.string(), str(file)))
        values.append(typed_column(table, name, kind, str(file)))
    return pa.chunked_array(ids, pa.string()), pa.chunked_array(values, kind)


def _positions(ids: pa.ChunkedArray, example_ids: Sequence[str], source: str) -> pa.Array:
    """Return the positions of examples among ids. Raises DataError naming one that is missing or a duplicate."""
    examples = pa.array(example_ids, pa.string())
    positions = pc.index_in(examples, value_set=ids)
    if positions.null_count:
        example = example_ids[pc.index(positions.is_null(), True).as_py()]
        raise DataError(f"{source}: example {example!r} is missing ({positions.null_count:,} in all)")
    duplicate = first_duplicate(ids.filter(pc.is_in(ids, value_set=examples)))
    if duplicate is not None:
        raise DataError(f"{source}: example {duplicate!r} is a duplicate")
    return positions
