"""Rows of several requests as one call takes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.cascade.bundles import Part
from cauc_ray.cascade.isolation import row_of
from cauc_ray.cascade.rows import Call, Rows
from cauc_ray.data.blocks import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.request_state import Payload, RequestState

# Which of some rows at a stage shall bring back their state even if they stop, bool (m,); None for none.
Keeps = Callable[[RequestState, int, int], Bools | None]


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a stage is asked.

    bundles: what the parts point into, each columns or a reference to some.   policies: that decide, by the parts'
    keys.   good_row: one that the stage has answered before, to tell a bad input from a broken replica; None where the
    replica has one.   replica: which one is asked.   router: who asks.   needed_replicas: of this stage, by it.
    """

    parts: Sequence[Part]
    bundles: Sequence[Any]
    policies: Mapping[str, Policy]
    good_row: Batch | None = None
    replica: str = ""
    router: str = ""
    needed_replicas: float = 0.0


def packed(call: Call, replica: str, share: Callable[[Batch], Any], keeps: Keeps) -> StageCall:
    """Return a call as a stage takes it: what is shared already by reference, all else gathered in one bundle.

    share: puts columns where every stage reads them and returns the reference; None for what is too small. Requests
    point to the gathered columns from then on.
    """
    good_row = None if call.good_row is None else row_of(call.good_row.owner.columns, int(call.good_row.indices[0]))  # type: ignore[attr-defined]
    if call.probe:  # its request may be over
        (rows,) = call.rows
        request, state = _request(rows), None if rows.source is None else rows.source[rows.places]
        part = Part.of(0, np.zeros(1, dtype=np.intp), request.key, state=state)
        one = row_of(request.columns, int(rows.indices[0]))
        return StageCall([part], [one], {request.key: request.policy}, good_row, replica)
    _gather(call.rows, share)
    numbers: dict[int, int] = {}
    bundles: list[Any] = []
    parts = []
    for rows in call.rows:
        request = _request(rows)
        kept = keeps(request, call.stage, len(rows))
        held_by = request.held_by[rows.indices]
        alike = len(rows) == 1 or bool((held_by == held_by[0]).all())
        for held in held_by[:1] if alike else np.unique(held_by):
            own = slice(None) if alike else held_by == held
            payload = request.payloads[held]
            if id(payload) not in numbers:
                numbers[id(payload)] = len(bundles)
                bundles.append(payload.columns if payload.ref is None else payload.ref)
            parts.append(
                Part.of(
                    numbers[id(payload)],
                    request.places[rows.indices[own]],
                    request.key,
                    state=None if rows.source is None else rows.source[rows.places[own]],
                    keeps=None if kept is None else kept[own],
                    wants_scores=request.wants_scores,
                )
            )
    policies = {request.key: request.policy for request in map(_request, call.rows)}
    return StageCall(parts, bundles, policies, good_row, replica)


def _gather(batch: Sequence[Rows], share: Callable[[Batch], Any]) -> None:
    local = [(request, rows.indices[own]) for rows in batch if (own := _local(request := _request(rows), rows)).any()]
    if not local:
        return
    columns = {
        name: concat_column([request.columns[name][indices] for request, indices in local])
        for name in local[0][0].columns
    }
    ref = share(columns)
    gathered = Payload(columns if ref is None else None, ref)
    start = 0
    for request, indices in local:
        request.payloads.append(gathered)
        request.held_by[indices] = len(request.payloads) - 1
        request.places[indices] = np.arange(start, start + len(indices))
        start += len(indices)


def _local(request: RequestState, rows: Rows) -> Bools:
    """Return which rows' columns lie in this process, bool (m,)."""
    here = np.array([payload.ref is None for payload in request.payloads])
    return here[request.held_by[rows.indices]]


def _request(rows: Rows) -> RequestState:
    assert isinstance(rows.owner, RequestState)
    return rows.owner
