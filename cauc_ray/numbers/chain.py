"""Every model's logits on the same examples, and what calls cost: the input of fits, sweeps and replays."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from cauc_ray.errors import DataError, warn
from cauc_ray.numbers.ids import lines_of, rows_of
from cauc_ray.numbers.logits import ANSWERS, LogitKind, kind_of
from cauc_ray.numbers.rows import row_dot, rows_at
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Bools, Floats, Ints

LARGEST = 1e100
# The unit of costs that were given without one.
UNNAMED_UNIT = "cost units"

UNKNOWN_LABEL = -1

# Bytes of one block of a pass, as float64: they fit into a processor's cache.
_BLOCK_BYTES, _WIDE_OPTIONS = 1 << 20, 64
# glibc keeps freed memory for the next arrays, up to twice the largest array that was freed, of those up to this size;
# more goes back to the system, and a block would wait for its arrays' pages longer than it computes.
_LEARNT_BYTES = (1 << 25) - (1 << 13)

# The odd number nearest to 2^64 / golden ratio, the usual increment of Weyl sequences.
_STEP = 0x9E3779B97F4A7C15

# Bits that no ordinary float32 has, so that a logit of 0 is not hashed like a missing option.
_NOT_MISSING = np.uint32(0x5BD1E995)
T = TypeVar("T")


def cost_text(cost: float | None, unit: str, digits: int = 4) -> str:
    """Return a cost in so many digits with its unit, a dash for None.

    >>> cost_text(1, "cost units"), cost_text(2.5, "cost units"), cost_text(1, "GFLOPs")
    ('1 cost unit', '2.5 cost units', '1 GFLOPs')
    """
    text = "–" if cost is None else f"{cost:.{digits}g}"
    return f"{text} {UNNAMED_UNIT.removesuffix('s') if text == '1' and unit == UNNAMED_UNIT else unit}"


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of each model's call: float64 (M,), or (N, M) if calls of one model differ, for example by tokens.

    A cascade pays for every stage that it calls: the cost of stopping at stage j is the sum of calls 0..j. A router
    pays for the one model that it chooses.

    >>> Costs("GFLOPs", np.array([1.0, 4.0])).of_stops(np.array([0, 1, 0]))
    array([1., 5., 1.])
    """

    unit: str
    per_call: Floats

    def __post_init__(self) -> None:
        # The bound keeps sums over examples finite.
        bad = ~((self.per_call >= 0) & (self.per_call <= LARGEST))
        if bad.any():
            position = tuple(int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"cost {self.per_call[position]} {self.unit} at {position} is not a number between 0 and {LARGEST:g}"
            )

    @property
    def cumulative(self) -> Floats:
        """Return the cost of stopping at each stage, of the shape of per_call."""
        return np.cumsum(self.per_call, axis=-1)

    @property
    def means(self) -> Floats:
        """Return the mean cost of one call of each model, float64 (M,)."""
        return self.per_call if self.per_call.ndim == 1 else self.per_call.mean(axis=0)

    def of_models(self, indices: Sequence[int]) -> Costs:
        """Return the costs of some of the models, in the order of their indices here."""
        return Costs(self.unit, self.per_call[..., list(indices)])

    def of_rows(self, rows: Ints) -> Costs:
        """Return the costs of some rows' calls.   rows: int (n,)."""
        return self if self.per_call.ndim == 1 else Costs(self.unit, self.per_call[rows])

    def of_calls(self, calls: Bools) -> Floats:
        """Return the cost of sets of calls, float64 (S,), or (N, S) if calls differ.   calls: bool (S, M)."""
        total = np.zeros((*self.per_call.shape[:-1], len(calls)))
        for model in range(self.per_call.shape[-1]):  # in their order: the sums are bit for bit those of cumulative
            total += np.where(calls[:, model], self.per_call[..., model, None], 0.0)
        return total

    def of_stops(self, stops: Ints) -> Floats:
        """Return the cost of rows that stopped at these stages, float64 (N,).   stops: int (N,)."""
        cumulative = self.cumulative
        if cumulative.ndim == 1:
            return cumulative[stops]
        return cumulative[np.arange(len(stops)), stops]

    def warn_unless_rising(self, models: tuple[str, ...]) -> None:
        """Warn if a model costs no more than the one before it, unless it is the last and free, as who abstains is."""
        for j, (before, after) in enumerate(zip(self.means[:-1], self.means[1:], strict=True)):
            if 0 < after <= before or (after == 0 and j + 2 < len(models)):
                warn(
                    f"{models[j + 1]!r} costs {cost_text(after, self.unit, 6)}, no more than {models[j]!r} before it "
                    f"({before:g}); the order is used as given",
                )


class Rows(Protocol):
    """Logits of N rows, float (N, K), read by slices or positions: an array, or logits stored on disk."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        ...

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the dtype of the logits."""
        ...

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        """Return the given rows, float (n, K)."""
        ...


@dataclass(frozen=True, slots=True)
class ChainPart:
    """A subset of a chain's examples with their logits, read in blocks.

    Attributes:
        logits: Of each of M models, (n, K).
        labels: Int32 (n,).
        ranks: Int (n,), the examples' positions among all.
    """

    logits: tuple[Rows, ...]
    labels: Ints
    ranks: Ints

    def __len__(self) -> int:
        return len(self.labels)

    def blocks(self) -> Iterator[slice]:
        """Return the rows in slices in which a model's logits take about a megabyte."""
        size = max(1, _BLOCK_BYTES // (8 * max(1, self.logits[0].shape[1])))
        if len(self) > size:
            np.empty(_LEARNT_BYTES, np.uint8)  # freed at once, without its pages ever having been there
        return (slice(start, min(start + size, len(self))) for start in range(0, len(self), size))

    @property
    def is_wide(self) -> bool:
        """Return whether rows have so many options that blocks of them are worth a thread."""
        return self.logits[0].shape[1] >= _WIDE_OPTIONS

    def of_models(self, indices: Sequence[int]) -> ChainPart:
        """Return the part of some of the models, in the order of their positions here."""
        return ChainPart(tuple(self.logits[index] for index in indices), self.labels, self.ranks)


@dataclass(frozen=True, kw_only=True)
class ChainExamples:
    """N examples that M models have answered, cheapest first, without the logits.

    Attributes:
        models: Names.
        example_ids: Str (N,).
        labels: Int32 (N,), UNKNOWN_LABEL if unknown.
        costs: Of the models' calls.
        per_call_costs: Whether costs differ from call to call.
        source: For messages.
        logit_kind: What the models gave, one kind for all or one for each; probabilities are stored as logarithms.
    """

    models: tuple[str, ...]
    example_ids: Sequence[str]
    labels: Ints
    costs: Costs
    per_call_costs: bool
    source: str
    logit_kind: str | tuple[LogitKind, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def logit_kinds(self) -> tuple[LogitKind, ...]:
        """Return the kind of each model's logits."""
        if isinstance(self.logit_kind, str):
            return (kind_of(self.logit_kind) or "raw",) * len(self.models)
        return self.logit_kind

    @property
    def has_classes(self) -> bool:
        """Return whether labels are classes; those of answers in words are keys."""
        return ANSWERS not in self.logit_kinds

    def with_models(self, indices: Sequence[int], /, **logits: Any) -> Self:
        """Return the chain of some of the models.   logits: the subclass's own arguments."""
        return replace(
            self,
            models=tuple(self.models[index] for index in indices),
            logit_kind=tuple(self.logit_kinds[index] for index in indices),
            costs=self.costs.of_models(indices),
            **logits,
        )

    def with_rows(self, rows: Ints, /, **logits: Any) -> Self:
        """Return the chain of some examples, in the order of rows, int (n,).   logits: the subclass's own arguments."""
        return replace(
            self,
            example_ids=rows_of(self.example_ids, rows),
            labels=self.labels[rows],
            costs=self.costs.of_rows(rows),
            **logits,
        )

    def held_as(self, kind: type[SomeExamples], **logits: Any) -> SomeExamples:
        """Return the examples as another class.   logits: that class's own arguments."""
        return kind(**{field.name: getattr(self, field.name) for field in fields(ChainExamples)}, **logits)

    @cached_property
    def labelled(self) -> Bools:
        """Return which examples have a label, bool (N,)."""
        labelled: Bools = self.labels != UNKNOWN_LABEL
        return labelled

    def require_labels(self, purpose: str) -> None:
        """Raise DataError naming an example without a label if there is one.   purpose: what labels are needed for."""
        if not self.labelled.all():
            example = self.example_ids[int(np.flatnonzero(~self.labelled)[0])]
            raise DataError(f"{self.source}: example {example!r} has no label; {purpose} needs labels")

    def examples_fingerprint(self) -> str:
        """Return a digest of the example ids and labels, independent of their order."""
        digest = hashlib.sha256(lines_of(self.example_ids))
        digest.update(np.ascontiguousarray(self.labels, dtype="<i4").tobytes())
        return digest.hexdigest()[:16]


SomeExamples = TypeVar("SomeExamples", bound=ChainExamples)


@dataclass(frozen=True, kw_only=True)
class Chain(ChainExamples, ABC):
    """A chain whose logits may be split into parts."""

    @abstractmethod
    def each(self, ask: Callable[[ChainPart], T]) -> list[T]:
        """Ask every part the same question and return the answers in order. Parts may be in other processes."""

    @abstractmethod
    def of_models(self, indices: Sequence[int]) -> Self:
        """Return the chain of some of the models, in the order of their positions here."""

    def logits_fingerprint(self, stage: int) -> str:
        """Return a digest of one model's logits on these examples, independent of the parts they are split into."""
        return f"{sum(self.each(partial(_digest, stage))) % (1 << 64):016x}"


@dataclass(frozen=True, kw_only=True)
class ChainLogits(Chain):
    """A chain with its logits in memory.

    Attributes:
        logits: M arrays, float (N, K); -inf, or a mask, where an example has no such option.
    """

    logits: tuple[Floats, ...]

    def each(self, ask: Callable[[ChainPart], T]) -> list[T]:
        """Ask the only part."""
        return [ask(self.part)]

    def of_models(self, indices: Sequence[int]) -> Self:
        """Return the chain of some of the models, in the order of their positions here."""
        return self.with_models(indices, logits=tuple(self.logits[index] for index in indices))

    def of_rows(self, rows: Ints) -> Self:
        """Return a chain of some examples, in the order of rows, int (n,)."""
        return self.with_rows(rows, logits=tuple(rows_at(logits, rows) for logits in self.logits))

    def after_encoder(self, name: str, embeddings: Floats, costs: Floats | float) -> Self:
        """Return the chain with an encoder as its first model.

        Args:
            name: Name of the encoder.
            embeddings: Float (N, d), in place of its logits.
            costs: Costs of its calls, float64 (N,), or one for all.
        """
        encoder_costs = np.asarray(costs, dtype=np.float64)
        per_call = self.costs.per_call
        if encoder_costs.ndim == per_call.ndim - 1:
            per_call = np.concatenate([encoder_costs[..., None], per_call], axis=-1)
        else:
            of_rows = np.broadcast_to(per_call, (len(self), per_call.shape[-1]))
            per_call = np.column_stack([np.broadcast_to(encoder_costs, len(self)), of_rows])
        return replace(
            self,
            models=(name, *self.models),
            logits=(embeddings, *self.logits),
            logit_kind=("embedding", *self.logit_kinds),
            costs=Costs(self.costs.unit, per_call),
        )

    @cached_property
    def part(self) -> ChainPart:
        """Return all examples as one part."""
        return ChainPart(self.logits, self.labels, np.arange(len(self)))


def _digest(stage: int, part: ChainPart) -> int:
    def of_block(rows: slice) -> int:
        return digest_of_rows(part.logits[stage][rows], part.ranks[rows])

    return sum(in_threads(of_block, list(part.blocks())))


def digest_of_rows(logits: Floats, ranks: Ints) -> int:
    """Return the sum over rows of a hash of each row's logits and rank, modulo 2^64.

    Digests of parts add up to the digest of the whole, again modulo 2^64. A row's hash is linear in its bits with a
    multiplier for each option (Carter and Wegman, Universal classes of hash functions, 1979), mixed with its rank: it
    separates data that differ by chance, not by intent.

    Args:
        logits: Float (n, K), converted to float32; -inf counts as no option.
        ranks: Positions of the rows among all, int (n,).
    """
    single = logits.astype("<f4", copy=False)
    bits = np.where(single == -np.inf, np.uint32(0), single.view("<u4") ^ _NOT_MISSING)
    options = np.arange(1, single.shape[1] + 1, dtype=np.uint64)
    multipliers = _mixed(options * np.uint64(_STEP)) | np.uint64(1)
    of_rows = row_dot(bits.astype(np.uint64), multipliers[None])
    hashes = _mixed(of_rows + _mixed((ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)))
    return int(hashes.sum(dtype=np.uint64))


def _mixed(values: Ints) -> Ints:
    """Mix bits so that every output bit depends on all input bits, uint64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def in_order(ranks: Sequence[Ints], values: Sequence[Any]) -> Any:
    """Join the parts' values into one array in order of rank.

    Args:
        ranks: Of each part's rows, int (n,), in any order, even for a single part.
        values: Of each part, arrays (n, ...).
    """
    whole = np.empty((sum(map(len, ranks)), *values[0].shape[1:]), dtype=values[0].dtype)
    for rows, value in zip(ranks, values, strict=True):
        whole[rows] = value
    return whole
