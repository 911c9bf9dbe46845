"""Where logits come from: a table's folder, or arrays that are here, read as chains and as examples for methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import combinations
from os import PathLike
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.options import Cut, Options
from cauc_ray.data.answer_table import AnswerTable, holds_answers, open_table
from cauc_ray.data.kept import read_segments, segment_name
from cauc_ray.data.logits import (
    CallCosts,
    ChainHeads,
    LogitKinds,
    LogitTable,
    Texts,
    encoders,
    model_kinds,
    read_embeddings,
)
from cauc_ray.data.scores import ScoreTable, is_score_file
from cauc_ray.data.splits import split_shares
from cauc_ray.data.writing import read_info
from cauc_ray.errors import ConfigError, DataError, OptionError, unknown_name, warn
from cauc_ray.files.paths import AnyPath, RemotePath, hive_values
from cauc_ray.numbers.answer_arrays import ANSWER, answer_chain, answer_columns_of, holds_columns, texts_of
from cauc_ray.numbers.answer_keys import AnswerFormat, agreement_keys
from cauc_ray.numbers.arrays import array_chain
from cauc_ray.numbers.chain import UNNAMED_UNIT, Chain, ChainExamples, ChainLogits, Costs
from cauc_ray.numbers.ids import NumberIds, ids_of, number_order, text_order
from cauc_ray.numbers.logits import ANSWERS, LogitKind
from cauc_ray.numbers.segments import Segments
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.method import Reads
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.predictions import OptionNames, rules_of, vectors_of
from cauc_ray.policies.trace import EmbeddingCall, Examples

# A table by its path or URI, or arrays by model.
Logits: TypeAlias = str | AnyPath | Mapping[str, Any]
# What calls cost: by model, else as CallCosts has it.
ModelCosts: TypeAlias = Mapping[str, float] | Literal["per-call"] | None
_Chain = TypeVar("_Chain", ChainLogits, ChainHeads)


class LogitArrays:
    """Arrays of logits by model, read as a LogitTable is."""

    def __init__(
        self,
        splits: Mapping[str, Sequence[Any]],
        logit_kind: LogitKinds = None,
        *,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
        by: str | None = None,
        rules: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Take arrays with their labels, or None, and if there are any their ids, by split; else as LogitTable.

        by: the array that makes segments, which is not a model's.   rules: of models that answer in words, where their
        columns name none.
        """
        self.path = "the arrays"
        self._splits = splits
        first = {name: of for name, of in next(iter(splits.values()))[0].items() if name != by}
        self.models, self.has_answers = list(first), holds_columns(first) or ANSWERS in undeclared.values()
        if not self.models or not all(isinstance(model, str) for model in self.models):
            raise ConfigError(f"{self.path}: models have names, as {{'small': (N, K)}}, got {self.models}")
        if self.has_answers and logit_kind is not None:
            raise OptionError("the models answer in words: leave {logit_kind} out")
        declared = dict.fromkeys(self.models, ANSWERS) if self.has_answers else undeclared
        self.kinds = model_kinds(self.path, self.models, logit_kind, declared)
        self._rules = dict(rules)
        self.declared_costs: dict[str, float] = {}  # arrays do not say what calls cost

    @property
    def answer_formats(self) -> dict[str, AnswerFormat]:
        """Return how models answer in words, by their names."""
        if not self.has_answers:
            return {}
        first = next(iter(self._splits.values()))[0]
        return {
            model: of.answer_format for model, of in answer_columns_of(first, self.models, rules=self._rules).items()
        }

    def splits(self, model: str) -> list[str]:
        """Return the names of the splits."""
        return list(self._splits)

    def read_chain(self, models: Sequence[str], split: str, *, costs: CallCosts = None) -> ChainLogits:
        """Return a chain on a split, in the order of its rows. Raises as LogitTable."""
        if split not in self._splits:
            raise ConfigError(
                f"the arrays have no split {split!r}: give validation and test each as a share of the arrays, "
                "or as a pair (logits, labels)"
            )
        arrays, labels, *ids = self._splits[split]
        if not isinstance(arrays, Mapping):
            raise ConfigError(f"{split}: a pair is (logits by model, labels), got {type(arrays).__name__} first")
        source, example_ids = f"{self.path}, split {split!r}", ids[0] if ids else None
        if self.has_answers:
            columns = answer_columns_of(arrays, models, source, self._rules)
            paid = self._costs(costs, [of.costs for of in columns.values()])
            return answer_chain(columns, labels, costs=paid, example_ids=example_ids, source=source)
        paid = self._costs(costs, [None])
        return array_chain(arrays, models, labels, costs=paid, kinds=self.kinds, example_ids=example_ids, source=source)

    def _costs(self, costs: CallCosts, reported: Sequence[Floats | None]) -> Costs:
        """Return the costs of calls: as given, else as columns of answers have them."""
        if costs is not None and not isinstance(costs, str):
            return Costs(UNNAMED_UNIT, np.array(costs, dtype=np.float64))
        columns = [column for column in reported if column is not None]
        if len(columns) < len(reported):
            raise ConfigError("arrays do not say what a call of each model costs; give costs={model: cost}")
        return Costs(UNNAMED_UNIT, np.stack(columns, axis=1))


class ChainOptions(Options):
    """Options of which models are read, at what costs, and on which splits.

    Attributes:
        takes_scores: Whether a table of scores will do, which has no logits.
    """

    takes_scores: ClassVar[bool] = False

    @property
    def splits(self) -> tuple[str, str]:
        """Return the names of the calibration and validation split."""
        return self.calibration_split, self.validation_split

    @property
    def cuts(self) -> dict[str, Cut]:
        """Return by name the splits that are read, the first of which is calibration.

        None for a split of its own, else a share of the first, or arrays.
        """
        return {self.calibration_split: None, self.validation_split: self.validation}

    def require_agreement(self) -> None:
        """Raise ConfigError unless models differ and splits are disjoint."""
        models = self.models
        if models == ():
            raise OptionError("{models}: a chain needs at least one model")
        duplicate = next((model for model in models or () if models.count(model) > 1), None)
        if duplicate is not None:
            raise OptionError(f"{{models}}: {duplicate!r} is a duplicate in the chain")
        if self.calibration_split == self.validation_split:
            raise OptionError(
                "{calibration_split} and {validation_split} must be two splits, both are "
                f"{self.calibration_split!r}"
            )
        if sum(cut for cut in self.cuts.values() if isinstance(cut, float)) >= 1:
            raise ConfigError(
                "the shares of validation and test leave no example to calibrate on; their sum must be below 1"
            )


class Source:
    """A table or arrays, on the splits that options name or cut.

    models: the chain that options ask for.   costs: of calls, where options give them.   declared: those, else what
    the table declares.
    """

    def __init__(
        self,
        logits: Logits,
        options: ChainOptions,
        labels: Any = None,
        example_ids: Any = None,
        undeclared: Mapping[str, LogitKind] = MappingProxyType({}),
        *,
        by: str | None = None,
    ) -> None:
        """Open a table, or take arrays with their labels and ids.   undeclared, by: as LogitTable, LogitArrays have."""
        self._options = options
        arrays = {split: cut for split, cut in options.cuts.items() if isinstance(cut, tuple)}
        splits: dict[str, Sequence[Any]] = {options.calibration_split: (logits, labels, example_ids), **arrays}
        self._splits = splits
        self._source: LogitTable | LogitArrays | ScoreTable
        if not is_score_file(logits):
            self._source = _opened(logits, splits, options.logit_kind, undeclared, by)
        elif options.takes_scores:
            self._source = ScoreTable.read(logits)
        else:
            raise ConfigError(f"{logits} is a file, and policies are fitted to logits; `cauc compare` reads scores")
        self.path = self._source.path
        for model in options.models or ():
            if model not in self._source.models:
                raise ConfigError(f"{self.path}: {unknown_name('model', model, self._source.models)}")
        self.costs = self._given_costs()
        self.declared = self.costs if self.costs is not None else self._source.declared_costs
        self.models = options.models or tuple(
            # Where a cost is missing, whoever reads the chain says so.
            sorted(self._source.models, key=lambda model: self.declared.get(model, 0.0))
        )

    @property
    def table(self) -> LogitTable | None:
        """Return the table, None for arrays."""
        return self._source if isinstance(self._source, LogitTable) else None

    @property
    def scores(self) -> ScoreTable | None:
        """Return the table of scores; None for logits."""
        return self._source if isinstance(self._source, ScoreTable) else None

    @property
    def gives(self) -> Reads:
        """Return the kind of its models' outputs."""
        return "neither" if self.scores is not None else "answers" if self.has_answers else "logits"

    @property
    def has_answers(self) -> bool:
        """Return whether its models answer in words."""
        return isinstance(self._source, AnswerTable) or (
            isinstance(self._source, LogitArrays) and self._source.has_answers
        )

    @property
    def answer_formats(self) -> dict[str, AnswerFormat]:
        """Return how models answer in words, by their names; none of models that score options."""
        return {} if isinstance(self._source, ScoreTable) else self._source.answer_formats

    def of_models(self, models: Sequence[str]) -> Source:
        """Return the source with some of its models as the chain."""
        source = copy(self)
        source.models = tuple(models)
        return source

    @property
    def hidden(self) -> tuple[str, ...]:
        """Return the models of the chain whose hidden states the table has on all splits: embeddings by their names."""
        if self.table is None:
            return ()
        origins, encoder_names = {*map(self.origin, self.splits)}, encoders(self.table.path)
        folders = {model: self.table.path / f"embedding={model}" for model in self.models if model in encoder_names}
        return tuple(model for model, folder in folders.items() if origins <= {*hive_values(folder, "split")})

    @property
    def splits(self) -> tuple[str, ...]:
        """Return the names of the splits that are read, calibration first."""
        return tuple(self._options.cuts)

    def origin(self, split: str) -> str:
        """Return the split that a split's examples are of: its own, or calibration where it is a share of that."""
        return self._options.calibration_split if isinstance(self._options.cuts[split], float) else split

    def segments(self, column: str | None) -> list[Segments]:
        """Return the segments of all splits by a column; none without one. Raises as segments_of."""
        if column is None:
            return []
        origins = [self.origin(split) for split in self.splits]
        parts = [self._splits.get(split, self._splits[self._options.calibration_split]) for split in origins]
        return [
            segments_of(logits, column, split, *further[1:])
            for split, (logits, *further) in zip(origins, parts, strict=True)
        ]

    def _given_costs(self) -> dict[str, float] | None:
        """Return what calls cost by model, None where options do not give it."""
        models: Sequence[str] | None = self._options.models
        costs: dict[str, float] | tuple[float, ...] | None = self._options.costs
        if not isinstance(costs, tuple):
            return costs
        if models is None and not isinstance(self._source, LogitArrays):
            raise OptionError(
                "{costs} in a list are in the order of {models}: give these, too, or each cost by its model's name"
            )
        models = models or tuple(self._source.models)
        if len(costs) != len(models):
            raise OptionError(f"{{costs}}: {len(costs)} for {len(models)} models: give one for each, in their order")
        return dict(zip(models, costs, strict=True))

    def read(self, models: Sequence[str], costs: ModelCosts) -> tuple[ChainLogits, ChainLogits | None]:
        """Read calibration, and validation where there is one, in the order of example ids, as a table has them.

        models: of the source.   costs: of their calls, None for the source's.
        """
        chains = self.read_all(models, costs)
        calibration, validation = self._options.splits
        return chains[calibration], chains.get(validation)

    def read_all(self, models: Sequence[str], costs: ModelCosts) -> dict[str, ChainLogits]:
        """Read all splits by name, validation only where there is one. Arguments are those of read."""
        priced, cuts = _in_order(costs, models), self._options.cuts
        shares = {split: cut for split, cut in cuts.items() if isinstance(cut, float)}
        calibration, validation = self._options.splits
        chains = {
            split: self._read(models, split, priced)
            for split in cuts
            if split not in shares and (split != validation or split in self._source.splits(models[0]))
        }
        require_disjoint(str(self.path), chains)
        parts: dict[str, tuple[ChainLogits, Ints | None]] = {split: (chain, None) for split, chain in chains.items()}
        if shares:
            whole, chain = {calibration: 1 - sum(shares.values())}, chains[calibration]
            cut = _cut(chain, {**whole, **shares}, self._options.seed)
            parts |= {split: (chain, rows) for split, rows in cut.items()}
        return {split: self._in_text_order(chain, rows) for split, (chain, rows) in parts.items()}

    def _in_text_order(self, chain: ChainLogits, rows: Ints | None) -> ChainLogits:
        """Return a chain, or some rows of it, int (n,), in the order of its ids as texts, which tables have already."""
        if isinstance(self._source, LogitArrays):
            return in_text_order(chain, rows)
        return chain if rows is None else chain.of_rows(np.sort(rows))

    def read_heads(self) -> list[ChainHeads]:
        """Read what a table has of calibration, and of validation where there is one, but the logits."""
        assert isinstance(self._source, LogitTable)
        calibration, validation = self._options.splits
        splits = [calibration, *({validation} & set(self._source.splits(self.models[0])))]
        priced = _in_order(self.costs, self.models)
        chains = [self._source.read_chain_heads(self.models, split, costs=priced) for split in splits]
        require_disjoint(str(self.path), dict(zip(splits, chains, strict=True)))
        return [self._in_unit(_with_warning(chain)) for chain in chains]

    def _read(self, models: Sequence[str], split: str, costs: CallCosts) -> ChainLogits:
        chain = self._source.read_chain(models, split, costs=costs)
        if split in self._options.splits:
            chain = _with_warning(chain)
        return self._in_unit(chain)

    def _in_unit(self, chain: _Chain) -> _Chain:
        unit = self._options.cost_unit
        return chain if unit is None else replace(chain, costs=Costs(unit, chain.costs.per_call))


# Of so many labels that agree, no table of other rows under the same ids has all by chance.
_ENOUGH_LABELS = 20


def require_disjoint(source: str, splits: Mapping[str, ChainExamples]) -> None:
    """Raise DataError if two splits have rows in common: what is fitted on one would be measured on it, too.

    Rows are the same if their ids are, their labels, and their logits of the first model; ids alone may be numbers that
    begin anew in each split. Votes and answers are often the same by chance: how often, rows of other ids say.
    """
    for (first, first_chain), (second, second_chain) in combinations(splits.items(), 2):
        rows, other_rows = _of_common_ids(first_chain.example_ids, second_chain.example_ids)
        if not len(rows):
            continue
        same = _same_rows(first_chain, rows, second_chain, other_rows)
        if isinstance(first_chain, ChainLogits):
            n = len(second_chain)
            by_chance = _same_rows(first_chain, rows, second_chain, (other_rows + 1) % n).mean() if n > 1 else 0.0
            shared = same.mean() > (1 + by_chance) / 2
        else:
            shared = len(rows) >= _ENOUGH_LABELS and same.all()
        if shared:
            raise DataError(
                f"{source}: splits {first!r} and {second!r} have {same.sum():,} rows in common, such as "
                f"{first_chain.example_ids[rows[same.argmax()]]!r}; give each row to one of them"
            )


def _of_common_ids(ids: Sequence[str], other_ids: Sequence[str]) -> tuple[Ints, Ints]:
    """Return the rows of two splits that have the same ids, int (n,) each."""
    if isinstance(ids, NumberIds) and isinstance(other_ids, NumberIds):
        _, rows, other_rows = np.intersect1d(ids.numbers, other_ids.numbers, assume_unique=True, return_indices=True)
        return rows, other_rows
    row_of = {example: row for row, example in enumerate(ids)}
    pairs = [(row_of[example], row) for row, example in enumerate(other_ids) if example in row_of]
    rows, other_rows = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return rows, other_rows


def _same_rows(first: ChainExamples, rows: Ints, second: ChainExamples, other_rows: Ints) -> Bools:
    """Return which rows have the same label and, where they are here, logits of the first model, bool (n,)."""
    same: Bools = first.labels[rows] == second.labels[other_rows]
    if isinstance(first, ChainLogits) and isinstance(second, ChainLogits):
        logits, other_logits = first.logits[0], second.logits[0]
        width = min(logits.shape[1], other_logits.shape[1])
        same &= (logits[rows, :width] == other_logits[other_rows, :width]).all(axis=1)
    return same


def labelled_examples(chain: _Chain) -> _Chain:
    """Return the examples that have a label; all of them if none has one."""
    rows = np.flatnonzero(chain.labelled)
    return chain if len(rows) in (0, len(chain)) else chain.of_rows(rows)


def _with_warning(chain: _Chain) -> _Chain:
    """Return the examples that have a label, as labelled_examples does, with a warning that counts the others."""
    labelled = labelled_examples(chain)
    if labelled is not chain:
        n_missing = len(chain) - len(labelled)
        warn(
            f"{chain.source}: {n_missing:,} of {len(chain):,} examples have no label and are left out",
        )
    return labelled


def _in_order(costs: ModelCosts, models: Sequence[str]) -> CallCosts:
    """Return costs in the order of models, where they are given. Raises ConfigError naming one that is missing."""
    if costs is None or isinstance(costs, str):
        return costs
    missing = next((model for model in models if model not in costs), None)
    if missing is not None:
        surplus = next((name for name in costs if name not in models), None)
        why = f"no cost of model {missing!r}" if surplus is None else unknown_name("model", surplus, models)
        raise OptionError(f"{{costs}}: {why}")
    return [costs[model] for model in models]


def _opened(
    logits: Any,
    splits: Mapping[str, Sequence[Any]],
    logit_kind: LogitKinds,
    undeclared: Mapping[str, LogitKind],
    by: str | None = None,
    rules: Mapping[str, str | None] = MappingProxyType({}),
) -> LogitTable | LogitArrays:
    """Open a table, or take arrays, by splits as LogitArrays takes them, the first with the logits.

    Raises ConfigError unless logits are arrays by model, or the path of a table without anything that goes with arrays.
    """
    if isinstance(logits, Mapping):
        return LogitArrays(splits, logit_kind, undeclared=undeclared, by=by, rules=rules)
    if not isinstance(logits, str | PathLike | RemotePath):
        raise ConfigError(
            "logits: the path of a logit table, or arrays by model, as {'small': (N, K), 'large': (N, K)}; got "
            f"{type(logits).__name__}"
        )
    (_, *array_facts), *array_splits = splits.values()
    if array_splits or any(fact is not None for fact in array_facts):
        raise ConfigError("a logit table has its own labels, ids and splits; those given go with arrays")
    return open_table(str(logits) if isinstance(logits, PathLike) else logits, logit_kind, undeclared=undeclared)


def in_text_order(chain: ChainLogits, rows: Ints | None = None) -> ChainLogits:
    """Return a chain, or some rows of it, int (n,), in the order of its ids as texts."""
    order = text_order(chain.example_ids)
    return chain.of_rows(order if rows is None else order[np.isin(order, rows)])


def _cut(chain: ChainLogits, shares: Mapping[str, float], seed: int) -> dict[str, Ints]:
    """Cut the examples at random, whatever their order, into parts of some shares. Returns the rows of each."""
    # The ids of arrays are then in the order of their rows.
    order = number_order(chain.example_ids)
    parts = split_shares(len(chain), shares, seed)
    empty = next((split for split, rows in parts.items() if not len(rows)), None)
    if empty is not None:
        raise ConfigError(f"{empty}: a share of {shares[empty]:g} of {len(chain)} examples leaves it empty")
    return {split: order[rows] for split, rows in parts.items()}


def read_policy_chain(
    logits: Logits,
    policy: Policy,
    split: str,
    logit_kind: LogitKinds = None,
    labels: Any = None,
    example_ids: Any = None,
) -> ChainLogits:
    """Read a policy's models on a split of a table, or from arrays, with costs counted as the policy counts them.

    labels, example_ids: of arrays, None where there are none.   logit_kind: as for evaluate. Calls cost the policy's
    means there. Examples are in the order of their ids. Arrays have an encoder's embeddings by its name.
    """
    if isinstance(logits, Mapping):  # a column of segments may be among them
        logits = {name: of for name, of in logits.items() if name in policy.models} or logits
    opened = {split: (logits, labels, example_ids)}
    source = _opened(logits, opened, logit_kind, policy.kinds_by_model, rules=rules_of(policy))
    models, encoder, paid = [stage.name for stage in policy.answering], policy.encoder, policy.stages[0].cost
    if isinstance(source, LogitTable):
        chain = source.read_chain(models, split, costs=_costs_of(policy))
        policy.require_formats(source.answer_formats)
        if encoder is not None:
            vectors = read_embeddings(source.path, encoder, split, chain.example_ids)
            chain = chain.after_encoder(encoder, vectors, paid)
        return chain
    paid_by_call = source.has_answers and policy.costs == "per-call"
    costs: CallCosts = "per-call" if paid_by_call else [stage.cost for stage in policy.answering]
    chain = in_text_order(source.read_chain(models, split, costs=costs))
    policy.require_formats(source.answer_formats)
    if encoder is not None:
        assert isinstance(logits, Mapping)
        order = positions_of_rows(chain, example_ids)
        chain = chain.after_encoder(encoder, vectors_of(logits, encoder, len(chain))[np.argsort(order)], paid)
    return replace(chain, costs=Costs(policy.cost_unit, chain.costs.per_call))


def segments_of(logits: Logits, column: str, split: str, example_ids: Any = None) -> Segments:
    """Return the segments of a split of a table by a column that it keeps, or of arrays by one of them.

    Args:
        logits: The table, or arrays by name.
        column: The column, or the name of an array with one value for each row.
        split: The split of the table.
        example_ids: Ids of the rows of arrays, None for their positions.

    Raises:
        ConfigError: There is no such column.
        DataError: An example has no value.
    """
    if not isinstance(logits, Mapping):
        return read_segments(logits, column, split)
    if column not in logits:
        raise ConfigError(f"by: {unknown_name('array', column, logits)}")
    values = np.asarray(logits[column])
    first = next((array for name, array in logits.items() if name != column), values)
    n = len(first[ANSWER] if isinstance(first, Mapping) else first)
    if values.shape != (n,):
        raise DataError(f"by: array {column!r} has shape {values.shape}; one value for each row is {(n,)}")
    ids = NumberIds(np.arange(n)) if example_ids is None else ids_of(example_ids)
    return Segments(column, dict(zip(ids, map(segment_name, values.tolist()), strict=False)))


def validation_arrays(logits: Logits, validation: Any) -> tuple[Logits, Any, Any]:
    """Return where the examples are that a policy was chosen on: a table, or arrays with their labels and ids.

    Raises ConfigError where arrays are checked without those examples, or a table with them.
    """
    if isinstance(logits, Mapping) != isinstance(validation, tuple) or len(validation or (0, 0)) not in (2, 3):
        raise ConfigError(
            "segments are compared with the examples that the policy was chosen on: give, in Python, "
            "validation=(logits, labels) or (logits, labels, example_ids) with arrays; leave it out for a logit table, "
            "which has them"
        )
    return (*validation, None)[:3] if isinstance(validation, tuple) else (logits, None, None)


def read_policy_heads(logits: str | AnyPath, policy: Policy, split: str, logit_kind: LogitKinds = None) -> ChainHeads:
    """Read a policy's models on a split of a table as read_policy_chain does, but the logits."""
    if policy.encoder is not None:
        raise OptionError(f"shards hold no embeddings, which policy {policy.id} reads: leave {{shards}} out")
    table = open_table(logits, logit_kind, undeclared=policy.kinds_by_model)
    return table.read_chain_heads(policy.models, split, costs=_costs_of(policy))


def option_names(logits: Logits, policy: Policy, split: str) -> OptionNames | None:
    """Return the names of the options, where a table has them, or what keys of answers stand for on a split."""
    if isinstance(logits, Mapping):
        if not holds_columns(logits):
            return None
        columns = answer_columns_of(logits, policy.models, rules=rules_of(policy)).values()
        return texts_of((of.keys, of.texts) for of in columns)
    if holds_answers(logits):
        rows = [AnswerTable(logits).read_model(model, split) for model in policy.models]
        return texts_of((agreement_keys(of.logits), of.texts.tolist()) for of in rows)
    info = read_info(logits)
    return None if info is None or info.labels is None else tuple(info.labels)


def _costs_of(policy: Policy) -> CallCosts:
    """Return what calls cost as the policy counts them."""
    return "per-call" if policy.costs == "per-call" else [stage.cost for stage in policy.answering]


def positions_of_rows(chain: Chain, example_ids: Any = None) -> Ints:
    """Return where the rows of arrays are in a chain of them, int (N,).   example_ids: as the arrays were given."""
    positions = np.empty(len(chain), dtype=np.int64)
    if example_ids is None and isinstance(chain.example_ids, NumberIds):
        positions[chain.example_ids.numbers] = np.arange(len(chain))
    else:
        positions[text_order(ids_of(example_ids))] = np.arange(len(chain))  # the chain is in the order of its ids
    return positions


def examples_of(
    source: Source,
    purposes: Sequence[str],
    embedding: str | None = None,
    texts: Texts | None = None,
    hidden: Sequence[str] = (),
) -> list[Examples]:
    """Read a source's splits, all of whose examples need a label.

    Args:
        source: The table or arrays.
        purposes: Purpose of each split, for messages.
        embedding: An encoder of the table; one that is named like a model of the table is that model up to its last
            layer, whose call is paid by the methods that look at it.
        texts: Texts of the queries.
        hidden: Models of the table whose hidden states are read.

    Raises:
        CaucError: As LogitTable.read_chain and read_embeddings do, and where splits are missing or differ.
    """
    chains, table = source.read_all(source.models, source.costs), source.table
    examples: list[Examples] = []
    for split, why in zip(source.splits, purposes, strict=False):
        if split not in chains:
            raise DataError(f"{source.path} has no split {split!r}, which thresholds are chosen on")
        chains[split].require_labels(why)
    scores, features = source.scores, dict[str, Floats]()
    if scores is not None:
        ids = [chains[split].example_ids for split in source.splits]
        features = dict(zip(source.splits, scores.vectors(ids), strict=True))
    for split in source.splits:
        chain, vectors, call = chains[split], features.get(split), None
        if embedding is not None:
            if table is None:
                raise ConfigError(f"embedding: {embedding!r} is looked up in a logit table; arrays have no embeddings")
            vectors = read_embeddings(table.path, embedding, source.origin(split), chain.example_ids)
            declared_cost = (source.costs or {}).get(embedding)
            call = _embedding_call(table, embedding, chain, source.origin(split), declared_cost)
        read = None if texts is None else texts.of(chain.example_ids)
        read = tuple(chain.example_ids) if scores is not None else read
        states = {
            model: read_embeddings(table.path, model, source.origin(split), chain.example_ids)
            for model in hidden
            if table is not None
        }
        examples.append(Examples(chain, vectors, read, call, embedding or "encoder", states))
    first, *other_splits = examples
    for examples_of_split in other_splits:
        for vectors, first_vectors in zip(_vectors(examples_of_split), _vectors(first), strict=True):
            if vectors.shape[1] != first_vectors.shape[1]:
                raise DataError(
                    f"{examples_of_split.chain.source}: its embeddings have {vectors.shape[1]} numbers, those of "
                    f"{first.chain.source} have {first_vectors.shape[1]}"
                )
    return examples


def _vectors(examples: Examples) -> list[Floats]:
    return [vectors for vectors in (examples.embeddings, *examples.hidden.values()) if vectors is not None]


def _embedding_call(
    table: LogitTable, name: str, chain: ChainLogits, split: str, declared_cost: float | None
) -> EmbeddingCall | None:
    """Return the call that the embeddings take, at the cost that options declare or the table has.

    Raises DataError where the cost is unknown.
    """
    if name not in table.models:
        return None if declared_cost is None else EmbeddingCall(name, None, declared_cost)
    if name in chain.models:
        return EmbeddingCall(name, chain.models.index(name))
    counted: CallCosts = "per-call" if chain.per_call_costs else "per-model"
    heads = table.read_chain_heads([name], split, costs=counted)
    costs = heads.costs.per_call
    if costs.ndim == 1:
        return EmbeddingCall(name, None, float(costs[0]))
    rows = pc.index_in(pa.array(chain.example_ids, pa.string()), value_set=pa.array(heads.example_ids, pa.string()))
    if rows.null_count:
        example = chain.example_ids[pc.index(rows.is_null(), True).as_py()]
        raise DataError(
            f"{chain.source}: what model {name!r}, whose embedding is looked at, costs for {example!r} "
            "is not in the table"
        )
    return EmbeddingCall(name, None, costs[np.asarray(rows), 0])


def fingerprints_of(
    calibration: Chain, validation: Chain, final: Chain, training: Chain | None = None
) -> dict[str, Any]:
    """Return, as JSON has it, what a curve depends on besides its method.

    By what a split is for: digests of its examples with their labels, and of each model's logits, and the mean cost of
    each model's calls; and the unit of costs.
    """
    splits = {"calibration": calibration, "validation": validation, "final": final}
    splits |= {} if training is None else {"training": training}
    return {"cost_unit": final.costs.unit, **{purpose: _of_split(chain) for purpose, chain in splits.items()}}


def _of_split(chain: Chain) -> dict[str, Any]:
    return {
        "examples": chain.examples_fingerprint(),
        "logits": {model: chain.logits_fingerprint(stage) for stage, model in enumerate(chain.models)},
        "costs": dict(zip(chain.models, chain.costs.means.tolist(), strict=True)),
    }


def difference(stored: object, expected: Mapping[str, Any]) -> str | None:
    """Return in words what differs first between fingerprints in a file and those expected, None if nothing does."""
    if not isinstance(stored, dict):
        return "it has no fingerprints of its table, so that nobody knows what it was measured on; make it again"
    for purpose, of_split in expected.items():
        stored_value = stored.get(purpose)
        if not isinstance(of_split, dict) or not isinstance(stored_value, dict):
            if stored_value != of_split:
                return f"its {purpose.replace('_', ' ')} is {stored_value!r}, not {of_split!r}"
            continue
        what = next((what for what in of_split if stored_value.get(what) != of_split[what]), None)
        if what is not None:
            return f"it was measured with other {what} ({purpose} split)"
    return None
