"""Rows of several requests as one call takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.cascade.parcels import Part
from cauc_ray.data.blocks import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.flight import Group, Payload


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a stage is asked.

    parcels: what the parts point into, each columns or a reference to some.   policies: that decide, by the parts'
    keys.   good_row: one that the stage has answered before, to tell a bad input from a broken replica; None where the
    replica's own will do.
    """

    parts: Sequence[Part]
    parcels: Sequence[Any]
    policies: Mapping[str, Policy]
    good_row: Batch | None = None


def packed(
    batch: Sequence[Group],
    share: Callable[[Batch], Any],
    keeps: Callable[[Group], Bools | None],
    good_row: Batch | None = None,
) -> StageCall:
    """Return groups' rows as a call: what is shared already by reference, all else gathered in one parcel.

    share: puts columns where every stage reads them and returns the reference; None for what is too small. The
    groups point to the gathered columns from then on.   keeps: which of a group's rows shall bring back their state
    even if they stop, bool (m,), None for none.
    """
    _gather(batch, share)
    numbers: dict[int, int] = {}
    parcels: list[Any] = []
    parts = []
    for group in batch:
        payload, flight = group.payload, group.flight
        if id(payload) not in numbers:
            numbers[id(payload)] = len(parcels)
            parcels.append(payload.columns if payload.ref is None else payload.ref)
        parts.append(
            Part.of(
                numbers[id(payload)],
                group.places,
                flight.key,
                state=group.state,
                keeps=keeps(group),
                wants_scores=flight.wants_scores,
            )
        )
    return StageCall(parts, parcels, {group.flight.key: group.flight.policy for group in batch}, good_row)


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
