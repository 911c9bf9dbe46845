"""Rows of several requests as one call takes them, and what comes back as each is concerned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cauc_ray.data.blocks import concat_column
from cauc_ray.execution.stage import Part
from cauc_ray.models.answers import Answers, Batch
from cauc_ray.numbers.types import Ints
from cauc_ray.serving.flight import Group, Payload


def packed(batch: Sequence[Group], share: Callable[[Batch], Any]) -> tuple[list[Part], list[Any]]:
    """Return groups' rows as parts of parcels: what is shared already by reference, all else gathered in one.

    share: puts columns where every stage reads them and returns the reference; None for what is too small. The
    groups point to the gathered columns from then on.
    """
    _gather(batch, share)
    numbers: dict[int, int] = {}
    parcels: list[Any] = []
    parts = []
    for group in batch:
        payload = group.payload
        if id(payload) not in numbers:
            numbers[id(payload)] = len(parcels)
            parcels.append(payload.columns if payload.ref is None else payload.ref)
        parts.append(Part.of(numbers[id(payload)], group.places))
    return parts, parcels


def _gather(batch: Sequence[Group], share: Callable[[Batch], Any]) -> None:
    local = [(group, group.payload.columns) for group in batch if group.payload.columns is not None]
    if not local:
        return
    columns = {
        name: concat_column([own[name][group.places] for group, own in local]) for name in local[0][0].flight.columns
    }
    ref = share(columns)
    gathered = Payload(columns if ref is None else None, ref)
    start = 0
    for group, _ in local:
        group.payload, group.places = gathered, np.arange(start, start + len(group))
        start += len(group)


def of_groups(batch: Sequence[Group], answers: Answers, chosen: Sequence[bool]) -> tuple[list[Group], Answers]:
    """Return some groups of a call, and their answers.   chosen: which of the groups, in their order."""
    if all(chosen):
        return list(batch), answers
    mask = np.repeat(np.array(chosen), [len(group) for group in batch])
    return [group for group, is_chosen in zip(batch, chosen, strict=True) if is_chosen], _only(
        answers, np.flatnonzero(mask)
    )


def _only(answers: Answers, rows: Ints) -> Answers:
    """Return the answers of some rows, int (m,)."""
    places = {int(row): place for place, row in enumerate(rows)}
    return Answers(
        answers.logits[rows],
        None if answers.n_options is None else answers.n_options[rows],
        None if answers.costs is None else answers.costs[rows],
        {places[row]: reason for row, reason in answers.failures.items() if row in places},
    )
