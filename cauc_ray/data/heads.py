"""Joins of rows without logits: several files of a model, and several models of a chain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.logit_part import ModelHead, head_of
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import read_seen
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainPart
from cauc_ray.numbers.types import Bools, Ints


def read_head(files: Sequence[AnyPath], model: str, where: str) -> ModelHead:
    """Read all columns but the logits of a model's files. Raises DataError, which may be prefixed with where."""
    heads = [head_of(*read_seen(file, ("example_id", "label", "cost")), model) for file in files]
    return joined_head(heads, where)


def joined_head(heads: Sequence[ModelHead], where: str) -> ModelHead:
    """Return the rows of several files in order of example_id.

    Raises DataError, prefixed with where, for an empty split, a duplicate id, or costs in only some of the files.
    """
    ids = pa.chunked_array([head.example_ids for head in heads], type=pa.string()).combine_chunks()
    if len(ids) == 0:
        raise DataError(f"{where}: the split is empty")
    order = pc.array_sort_indices(ids)
    ids = ids.take(order)
    doubled = pc.equal(ids[1:], ids[:-1])
    if pc.any(doubled).as_py():
        example = ids[pc.index(doubled, True).as_py()].as_py()
        files = [h.files[0].path.name for h in heads if pc.is_in(pa.scalar(example), value_set=h.example_ids).as_py()]
        raise DataError(f"{where}: example {example!r} is a duplicate ({', '.join(files)})")
    if len({head.costs is None for head in heads}) > 1:
        raise DataError(f"{where}: column 'cost' is missing from some files")
    positions = order.to_numpy(zero_copy_only=False).astype(np.int64)
    costs = [head.costs for head in heads if head.costs is not None]
    return ModelHead(
        files=tuple(file for head in heads for file in head.files),
        example_ids=ids,
        labels=np.concatenate([head.labels for head in heads])[positions],
        costs=np.concatenate(costs)[positions] if costs else None,
        positions=positions,
    )


def joined_labels(source: str, models: Sequence[str], rows: Sequence[ModelHead]) -> Ints:
    """Return the labels that the models' rows agree on, int32 (N,).

    Raises DataError naming an example that a model lacks, or for which two models have different labels.
    """
    first = rows[0]
    labels = first.labels.copy()
    for model, own in zip(models[1:], rows[1:], strict=True):
        _require_same_ids(source, models[0], first, model, own)
        differ = (labels != own.labels) & (labels != UNKNOWN_LABEL) & (own.labels != UNKNOWN_LABEL)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"{source}: example {first.example_ids[row].as_py()!r} has label {labels[row]} for model "
                f"{models[0]!r} and {own.labels[row]} for model {model!r}"
            )
        labels = np.where(labels == UNKNOWN_LABEL, own.labels, labels)
    return labels


def _require_same_ids(source: str, first: str, expected: ModelHead, model: str, rows: ModelHead) -> None:
    if expected.example_ids.equals(rows.example_ids):
        return
    for a, b, has, lacks in (
        (expected.example_ids, rows.example_ids, first, model),
        (rows.example_ids, expected.example_ids, model, first),
    ):
        missing = pc.invert(pc.is_in(a, value_set=b))
        if pc.any(missing).as_py():
            example = a[pc.index(missing, True).as_py()].as_py()
            raise DataError(
                f"{source}: example {example!r} of model {has!r} is missing from model {lacks!r} "
                f"({pc.sum(missing).as_py()} in all)"
            )


def unfit_row(
    models: Sequence[str], n_options: Sequence[Ints], part: ChainPart, *, gaps: bool
) -> tuple[int, str] | None:
    """Return the lowest rank of a row that cannot be used, and why; None if there is none.

    Such a row has another number of options in one model than in the first, or shares no possible option among all
    models.   n_options: int (n,), of each model.   gaps: whether some row of some model has a logit of -inf.
    """
    found, first = [], n_options[0]
    for model, own in zip(models[1:], n_options[1:], strict=True):
        differ = np.flatnonzero(own != first)
        if len(differ):
            row = differ[part.ranks[differ].argmin()]
            why = f"has {first[row]} options for model {models[0]!r} and {own[row]} for model {model!r}"
            found.append((int(part.ranks[row]), why))
    for block in part.blocks() if gaps else ():
        shared: Bools = np.logical_and.reduce([np.isfinite(logits[block]) for logits in part.logits]).any(axis=1)
        if not shared.all():
            found.append((int(part.ranks[block][~shared].min()), "has no option that is possible for all models"))
    return min(found, default=None)
