"""The answer table: what models have said, how sure they are and whether it is right; hive-partitioned Parquet.

ANSWERS/model=<name>/split=<split>/*.parquet with example_id, answer, correct, confidence_<name> and optionally cost,
and ANSWERS/pool.json as of a logit table, with the rule by which answers are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import first_duplicate
from cauc_ray.data.logits import CallCosts, ChainHeads, LogitKinds, LogitTable
from cauc_ray.data.model_rows import ModelRows, joined_labels, typed_column
from cauc_ray.data.writing import PoolModel, record_model, require_folder_names
from cauc_ray.errors import ConfigError, DataError, OptionError, warn
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_files, read_footer, read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, RemotePath, hive_values, path_of
from cauc_ray.numbers.answer_arrays import (
    ANSWER,
    CONFIDENCE,
    CORRECT,
    AnswerColumns,
    answer_chain,
    holds_columns,
)
from cauc_ray.numbers.answer_keys import (
    N_KEYS,
    AnswerFormat,
    agreement_keys,
    answer_keys,
    answer_texts,
    answer_vectors,
    confidences_in,
    is_missing,
)
from cauc_ray.numbers.answer_rules import DEFAULT_RULE, rule_of
from cauc_ray.numbers.arrays import refuse_rows
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits
from cauc_ray.numbers.logits import ANSWERS, LogitKind, SumsToOne
from cauc_ray.numbers.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class AnswerRows(ModelRows):
    """One model's rows of an answer table; the logits are the answers' vectors (numbers.answer_keys).

    Attributes:
        texts: What was said, str or None, object (N,).
        correct: Int8 (N,): 1 if right, 0 if wrong, -1 if unknown.
    """

    texts: npt.NDArray[Any]
    correct: Ints


class AnswerTable(LogitTable):
    """A folder of answer tables."""

    def __init__(self, path: str | AnyPath, logit_kind: LogitKinds = None) -> None:
        """Open a table. Raises DataError as LogitTable does, ConfigError for a kind of logits."""
        super().__init__(path)
        if logit_kind is not None:
            raise OptionError(f"{self.path} has answers in words in place of logits: leave {{logit_kind}} out")
        self.kinds = dict.fromkeys(self.models, ANSWERS)
        self.facts = {model.name: model for model in self.info.models} if self.info else {}

    def rule(self, model: str) -> str:
        """Return the rule by which a model's answers are the same."""
        fact = self.facts.get(model)
        return DEFAULT_RULE if fact is None or fact.rule is None else fact.rule

    def confidences(self, model: str) -> tuple[str, ...]:
        """Return the names of a model's confidences, sorted: those of its first file."""
        file = _first_file(self.path, model)
        names = [] if file is None else read_footer(file).schema.names
        return tuple(sorted(name.removeprefix(CONFIDENCE) for name in names if name.startswith(CONFIDENCE)))

    @property
    def answer_formats(self) -> dict[str, AnswerFormat]:
        """Return how models answer in words, by their names."""
        return {model: AnswerFormat(self.rule(model), self.confidences(model)) for model in self.models}

    def read_model(self, model: str, split: str, *, as_stored: bool = False, with_logits: bool = True) -> AnswerRows:
        """Read one model's rows of one split, in order of example_id.

        Raises:
            DataError: An id is missing or a duplicate, a confidence or cost is not finite, a column is missing or of a
                wrong type, or the split is empty; names file, model and example.
        """
        names = self.confidences(model)
        parts = [self._part(file, model, names) for file in self._files(model, split)]
        table = pa.concat_tables(parts).combine_chunks().sort_by("example_id")
        source, ids = self._source(model, split), table.column("example_id").combine_chunks()
        if not len(ids):
            raise DataError(f"{source}: the split is empty")
        duplicate = first_duplicate(ids)
        if duplicate is not None:
            raise DataError(f"{source}: example {duplicate!r} is a duplicate")
        texts = table.column(ANSWER).to_numpy()
        correct = pc.cast(table.column(CORRECT), pa.int8()).fill_null(-1).to_numpy()
        vectors = vectors_of(table, AnswerFormat(self.rule(model), names))
        return AnswerRows(
            files=(),
            example_ids=ids,
            labels=np.full(len(ids), UNKNOWN_LABEL, dtype=np.int32),
            costs=table.column("cost").to_numpy() if "cost" in table.column_names else None,
            positions=np.arange(len(ids)),
            logits=vectors,
            n_options=np.full(len(ids), vectors.shape[1]),
            sums=SumsToOne(),
            texts=texts,
            correct=correct,
        )

    def _part(self, file: AnyPath, model: str, names: Sequence[str]) -> pa.Table:
        """Read and check a file's rows."""
        table, source = read_parquet(file), f"{file}: model {model!r}"
        columns = {"example_id": pa.string(), ANSWER: pa.string(), CORRECT: pa.bool_()}
        columns |= {f"{CONFIDENCE}{name}": pa.float64() for name in names}
        columns |= {"cost": pa.float64()} if "cost" in table.column_names else {}
        typed = {name: typed_column(table, name, kind, source) for name, kind in columns.items()}
        ids = typed["example_id"]
        if ids.null_count:
            raise DataError(f"{source}: row {pc.index(ids.is_null(), True).as_py()} has no example_id")
        for name, values in typed.items():
            if values.type == pa.float64():
                numbers = values.to_numpy(zero_copy_only=False)
                wrong = np.isinf(numbers) | (np.isnan(numbers) & ~values.is_null().to_numpy(zero_copy_only=False))
                wrong |= (numbers < 0) | values.is_null().to_numpy(zero_copy_only=False) if name == "cost" else False
                why = f"its {name} is not a finite number{' of at least 0' if name == 'cost' else ''}"
                refuse_rows(source, ids, wrong, lambda row, why=why: why)  # type: ignore[misc]
        return pa.table(typed)

    def read_chain(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainLogits:
        """Read a chain of models on one split, joined on example_id.

        Arguments and errors are those of LogitTable's; DataError, too, where an answer that is missing is right.
        """
        self._require_chain(models, costs)
        if differs := next((model for model in models if self.rule(model) != self.rule(models[0])), None):
            rules = f"{self.rule(models[0])!r} of {models[0]!r} and {self.rule(differs)!r} of {differs!r}"
            raise DataError(f"{self.path}: the rules {rules} make different answers equal; collect them with one rule")
        failed = pa.chunked_array([self.read_failed(model, split) for model in models], pa.string()).unique()
        rows = [self.read_model(model, split) for model in models]
        left = [of.without(failed) for of in rows] if len(failed) else rows
        source = f"{self.path}, split {split!r}"
        joined_labels(source, models, left)
        if not len(left[0].example_ids):
            raise DataError(f"{source}: no example was answered by all of {', '.join(models)}")
        if len(left[0].example_ids) < max(len(of.example_ids) for of in rows):
            warn(f"{source}: {len(failed):,} examples are left out because some model of the chain failed on them")
        reported = [of.costs for of in left]
        if costs is None:
            costs = "per-model" if all(of is None for of in reported) else "per-call"
        ids = left[0].example_ids.to_pylist()
        columns = {
            model: AnswerColumns(
                rule_of(self.rule(model)), of.texts.tolist(), of.logits, self.confidences(model), of.correct, of.costs
            )
            for model, of in zip(models, left, strict=True)
        }
        costs_of_calls = self._costs(models, costs, reported, len(ids))
        return answer_chain(columns, None, costs=costs_of_calls, example_ids=ids, source=source)

    def read_chain_heads(
        self, models: Sequence[str], split: str, *, costs: CallCosts = None, with_logits: bool = False
    ) -> ChainHeads:
        """Raise ConfigError: shards keep logits."""
        raise OptionError(f"{self.path} has answers in words, which one process keeps: leave {{shards}} out")


def _first_file(table: AnyPath, model: str) -> AnyPath | None:
    folder = table / f"model={model}"
    return next(
        (file for split in hive_values(folder, "split") for file in parquet_files(folder / f"split={split}")), None
    )


def open_table(
    path: str | AnyPath,
    logit_kind: LogitKinds = None,
    *,
    undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
) -> LogitTable:
    """Open a table of logits, or of answers where its files have those. Arguments are those of LogitTable."""
    return AnswerTable(path, logit_kind) if holds_answers(path) else LogitTable(path, logit_kind, undeclared=undeclared)


def holds_answers(path: object) -> bool:
    """Return whether something is the path of a table of answers in words, or columns of those by model.

    Raises DataError for a table in which some models have answers and others logits.
    """
    if isinstance(path, Mapping):
        return holds_columns(path)
    folder = path_of(path) if isinstance(path, str | Path | RemotePath) else None
    if folder is None or not folder.is_dir():
        return False
    files = {model: _first_file(folder, model) for model in hive_values(folder, "model")}
    kinds = {model: ANSWER in read_footer(file).schema.names for model, file in files.items() if file is not None}
    if len(set(kinds.values())) > 1:
        in_words, scoring = (next(model for model, of in kinds.items() if of is kind) for kind in (True, False))
        raise DataError(
            f"{folder}: model {in_words!r} has answers in words, {scoring!r} logits; give each kind its own table"
        )
    return any(kinds.values())


def write_answers(
    path: str | AnyPath,
    model: str,
    split: str,
    example_ids: Iterable[str],
    answers: Sequence[str | None],
    confidences: Mapping[str, Floats],
    correct: Sequence[bool | None] | None = None,
    costs: Floats | None = None,
    *,
    cost: float | None = None,
    cost_unit: str | None = None,
    rule: str = DEFAULT_RULE,
) -> AnyPath:
    """Write one model's rows of one split as ANSWERS/model=<model>/split=<split>/part-0.parquet.

    Args:
        path: The table: a local folder or a URI. It is created if it does not exist.
        model: The model's name.
        split: The split's name.
        example_ids: (N,), unique in the split; models are joined on them.
        answers: (N,), None where the model has no answer.
        confidences: By name, float (N,), NaN where the model gave none.
        correct: Whether each answer is right (N,), None where that is unknown; None for all.
        costs: Of each call, float (N,), if calls have different costs.
        cost: The cost of one call of this model, recorded in ANSWERS/pool.json.
        cost_unit: Such as "USD".
        rule: By which answers are the same (numbers.answer_rules).

    Returns:
        The file. A file of that name is replaced atomically.

    Raises:
        ConfigError: For a name that cannot be a folder's, arrays of different lengths, or another unit than the
            table's.
    """
    require_folder_names(model, split)
    rule_of(rule)
    table = answer_columns(example_ids, answers, confidences, correct, costs)
    if cost is not None:
        names = sorted(confidences)
        record_model(
            path_of(path), PoolModel(name=model, cost=cost, rule=rule, confidences=names, logit_kind=ANSWERS), cost_unit
        )
    folder = path_of(path) / f"model={model}" / f"split={split}"
    make_folder(folder)
    write_parquet(folder / "part-0.parquet", table)
    return folder / "part-0.parquet"


def words_columns(
    example_ids: Sequence[str],
    labels: Ints | None,
    vectors: Sequence[Floats],
    texts: Sequence[str | None],
    answer_format: AnswerFormat,
    costs: Floats | None,
) -> pa.Table:
    """Return rows of an answer table from what a model has given: answers are right whose key is the label.

    Args:
        example_ids: (N,).
        labels: Keys of right answers, int (N,), UNKNOWN_LABEL where there is none; None for none.
        vectors: Of the answers, N.
        texts: The answers (N,).
        answer_format: Of the model.
        costs: Of each call, float (N,); None without.
    """
    whole = np.reshape(np.array(vectors, dtype=np.float32), (len(texts), N_KEYS + len(answer_format.confidences)))
    confidences = dict(zip(answer_format.confidences, confidences_in(whole).T, strict=True))
    correct: list[bool | None] = [None] * len(texts)
    if labels is not None:
        right = (agreement_keys(whole) == labels).tolist()
        correct = [None if label == UNKNOWN_LABEL else is_right for label, is_right in zip(labels, right, strict=True)]
    return answer_columns(example_ids, texts, confidences, correct, costs)


def vectors_of(table: pa.Table, answer_format: AnswerFormat) -> Floats:
    """Return the vectors of an answer table's rows, float32 (n, N_KEYS + C)."""
    keys = answer_keys(rule_of(answer_format.rule).forms(table.column(ANSWER).to_pylist()))
    columns = [table.column(f"{CONFIDENCE}{name}").cast(pa.float64()).to_numpy() for name in answer_format.confidences]
    return answer_vectors(keys, np.column_stack(columns) if columns else np.zeros((len(keys), 0)))


def answer_columns(
    example_ids: Iterable[str],
    answers: Sequence[str | None],
    confidences: Mapping[str, Floats],
    correct: Sequence[bool | None] | None,
    costs: Floats | None,
) -> pa.Table:
    """Return rows of an answer table; arguments and errors as for write_answers."""
    ids = pa.array(example_ids, pa.string())
    columns: dict[str, Any] = {"example_id": ids, ANSWER: pa.array(answer_texts(ANSWER, answers), pa.string())}
    right = [None] * len(ids) if correct is None else [None if is_missing(value) else value for value in correct]
    columns[CORRECT] = pa.array(right, pa.bool_())
    for name in sorted(confidences):
        columns[f"{CONFIDENCE}{name}"] = pa.array(np.asarray(confidences[name], np.float32), from_pandas=True)
    if costs is not None:
        columns["cost"] = pa.array(np.asarray(costs, dtype=np.float32))
    for name, values in columns.items():
        if len(values) != len(ids):
            raise ConfigError(f"{len(ids)} example ids and {len(values)} values of {name}; give one for each")
    return pa.table(columns)
