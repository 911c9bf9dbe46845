"""The result of a call: what a stage's model answered, and what the policies decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from cauc_ray.errors import printable
from cauc_ray.numbers.types import Bools, Floats, Ints

# Who is at fault where no row of a call was answered: the replica (it fails on a row known to be good, too), the stage
# (a wrong key, a server that is down), the caller (the worker does not have a policy), or unknown.
Fault: TypeAlias = Literal["replica", "stage", "policy", "unknown"]


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answers to a call of n rows; what the rows that go on carry is returned next to it.

    predictions: int32 (n,).   confidences: float64 (n,).   accepted: bool (n,), which rows stop.   costs: float64 (n,),
    of this call.   started_at: seconds since the epoch.   compute_s: wall time in model and policy, None where it is
    unknown.   policy_s: of that, the policy's step.   device_s: seconds of forward passes on a GPU, None where the
    model measures none.   node, replica: where it was computed.
    error, fault: why no row was answered, and who is at fault; the arrays are empty then.   failures: why some rows
    have no answer, by position; they are neither accepted nor carried on.   raised: of those, rows on which the model
    raised while it answered others.
    n_batches: that the model was given one after the other.
    next: int8 (n,), the stage that each row goes to if it does not stop; None for the one after.
    carried: bool (n,), the rows whose state is returned next to it, in their order.   state_bytes: of one such row.
    scores: float64 (n, K), calibrated logits; None where no part wants them.   likeliest: int16 (n,), as Step.likeliest
    returns them; None where no policy has a reference.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    costs: Floats
    started_at: float
    compute_s: float | None
    policy_s: float
    device_s: float | None
    node: str
    error: str | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    state_bytes: float = 0.0
    fault: Fault | None = None
    raised: frozenset[int] = frozenset()
    replica: str = ""
    carried: Bools | None = None
    scores: Floats | None = None
    likeliest: Ints | None = None
    next: Ints | None = None
    n_batches: int = 1

    @classmethod
    def joined(cls, results: Sequence[CallResult]) -> CallResult:
        """Return the results of a call's batches as one, the first one of which no row was answered if there is one.

        Calibrated logits are left out.
        """
        failed = next((result for result in results if result.error is not None), None)
        if len(results) == 1 or failed is not None:
            return failed or results[0]
        first, starts = results[0], np.cumsum([0, *(len(result.accepted) for result in results)]).tolist()
        device_s = [result.device_s for result in results if result.device_s is not None]
        return replace(
            first,
            predictions=np.concatenate([result.predictions for result in results]),
            confidences=np.concatenate([result.confidences for result in results]),
            accepted=np.concatenate([result.accepted for result in results]),
            costs=np.concatenate([result.costs for result in results]),
            compute_s=sum(result.compute_s or 0.0 for result in results),
            policy_s=sum(result.policy_s for result in results),
            device_s=sum(device_s) if device_s else None,
            failures={
                start + row: why
                for start, result in zip(starts, results, strict=False)
                for row, why in result.failures.items()
            },
            raised=frozenset(
                start + row for start, result in zip(starts, results, strict=False) for row in result.raised
            ),
            state_bytes=max(result.state_bytes for result in results),
            carried=_concatenated([result.carried for result in results], results, False),
            scores=None,
            likeliest=_concatenated([result.likeliest for result in results], results, -1),
            next=_concatenated([result.next for result in results], results, -1),
            n_batches=sum(result.n_batches for result in results),
        )

    @classmethod
    def broken(
        cls,
        started_at: float,
        node: str,
        error: str,
        fault: Fault = "unknown",
        *,
        replica: str = "",
        compute_s: float | None = None,
    ) -> CallResult:
        """Return the result of a call that nothing came back of but an error."""
        nothing = np.zeros(0)
        return cls(
            predictions=np.zeros(0, dtype=np.int32),
            confidences=nothing,
            accepted=np.zeros(0, dtype=bool),
            costs=nothing,
            started_at=started_at,
            compute_s=compute_s,
            policy_s=0.0,
            device_s=None,
            node=node,
            error=printable(error),
            fault=fault,
            replica=replica,
        )

    @property
    def n_answered(self) -> int:
        """Return how many rows the model answered."""
        return len(self.accepted) - len(self.failures)

    @property
    def n_deferred(self) -> int:
        """Return how many rows go on."""
        return self.n_answered - int(self.accepted.sum())


def _concatenated(values: Sequence[Any], results: Sequence[CallResult], unknown: int) -> Any:
    """Return arrays (n,) of batches as one; None if no batch has one, unknown for those of a batch that has none."""
    known = next((own for own in values if own is not None), None)
    if known is None:
        return None
    return np.concatenate(
        [
            np.full(len(result.accepted), unknown, known.dtype) if own is None else own
            for own, result in zip(values, results, strict=True)
        ]
    )
