"""A model's answers to a batch, and their checks."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.arrays import read_rows
from cauc_ray.numbers.logits import MUST_BE_DECLARED, SumsToOne, as_logits, kind_of, laid_out, stacked
from cauc_ray.numbers.types import Floats, Ints

# The input's columns, each (n, ...): numbers as arrays, text, bytes and ragged lists as arrays of objects.
Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]
Row = TypeVar("Row")
# The column of what stages before have said of a row, of people only: mappings of stage, answer and confidences.
SAID = "\0said"
# The counts in Answers.tokens, and the outputs of a cascade that has them.
TOKENS = ("prompt_tokens", "completion_tokens")


class Wire(NamedTuple):
    """What a call has taken of the network.

    Attributes:
        bytes_out: Bytes sent, everything included.
        bytes_in: Bytes received, likewise.
        seconds: From the first request to the last answer.
    """

    bytes_out: int
    bytes_in: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Answers:
    """A model's answers for n rows.

    Attributes:
        logits: float32 (n, K), of the model's kind, -inf beyond a row's options.
        n_options: int (n,), None if all rows have K.
        costs: Cost of the call for each row, float64 (n,), or None.
        failures: Rows that the model cannot answer, with reasons; their logits are meaningless.
        counts: How often something happened that affects the logits, by name.
        device_s: Seconds of the forward passes on a GPU, None if not measured.
        cost_unit: Unit of the costs, if only the calls report it.
        wire: Network traffic of a remote call, None of others.
        unconverted: The model's numbers before they were converted to logits, None if these are the logits.
        labels: The model's own label of each row (n,), a name of the pool's labels or an option's number; those of the
            first batch must be the options with the highest scores.
        not_finite: Rows that failed since a number of theirs is NaN or infinite; asked again, they may be answered.
        texts: What a model that says something has answered (n,), None for a row without an answer; its logits are
            the answers' vectors (numbers.answer_keys). None of models that score options.
        waiting: Failed rows whose answer is yet to come, as that of a person: not the model's fault.
        tokens: Of each row's prompt, and generated for it, as the model or its server counts them, int (n, 2); None
            where they are unknown.
    """

    logits: Floats
    n_options: Ints | None = None
    costs: Floats | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    device_s: float | None = None
    cost_unit: str | None = None
    wire: Wire | None = None
    unconverted: Floats | None = None
    labels: Sequence[object] | None = None
    not_finite: frozenset[int] = frozenset()
    texts: Sequence[str | None] | None = None
    waiting: frozenset[int] = frozenset()
    tokens: Ints | None = None

    @property
    def as_returned(self) -> Floats:
        """Return the model's numbers as it returned them."""
        return self.logits if self.unconverted is None else self.unconverted


def wires(calls: Iterable[Wire | None]) -> Wire | None:
    """Return what several calls have taken of the network together, None if none has."""
    remote = [wire for wire in calls if wire is not None]
    return Wire(*map(sum, zip(*remote, strict=True))) if remote else None


# What Answers.counts holds of language models.
LITTLE_MASS = "rows where the options have less than half of the probability"
BELOW = "options below the returned log-probabilities"

# The logit kind of a model that returns embeddings instead of logits, as input for policies.
EMBEDDING: Literal["embedding"] = "embedding"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that a loaded model reports.

    Attributes:
        source: A phrase that describes it.
        logit_kind: The kind of its logits, or EMBEDDING.
        gflops: Multiply-adds of one example as published, None if unknown.
        params_b: Parameters in billions.
        labels: Names of its options in order, if they are the same in every row and known.
        dtype: The precision of the computation, None if unknown.
        prepares: Whether it prepares calls ahead.
        overlaps: Whether it takes the next call, from another thread, while it waits for the answers of one.
    """

    source: str
    logit_kind: str = "raw"
    gflops: float | None = None
    params_b: float | None = None
    labels: tuple[str, ...] | None = None
    dtype: str | None = None
    prepares: bool = False
    overlaps: bool = False


class Model(Protocol):
    """A loaded model."""

    facts: ModelFacts

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch. Raises whatever the model raises; DataError for invalid logits."""
        ...

    def close(self) -> None:
        """Release what the model holds outside of this process; called when its stage ends."""
        return


class PreparingModel(Model):
    """A model whose calls consist of work on the host, then work on the device.

    While the device computes a call, another thread prepares the next one, one at a time.
    """

    @abstractmethod
    def prepare(self, batch: Batch) -> Any:
        """Do the host's work for a batch: decode, resize, tokenise, pin. Raises as a call does."""

    @abstractmethod
    def answer(self, prepared: Any) -> Answers:
        """Answer a prepared batch."""

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch. Raises what prepare and answer raise."""
        return self.answer(self.prepare(batch))


def batch_size(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(batch.values()), ()))


def require_columns(batch: Batch, *names: str) -> None:
    """Raise DataError if a batch lacks a column."""
    for name in names:
        if name not in batch:
            raise DataError(f"the input has no column {name!r}; it has {', '.join(sorted(batch))}")


class Unusable(str):
    """Why a row cannot be used, in place of what it would give."""

    __slots__ = ()


def parted(results: Mapping[int, Row | Unusable]) -> tuple[dict[int, Row], dict[int, str]]:
    """Return the results of usable rows, and why the other rows have none."""
    faults = {row: str(result) for row, result in results.items() if isinstance(result, Unusable)}
    return {row: result for row, result in results.items() if not isinstance(result, Unusable)}, faults


def as_answers(output: object, n: int) -> Answers:
    """Check what a user's callable returned for n rows.

    Args:
        output: Logits (n, K) as an array or a torch tensor, n vectors if K differs between rows, or Answers.
        n: The number of rows.

    Returns:
        Answers in which rows whose logits are missing, NaN or +inf are failures.

    Raises:
        DataError: The output is not numeric or does not have n rows.
    """
    answers = output if isinstance(output, Answers) else Answers(*logits_of(output, n))
    if len(answers.logits) != n or (answers.costs is not None and np.shape(answers.costs) != (n,)):
        n_costs = "" if answers.costs is None else f" and {len(answers.costs)} costs"
        raise DataError(f"the model returned {len(answers.logits)} rows of logits{n_costs} for {n} inputs")
    outside = [row for row in answers.failures if not 0 <= row < n]
    if outside:
        raise DataError(f"the model reports a failure of row {outside[0]}, but the batch has {n} rows")
    logits, costs = np.asarray(answers.logits, np.float32), answers.costs
    invalid_mask = ~np.isfinite(logits.max(axis=1, initial=-np.inf))
    if costs is not None:
        costs = np.asarray(costs, np.float64)
        free_mask = ~(np.isfinite(costs) & (costs >= 0))
        costs = np.where(free_mask, 0.0, costs)
        invalid_mask |= free_mask
    why = "a logit or the cost is NaN or infinite, or it has no logits"
    faults = dict.fromkeys(np.flatnonzero(invalid_mask).tolist(), why)
    not_finite = frozenset(faults.keys() - answers.failures.keys())
    return replace(answers, logits=logits, costs=costs, failures={**faults, **answers.failures}, not_finite=not_finite)


def logits_of(output: object, n: int) -> tuple[Floats, Ints | None]:
    """Return a model's output for n rows as float32 (n, K), and each row's number of logits, None if all have K.

    Raises:
        DataError: The output is not numeric or does not have n rows.
    """
    if hasattr(output, "detach"):  # a torch tensor, of any device and precision
        output = output.detach().float().cpu().numpy()
    if not isinstance(output, np.ndarray | list | tuple):
        raise DataError(
            "a model must return logits as an array, a tensor, a list of vectors or cauc_ray.Answers, "
            f"not {type(output).__name__}"
        )
    if len(output) != n:
        raise DataError(f"the model returned {len(output)} rows of logits for {n} inputs")
    logits, n_options = read_rows("the model's answer", output)
    return logits, n_options if (n_options < logits.shape[1]).any() else None


def require_same_labels(source: str, answers: Answers, labels: Sequence[object], names: Sequence[str] | None) -> None:
    """Refuse a model whose own labels are not the options with its highest scores.

    Scores in another order than the pool's labels, or pairwise ones, would otherwise be read as wrong answers.

    Args:
        source: The model, for the message.
        answers: Its scores of a batch of n rows.
        labels: Its own label of each row (n,): a name of `names`, or an option's number.
        names: The options in the order of the scores, None if only their numbers are known.

    Raises:
        ConfigError: A row's label is not an option, or not one with the row's highest score.
    """
    for row, (label, scores) in enumerate(zip(labels, answers.logits, strict=True)):
        if row in answers.failures:
            continue
        text = str(label)
        option = names.index(text) if names is not None and text in names else _option_number(label, names)
        if option is None or not 0 <= option < len(scores) or scores[option] < scores.max():
            best = int(scores.argmax())
            listed = "" if names is None else f" ({names[best]!r})" if best < len(names) else ""
            raise ConfigError(
                f"{source} answers row {row} of its first batch with label {text!r}, but its highest score is that of "
                f"option {best}{listed}: list the labels of the pool in the order of the model's scores, and give an "
                "output with one score for each label"
            )


def _option_number(label: object, names: Sequence[str] | None) -> int | None:
    """Return a label as an option's number; None for one that is not, or if the options' names are other integers."""
    if names is not None and all(name.lstrip("-").isdigit() for name in names):
        return None
    return int(label) if isinstance(label, int | np.integer) else None


def ragged(n: int, rows: Mapping[int, Floats]) -> tuple[Floats, Ints]:
    """Return vectors of some of n rows as float32 (n, K), padded with -inf, and their lengths, int (n,)."""
    lengths = np.array([len(rows.get(row, ())) for row in range(n)], dtype=np.int64)
    values = np.concatenate([np.empty(0, np.float32), *(rows[row] for row in sorted(rows))])
    return laid_out(values.astype(np.float32, copy=False), lengths, 1), lengths  # later steps need a column


def answered(
    n: int,
    rows: Mapping[int, Floats],
    faults: Mapping[int, str],
    counts: Mapping[str, int],
    dtype: str | None = None,
    **more: Any,
) -> Answers:
    """Return the logits of some of n rows as answers; rows whose logits are NaN or infinite are failures.

    Args:
        n: Number of rows.
        rows: Logits of rows, float (K,) each.
        faults: Why the other rows have none.
        counts: As Answers has them.
        dtype: Precision of the computation.
        **more: Other fields of Answers.
    """
    why = f"the model's logits for it are NaN or infinite{f' in {dtype}' if dtype else ''}"
    not_finite = frozenset(row for row, logits in rows.items() if not np.isfinite(logits).all())
    failures = {**faults, **dict.fromkeys(not_finite, why)}
    logits, n_options = ragged(n, {row: logits for row, logits in rows.items() if row not in failures})
    return Answers(logits, n_options, failures=failures, counts=dict(counts), not_finite=not_finite, **more)


def little(logprobs: Iterable[Floats]) -> dict[str, int]:
    """Count rows that give their options less than half of the probability."""
    n = sum(float(np.exp(row, dtype=np.float64).sum()) < 0.5 for row in logprobs)
    return {LITTLE_MASS: n} if n else {}


# What a pass costs in itself on a CPU, in tokens that one thread computes.
PASS_TOKENS = 32


def bucketed(lengths: Mapping[int, int], max_tokens: int, pass_tokens: int = PASS_TOKENS) -> Iterator[list[int]]:
    """Yield rows of like lengths together, in the cheapest way: few passes, and little padding in each.

    Exact, by dynamic programming over the rows in order of their lengths.

    Args:
        lengths: Tokens of each row.
        max_tokens: Tokens of a pass, padding included; one row always fits.
        pass_tokens: Tokens that cost as much as a pass does in itself.
    """
    rows = sorted(lengths, key=lengths.__getitem__)
    sizes = np.array([lengths[row] for row in rows], dtype=np.int64)
    cost, begins = np.zeros(len(rows) + 1), [0]  # of the first rows, and where the last pass of them begins
    for end, size in enumerate(sizes.tolist(), 1):
        first = max(0, end - max(1, max_tokens // max(1, size)))
        costs = cost[first:end] + size * np.arange(end - first, 0, -1)
        best = int(costs.argmin())
        cost[end] = costs[best] + pass_tokens
        begins.append(first + best)
    ends = [len(rows)]
    while ends[-1]:
        ends.append(begins[ends[-1]])
    yield from (rows[begin:end] for begin, end in itertools.pairwise(reversed(ends)))


class AsDeclared:
    """Converts a model's answers to logits by their kind, as is done when a table is read."""

    def __init__(self, facts: ModelFacts) -> None:
        self._kind = kind_of(facts.logit_kind) or "raw"
        # Distinct rows so far that may all be probabilities; None once a row cannot be.
        self._seen: Floats | None = np.zeros((0, 0), np.float32) if self._kind in MUST_BE_DECLARED else None

    def __call__(self, answers: Answers) -> Answers:
        """Return answers with logits.

        Raises DataError naming a row that is not probabilities although they were declared, ConfigError if all rows so
        far are probabilities that were not declared.
        """
        rows = np.ones(len(answers.logits), dtype=bool)
        rows[list(answers.failures)] = False
        returned = answers.logits[rows]
        if not returned.size:
            return answers
        logits = as_logits(returned, self._kind)
        if self._seen is not None:
            self._seen = np.unique(stacked([self._seen, logits]), axis=0)
            sums = SumsToOne.of(self._seen)
            if sums.certain:
                raise ConfigError(
                    "the model returns probabilities (none below 0, each row sums to one), not logits; declare them in "
                    "the pool file with logit_kind: probabilities in the stage's model"
                )
            if not sums.possible:
                self._seen = None
        if logits is returned:
            return answers
        converted = answers.logits.copy()
        converted[rows] = logits
        return replace(answers, logits=converted, unconverted=answers.logits)


def choices_in(batch: Batch) -> list[int | None] | None:
    """Return each row's number of choices, None for a row without choices; None without such a column."""
    if "choices" not in batch:
        return None
    return [None if choices is None else len(choices) for choices in batch["choices"]]


def matched(answers: Answers, n_choices: Sequence[int | None] | None) -> Answers:
    """Return answers in which rows with other numbers of logits than choices are failures."""
    if n_choices is None:
        return answers
    n, width = answers.logits.shape
    n_options = [width] * n if answers.n_options is None else answers.n_options.tolist()
    failures = {
        row: f"the model returned {n_options[row]} logits for its {n_row} choices"
        for row, n_row in enumerate(n_choices)
        if n_row not in (None, n_options[row])
    }
    return replace(answers, failures={**failures, **answers.failures})
