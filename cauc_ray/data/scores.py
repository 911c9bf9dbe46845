"""Tables of scores: how good each model's answer to each query was, and what it cost, without logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.logits import CallCosts, vectors_of
from cauc_ray.data.model_rows import typed_column
from cauc_ray.data.sources import open_folder
from cauc_ray.errors import ConfigError, DataError, require_packages, unknown_name, warn
from cauc_ray.files.paths import AnyPath, RemotePath, path_of
from cauc_ray.numbers.chain import LARGEST, UNNAMED_UNIT, ChainLogits, Costs
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Bools, Floats, Ints

SUFFIXES = (".parquet", ".csv")
# A score from here on counts as a right answer.
RIGHT = 0.5
# Features of a text.
N_FEATURES = 128
_REQUIRED, _TEXTS, _OPTIONAL = ("query", "model", "score"), ("query", "model", "split"), ("cost", "split", "embedding")


def is_score_file(logits: Any) -> TypeGuard[str | AnyPath]:
    """Return whether logits are the path of a file of scores."""
    if not isinstance(logits, str | Path | RemotePath):
        return False
    path = path_of(logits)
    return path.suffix in SUFFIXES and path.is_file()


@dataclass(frozen=True)
class ScoreTable:
    """Scores of M models' answers to Q queries.

    A chain of them has two options, of which the first is right: models name it where their score is at least RIGHT.
    That holds nothing that a method may look at before it chooses a model.

    Attributes:
        path: The file.
        queries: Their texts, or ids.
        models: Names of the models.
        scores: Float64 (Q, M), NaN where there is none.
        costs: Costs of the calls, float64 (Q, M); None if unknown.
        split_of: Split of each query, (Q,); None if the file does not say.
        embeddings: Float32 (Q, d); None if the file has none.
    """

    path: AnyPath
    queries: list[str]
    models: list[str]
    scores: Floats
    costs: Floats | None
    split_of: npt.NDArray[Any] | None
    embeddings: Floats | None

    @classmethod
    def read(cls, path: str | AnyPath) -> ScoreTable:
        """Read a file with a row for each query and model.

        Its columns are query, model, score in [0, 1] and, if known, cost, split and embedding.

        Raises:
            DataError: It is not such a table; names the query and the model.
        """
        path = path_of(path)
        source = open_folder(path)
        names = [name for name in (*_REQUIRED, *_OPTIONAL) if name in source.columns]
        for name in _REQUIRED:
            if name not in names:
                raise DataError(
                    f"{path}: a table of scores has columns {', '.join(_REQUIRED)}, and perhaps "
                    f"{', '.join(_OPTIONAL)}; {name!r} is missing, it has {', '.join(source.columns)}"
                )
        table = source.table(names, [name for name in _TEXTS if name in names])
        for name in names:
            if table.column(name).null_count:
                raise DataError(f"{path}: row {pc.index(table.column(name).is_null(), True).as_py()} has no {name}")
        text = {name: typed_column(table, name, pa.string(), str(path)) for name in _TEXTS if name in names}
        encoded = [text[name].dictionary_encode() for name in ("query", "model")]
        (queries, models), (rows, columns) = zip(
            *((of.dictionary.to_pylist(), of.indices.to_numpy()) for of in encoded), strict=True
        )

        def place(row: int) -> str:
            return f"{path}: query {queries[rows[row]][:80]!r}, model {models[columns[row]]!r}"

        firsts = np.unique(rows.astype(np.int64) * len(models) + columns, return_index=True)[1]
        if len(firsts) < len(table):
            raise DataError(f"{place(np.setdiff1d(np.arange(len(table)), firsts)[0])} is a duplicate")

        def grid(name: str, highest: float) -> Floats:
            values = typed_column(table, name, pa.float64(), str(path)).to_numpy()
            bad = ~((values >= 0) & (values <= highest))
            if bad.any():
                row = int(bad.argmax())
                raise DataError(f"{place(row)}: the {name} must lie between 0 and {highest:g}, got {values[row]}")
            cells = np.full((len(queries), len(models)), np.nan)
            cells[rows, columns] = values
            return cells

        scores, costs = grid("score", 1.0), grid("cost", LARGEST) if "cost" in names else None
        partial = int(((scores > 0) & (scores < 1)).sum())
        if partial:
            warn(f"{path}: {partial:,} of {len(table):,} scores lie between 0 and 1; those from {RIGHT:g} on are right")
        of_query = np.unique(rows, return_index=True)[1]
        split_of = text["split"].to_numpy(zero_copy_only=False) if "split" in names else None
        embeddings = None
        if "embedding" in names:
            if path.suffix == ".csv":
                raise DataError(f"{path}: a CSV file holds no lists of numbers; write embeddings to Parquet")
            lists = typed_column(table, "embedding", pa.large_list(pa.float32()), str(path))
            embeddings = vectors_of(lists, str(path), place)
        for name, values in (("split", split_of), ("embedding", embeddings)):
            if values is not None and (differs := _differing(values, of_query[rows])).any():
                raise DataError(f"{place(int(differs.argmax()))} has another {name} than the query's first row")
        first = [None if values is None else values[of_query] for values in (split_of, embeddings)]
        return cls(path, queries, models, scores, costs, *first)

    @property
    def kinds(self) -> dict[str, LogitKind]:
        """Return the kind of each model's logits."""
        return dict.fromkeys(self.models, "surrogate")

    @property
    def declared_costs(self) -> dict[str, float]:
        """Return the mean cost of each model's call; none if they are unknown."""
        if self.costs is None:
            return {}
        return dict(zip(self.models, np.nanmean(self.costs, axis=0).tolist(), strict=True))

    def splits(self, model: str) -> list[str]:
        """Return the names of the splits; the only one of a file that does not say is calibration."""
        return ["calibration"] if self.split_of is None else sorted({*self.split_of.tolist()})

    def read_chain(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainLogits:
        """Return a chain on a split, in the order of its queries.

        Raises:
            ConfigError: Costs are unknown.
            DataError: The split is unknown, or a query lacks a model's score; names both.
        """
        if split not in self.splits(models[0]):
            raise DataError(f"{self.path}: {unknown_name('split', split, self.splits(models[0]))}")
        in_split = [row for row in range(len(self.queries)) if self.split_of is None or self.split_of[row] == split]
        rows = sorted(in_split, key=lambda row: self.queries[row])
        cells = np.ix_(rows, [self.models.index(model) for model in models])
        missing = np.argwhere(np.isnan(self.scores[cells]))
        if len(missing):
            row, column = missing[0]
            query = self.queries[rows[row]][:80]
            raise DataError(f"{self.path}: query {query!r} has no score of model {models[column]!r}")
        if costs is not None and not isinstance(costs, str):
            per_call: Floats = np.array(costs, dtype=np.float64)
        elif self.costs is None:
            raise ConfigError(f"{self.path} has no column cost: give costs, one number for each model")
        else:
            per_call = self.costs[cells]
        right = self.scores[cells] >= RIGHT
        return ChainLogits(
            models=tuple(models),
            example_ids=tuple(self.queries[row] for row in rows),
            labels=np.zeros(len(rows), dtype=np.int32),
            costs=Costs(UNNAMED_UNIT, per_call),
            per_call_costs=per_call.ndim == 2,
            source=f"{self.path}, split {split!r}",
            logit_kind="surrogate",
            logits=tuple(np.where(of[:, None], [1.0, -1.0], [-1.0, 1.0]).astype(np.float32) for of in right.T),
        )

    def vectors(self, splits: Sequence[Sequence[str]]) -> list[Floats]:
        """Return what routers look at of the queries of several splits, float32 (n, d) each.

        These are the file's embeddings; without them, the latent semantic analysis of the texts, fitted on the first
        split.
        """
        if self.embeddings is not None:
            places = {query: row for row, query in enumerate(self.queries)}
            return [self.embeddings[[places[query] for query in queries]] for queries in splits]
        require_packages("features of texts", "baselines", "sklearn")
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import TfidfVectorizer

        words = TfidfVectorizer(sublinear_tf=True, token_pattern=r"\w+")
        counts = words.fit_transform(splits[0])
        reduced = TruncatedSVD(max(1, min(N_FEATURES, *(size - 1 for size in counts.shape))), random_state=0)
        reduced.fit(counts)
        return [reduced.transform(words.transform(queries)).astype(np.float32) for queries in splits]


def _differing(values: npt.NDArray[Any], reference: Ints) -> Bools:
    """Return which values, (n,) or (n, d), differ from those of their reference rows, int (n,)."""
    differs: Bools = (values != values[reference]).reshape(len(values), -1).any(axis=1)
    return differs
