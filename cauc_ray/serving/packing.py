"""Rows of several requests as one call takes them, and what comes back as each is concerned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cauc_ray.data.inputs import concat_column
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


def of_live(batch: Sequence[Group], answers: Answers) -> tuple[list[Group], Answers]:
    """Return the groups that are still waited for, and their answers."""
    live = [group for group in batch if group.live]
    if len(live) == len(batch):
        return live, answers
    return live, _only(answers, np.flatnonzero(np.concatenate([np.full(len(group), group.live) for group in batch])))


def _only(answers: Answers, rows: Ints) -> Answers:
    """Return the answers of some rows, int (m,)."""
    places = {int(row): place for place, row in enumerate(rows)}
    return Answers(
        answers.logits[rows],
        None if answers.n_options is None else answers.n_options[rows],
        None if answers.costs is None else answers.costs[rows],
        {places[row]: reason for row, reason in answers.failures.items() if row in places},
    )
