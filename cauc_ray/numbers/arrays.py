"""Checks of logits from arrays or from a table, and chains made of arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits, Costs
from cauc_ray.numbers.logits import (
    MUST_BE_DECLARED,
    NOT_PROBABILITIES,
    UNLISTED_LOG,
    LogitKind,
    SumsToOne,
    as_logits,
    hold_probabilities,
    real_options,
)
from cauc_ray.numbers.rows import row_max
from cauc_ray.numbers.types import Bools, Floats, Ints


def refuse_rows(where: str, ids: Sequence[Any], bad: Bools, why: Callable[[int], str]) -> None:
    """Raise DataError naming the first example for which bad, bool (N,), is true."""
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise DataError(f"{where}, example {str(ids[row])!r}: {why(row)}")


def check_rows(
    where: str,
    ids: Sequence[Any],
    logits: Floats,
    n_options: Ints,
    labels: Ints,
    known: Bools,
    kind: LogitKind | None,
) -> tuple[Floats, SumsToOne]:
    """Check rows of logits; return them as logits, and statistics that detect undeclared probabilities.

    ids: (N,), for messages.   logits: float32 (N, K), -inf beyond a row's options.   n_options: int (N,).
    labels: int (N,).   known: bool (N,), which examples have one.   kind: of the rows, None to leave them unchanged.
    Raises DataError naming the example for NaN or +inf, a row without options, a label outside its row's options, and
    rows that are declared as probabilities but are not.
    """
    refuse_rows(where, ids, n_options == 0, lambda row: "the row has no logits")
    # Each row's largest logit is NaN or +inf if any of them is, and -inf if no option is left.
    largest = row_max(logits)
    refuse_rows(where, ids, ~np.isfinite(largest), lambda row: "a logit is NaN or +inf, or all are -inf")
    if kind == "probabilities":
        refuse_rows(where, ids, ~hold_probabilities(real_options(logits)), lambda row: NOT_PROBABILITIES)
    if kind is not None:
        logits = as_logits(logits, kind)
    sums = SumsToOne.of(logits) if kind in MUST_BE_DECLARED else SumsToOne()
    outside = known & ((labels < 0) | (labels >= n_options))
    refuse_rows(where, ids, outside, lambda row: f"label {labels[row]} is outside its {n_options[row]} options")
    chosen = logits[np.arange(len(labels)), np.clip(labels, 0, n_options - 1)]
    impossible = known & np.isneginf(chosen)
    remedy = f"; for 'not returned by the server' write {UNLISTED_LOG:g}" if kind == "log-probabilities" else ""
    refuse_rows(where, ids, impossible, lambda row: f"the logit of its label {labels[row]} is -inf or a mask{remedy}")
    return logits, sums


def require_no_probabilities(where: str, sums: SumsToOne) -> None:
    """Raise DataError, prefixed with where, for rows that are probabilities without being declared so."""
    if sums.certain:
        raise DataError(
            f"{where}: the rows are probabilities (none below 0, each row sums to one), not logits; declare them with "
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

    arrays: by model, (N, K): numpy arrays, lists, data frames with a column for each option, or N vectors of any
    lengths; row i of each is example i.   models: the chain, cheapest first.   labels: int (N,), None if unknown.
    kinds: of each model's rows.   example_ids: (N,), unique, converted to str; without them row i is named "i".
    Raises ConfigError for a model that has no array, DataError as check_rows does and if shapes disagree.
    """
    missing = next((model for model in models if model not in arrays), None)
    if missing is not None:
        raise ConfigError(f"{source}: {unknown_name('model', missing, arrays)}")
    rows = {model: read_rows(f"{source}: model {model!r}", arrays[model]) for model in models}
    first, (expected, n_options) = models[0], rows[models[0]]
    n, k = expected.shape
    ids = _ids(source, example_ids, n)
    named = {model: columns for model in models if (columns := _columns(arrays[model]))}
    own_labels = _labels(source, labels, n)
    known = own_labels != UNKNOWN_LABEL
    logits = []
    for model in models:
        where, (values, lengths) = f"{source}: model {model!r}", rows[model]
        if values.shape != (n, k) or (lengths != n_options).any():
            raise DataError(f"{where} has logits of shape {values.shape}, model {first!r} of shape {(n, k)}")
        other, columns = next(iter(named.items()), (model, []))
        if named.get(model, columns) != columns:
            raise DataError(f"{where} has the columns {named[model]}, model {other!r} has {columns}")
        checked, sums = check_rows(where, ids, values, lengths, own_labels, known, kinds[model])
        require_no_probabilities(where, sums)
        logits.append(checked)
    return ChainLogits(
        models=tuple(models),
        logits=tuple(logits),
        example_ids=ids,
        labels=own_labels,
        costs=costs,
        per_call_costs=False,
        source=source,
        logit_kind=tuple(kinds[model] for model in models),
    )


def read_rows(where: str, values: Any) -> tuple[Floats, Ints]:
    """Return rows as float32 (N, K), -inf beyond a row's options, and each row's number of options, int (N,).

    values: an array, or N vectors.   where: begins the message of a DataError.
    """
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{where}: masked arrays are not supported; use -inf where a row has no such option")
    try:
        if hasattr(values, "__array__"):  # arrays, tensors, frames and columns
            values = np.asarray(values)
            if values.dtype == object and values.ndim == 1:
                values = list(values)  # a column of vectors
        with np.errstate(over="ignore"):  # values outside float32's range are refused later, or are masks
            if not isinstance(values, np.ndarray) and len({len(row) for row in values}) > 1:
                lengths = np.array([len(row) for row in values])
                padded = np.full((len(values), lengths.max()), -np.inf, dtype=np.float32)
                flat = np.concatenate([np.asarray(own) for own in values])
                padded[np.arange(lengths.max()) < lengths[:, None]] = _floats(flat)
                return padded, lengths
            logits = _floats(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor that needs its gradient
        raise DataError(f"{where}: the logits are not numbers of shape (N, K): {error}") from error
    if logits.ndim != 2 or not logits.size:
        raise DataError(f"{where}: logits must be an array (N, K) with at least one row, got shape {logits.shape}")
    return logits, np.full(len(logits), logits.shape[1])


def _floats(given: npt.NDArray[Any]) -> Floats:
    """Return numbers as float32. Raises TypeError for others, such as texts, which numpy would parse."""
    if given.dtype.kind not in "biufOV":  # V: bfloat16
        raise TypeError(f"their dtype is {given.dtype}")
    return given.astype(np.float32, copy=False)


def _columns(values: Any) -> list[str]:
    """Return the column names of a data frame, None for an array."""
    return list(map(str, values.columns)) if hasattr(values, "to_numpy") and hasattr(values, "columns") else []


def _labels(source: str, labels: Any, n: int) -> Ints:
    if labels is None:
        return np.full(n, UNKNOWN_LABEL, dtype=np.int32)
    given = np.asarray(labels)
    if given.shape != (n,):
        raise DataError(f"{source}: labels of shape {given.shape} for {n} examples")
    with np.errstate(invalid="ignore"):
        try:
            whole = given.astype(np.int32)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{source}: labels must be integers, the indices of options: {error}") from error
    if (whole != given).any():  # also if the number does not fit int32
        raise DataError(f"{source}: labels must be integers, the indices of options; got {given[whole != given][0]}")
    return whole


def _ids(source: str, given: Any, n: int) -> tuple[str, ...]:
    ids = tuple(map(str, range(n) if given is None else given))
    if len(ids) != n:
        raise DataError(f"{source}: {len(ids)} example ids for {n} examples")
    if len(set(ids)) < n:
        double = next(example for example, count in Counter(ids).items() if count > 1)
        raise DataError(f"{source}: example {double!r} is a duplicate")
    return ids
