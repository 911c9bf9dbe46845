"""Checks of logits from arrays or from a table, and chains made of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits, Costs
from cauc_ray.numbers.ids import NumberIds, duplicate_of, ids_of
from cauc_ray.numbers.logits import (
    MUST_BE_DECLARED,
    NOT_PROBABILITIES,
    UNLISTED_LOG,
    LogitKind,
    SumsToOne,
    as_logits,
    hold_probabilities,
    laid_out,
    real_options,
)
from cauc_ray.numbers.rows import in_columns, row_max, row_values
from cauc_ray.numbers.types import Bools, Floats, Ints


def refuse_rows(place: str, ids: Sequence[Any], bad: Bools, why: Callable[[int], str]) -> None:
    """Raise DataError naming the first example for which bad, bool (N,), is true."""
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(f"{place}, example {str(ids[row])!r}: {why(row)}")


def check_rows(
    place: str,
    ids: Sequence[Any],
    logits: Floats,
    n_options: Ints,
    labels: Ints,
    labelled: Bools,
    kind: LogitKind | None,
) -> tuple[Floats, SumsToOne]:
    """Check rows of logits; return them as logits, and statistics that detect undeclared probabilities.

    Args:
        place: Model and split, for messages.
        ids: (N,), for messages.
        logits: Float32 (N, K), -inf beyond a row's options.
        n_options: Int (N,).
        labels: Int (N,).
        labelled: Which examples have a label, bool (N,).
        kind: Kind of the rows; None to leave them unchanged.

    Raises:
        DataError: A value is NaN or +inf, a row has no option, a label is outside its row's options, or rows are
            declared as probabilities but are not; names the example.
    """
    # Each row's largest logit is NaN or +inf if any of them is, and -inf if no option is left.
    finite = np.isfinite(row_max(logits))
    if not np.logical_and.reduce(finite):
        refuse_rows(place, ids, n_options == 0, lambda row: "the row has no logits")
        refuse_rows(place, ids, ~finite, lambda row: "a logit is NaN or +inf, or all are -inf")
    if kind == "probabilities":
        refuse_rows(place, ids, ~hold_probabilities(real_options(logits)), lambda row: NOT_PROBABILITIES)
    if kind is not None:
        logits = as_logits(logits, kind)
    sums = SumsToOne.of(logits) if kind in MUST_BE_DECLARED else SumsToOne()
    if labelled.any():
        outside = labelled & ((labels < 0) | (labels >= n_options))
        refuse_rows(place, ids, outside, lambda row: f"label {labels[row]} is outside its {n_options[row]} options")
        chosen = row_values(logits, np.clip(labels, 0, n_options - 1))
        impossible = labelled & np.isneginf(chosen)
        remedy = f"; for 'not returned by the server' write {UNLISTED_LOG:g}" if kind == "log-probabilities" else ""
        lacking = "the logit of its label {} is -inf or a mask{}"
        refuse_rows(place, ids, impossible, lambda row: lacking.format(labels[row], remedy))
    return logits, sums


def require_no_probabilities(place: str, sums: SumsToOne) -> None:
    """Raise DataError, prefixed with where, for rows that are probabilities without being declared so."""
    if sums.certain:
        raise DataError(
            f"{place}: the rows are probabilities (none below 0, each row sums to one), not logits; declare them with "
            '--logit-kind probabilities (Python: logit_kind="probabilities"), or as the "logit_kind" of the model in '
            "the table's pool.json"
        )


def array_chain(
    arrays: Mapping[str, Any],
    models: Sequence[str],
    labels: Any,
    *,
    costs: Costs,
    kinds: Mapping[str, LogitKind],
    example_ids: Any = None,
    source: str = "the arrays",
) -> ChainLogits:
    """Return a chain made of arrays, checked and rounded to float32 as a logit table's rows are.

    Args:
        arrays: By model, (N, K): numpy arrays, lists, data frames with a column for each option, or N vectors of any
            lengths; row i of each is example i.
        models: The chain, cheapest first.
        labels: Int (N,), None if unknown.
        costs: Costs of the models' calls.
        kinds: Kind of each model's rows.
        example_ids: (N,), unique, converted to str; without them row i is named "i".
        source: Name of the arrays, for messages.

    Raises:
        ConfigError: A model has no array.
        DataError: As check_rows does, or shapes disagree.
    """
    missing = next((model for model in models if model not in arrays), None)
    if missing is not None:
        raise ConfigError(f"{source}: {unknown_name('model', missing, arrays)}")
    rows = {model: read_rows(f"{source}: model {model!r}", arrays[model]) for model in models}
    first, (expected, n_options) = models[0], rows[models[0]]
    n, k = expected.shape
    ids = row_ids(source, example_ids, n)
    named = {model: columns for model in models if (columns := _columns(arrays[model]))}
    all_labels = _labels(source, labels, n)
    labelled = all_labels != UNKNOWN_LABEL
    logits = []
    for model in models:
        place, (values, lengths) = f"{source}: model {model!r}", rows[model]
        if values.shape != (n, k) or (lengths != n_options).any():
            raise DataError(f"{place} has logits of shape {values.shape}, model {first!r} of shape {(n, k)}")
        first_named, columns = next(iter(named.items()), (model, []))
        if named.get(model, columns) != columns:
            raise DataError(f"{place} has the columns {named[model]}, model {first_named!r} has {columns}")
        checked, sums = check_rows(place, ids, values, lengths, all_labels, labelled, kinds[model])
        require_no_probabilities(place, sums)
        logits.append(in_columns(checked))
    return ChainLogits(
        models=tuple(models),
        logits=tuple(logits),
        example_ids=ids,
        labels=all_labels,
        costs=costs,
        per_call_costs=False,
        source=source,
        logit_kind=tuple(kinds[model] for model in models),
    )


def read_rows(place: str, values: Any) -> tuple[Floats, Ints]:
    """Return rows as float32 (N, K), -inf beyond a row's options, and each row's number of options, int (N,).

    Args:
        place: Model and split, for messages.
        values: An array, or N vectors.

    Raises:
        DataError: The values are not numbers of shape (N, K).
    """
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{place}: masked arrays are not supported; use -inf where a row has no such option")
    try:
        if hasattr(values, "__array__"):  # arrays, tensors, frames and columns
            values = np.asarray(values)
            if values.dtype == object and values.ndim == 1:
                values = list(values)  # a column of vectors
        with np.errstate(over="ignore"):  # values outside float32's range are refused later, or are masks
            if not isinstance(values, np.ndarray) and len({len(row) for row in values}) > 1:
                lengths = np.array([len(row) for row in values])
                return laid_out(_floats(np.concatenate([np.asarray(vector) for vector in values])), lengths), lengths
            logits = _floats(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that needs its gradient
        raise DataError(f"{place}: the logits are not numbers of shape (N, K): {error}") from error
    if logits.ndim != 2 or not logits.size:
        raise DataError(f"{place}: logits must be an array (N, K) with at least one row, got shape {logits.shape}")
    return in_columns(logits), np.full(len(logits), logits.shape[1])


def _floats(values: npt.NDArray[Any]) -> Floats:
    """Return numbers as float32. Raises TypeError for others, such as texts, which numpy would parse."""
    if values.dtype.kind not in "biufOV":  # V: bfloat16
        raise TypeError(f"their dtype is {values.dtype}")
    return values.astype(np.float32, copy=False)


def _columns(values: Any) -> list[str]:
    """Return the column names of a data frame, None for an array."""
    return list(map(str, values.columns)) if hasattr(values, "to_numpy") and hasattr(values, "columns") else []


def _labels(source: str, labels: Any, n: int) -> Ints:
    if labels is None:
        return np.full(n, UNKNOWN_LABEL, dtype=np.int32)
    values = np.asarray(labels)
    if values.shape != (n,):
        raise DataError(f"{source}: expected one label for each of {n} examples, got labels of shape {values.shape}")
    try:
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.int32)
            is_whole = bool((whole == values).all())  # no number that int32 does not hold is
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        wrong = next((label for label in values.tolist() if not _is_index(label)), values[0])
        raise DataError(
            f"{source}: labels must be integers, the indices of options ({UNKNOWN_LABEL} where unknown), got {wrong!r}"
        )
    return whole


def _is_index(label: Any) -> bool:
    return isinstance(label, Real) and bool(abs(float(label)) < 2**31 and float(label) % 1 == 0)


def row_ids(source: str, values: Any, n: int) -> Sequence[str]:
    """Return the ids of n rows, (n,), their numbers where values is None. Raises DataError unless they are unique."""
    if values is None:
        return NumberIds(np.arange(n))
    ids = ids_of(values)
    if len(ids) != n:
        raise DataError(f"{source}: {len(ids)} example ids for {n} examples")
    duplicate = duplicate_of(ids)
    if duplicate is not None:
        raise DataError(f"{source}: example {duplicate!r} is a duplicate")
    return ids
