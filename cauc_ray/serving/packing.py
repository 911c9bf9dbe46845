"""Rows of several requests as one call takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from cauc_ray.cascade.bundles import Part
from cauc_ray.cascade.isolation import row_of
from cauc_ray.cascade.rows import Call, Rows
from cauc_ray.data.blocks import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.policy import Policy, joined_states
from cauc_ray.serving.request_state import RequestState

# Which of some rows at a stage return their state even if they stop, bool (m,); None for none.
Keeps = Callable[[RequestState, int, int], Bools | None]


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a stage is asked.

    columns: of the rows, in their order, each (n, ...).   parts: neighbouring rows of which the same is asked.
    policies: that decide, by the parts' keys.   good_row: one that the stage has answered before, to distinguish a
    bad input from a broken replica; None where the replica has one.   replica: which one is asked.   router: who asks.
    needed_replicas: of this stage, by it.
    """

    columns: Batch
    parts: Sequence[Part]
    policies: Mapping[str, Policy]
    good_row: Batch | None = None
    replica: str = ""
    router: str = ""
    needed_replicas: float = 0.0


def packed(call: Call, replica: str, keeps: Keeps, *, router: str, needed_replicas: float) -> StageCall:
    """Return a call as a stage takes it."""
    parts, start = [], 0
    for _, alike in groupby(call.rows, _asked):
        rows = list(alike)
        n = sum(map(len, rows))
        parts.append(_part(rows, slice(start, start + n), call.stage, keeps))
        start += n
    requests = [_request(rows) for rows in call.rows]
    own = [slice(None) if len(rows) == rows.owner.n else rows.indices for rows in call.rows]
    return StageCall(
        columns={
            name: concat_column([request.columns[name][rows] for request, rows in zip(requests, own, strict=True)])
            for name in requests[0].columns
        },
        parts=parts,
        policies={request.key: request.policy for request in requests},
        good_row=None if call.good_row is None else row_of(_request(call.good_row).columns, call.good_row.indices[0]),
        replica=replica,
        router=router,
        needed_replicas=needed_replicas,
    )


def _part(alike: Sequence[Rows], positions: slice, stage: int, keeps: Keeps) -> Part:
    """Return what is asked of neighbouring rows; the same is asked of all of them."""
    kept = [keeps(_request(rows), stage, len(rows)) for rows in alike]
    carried = [(len(rows), None if rows.source is None else rows.source[rows.positions]) for rows in alike]
    first = _request(alike[0])
    return Part(
        0,
        positions,
        first.key,
        state=joined_states(carried),
        keeps=None
        if all(one is None for one in kept)
        else np.concatenate(
            [np.zeros(n, bool) if one is None else one for (n, _), one in zip(carried, kept, strict=True)]
        ),
        wants_scores=first.wants_scores,
    )


def _asked(rows: Rows) -> tuple[str, bool]:
    request = _request(rows)
    return request.key, request.wants_scores


def _request(rows: Rows) -> RequestState:
    assert isinstance(rows.owner, RequestState)
    return rows.owner
