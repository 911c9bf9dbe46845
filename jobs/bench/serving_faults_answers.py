"""What a service under faults must answer, and what became of the requests that it was asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from jobs.bench.serving_load import OK, REFUSED, RESET, TIMEOUT, LoadResult

# Kinds of answers, beside what a client meets that gets none; each is followed by " | " and more of what was said:
# the policy's id where all is right, otherwise why it is not.
RIGHT, DEGRADED, WRONG, TURNED_AWAY, SERVES_OWN, OTHER = (
    "right",
    "degraded",
    "wrong",
    "turned away",
    "Serve's 500",
    "other",
)
TURNING_AWAY = (429, 503)
AND = " | "
# All is well again once a stretch of so many seconds has this share of the rate before.
STRETCH_S = 1.0
LEAST_SHARE = 0.8
STEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Truth:
    """What a policy answers to N planted rows.

    predictions: int (M, N), of a row that stops at each stage.   stages: int (N,), where it does stop.
    """

    predictions: Ints
    stages: Ints

    @classmethod
    def of(cls, policy: Policy, gaps: Floats) -> Truth:
        """Work it out by the policy's own steps.   gaps: float32 (N, M), as planted."""
        state, predictions, stops = None, [], []
        for stage, gap in enumerate(gaps.T):
            step = policy.step(stage, np.stack([gap, np.zeros_like(gap)], axis=1), state)
            state = step.state
            predictions.append(step.predictions)
            stops.append(step.accepted)
        return cls(np.array(predictions), np.array(stops).argmax(axis=0))


@dataclass(frozen=True, slots=True)
class Judge:
    """Tells answers to one row each apart.   truths: of each policy that may have answered, by its id."""

    truths: Mapping[str, Truth]

    def __call__(self, place: int, status: int, body: bytes) -> str:
        """Return the kind of an answer to the row of that place."""
        try:
            said = json.loads(body)
        except ValueError:
            said = None
        if status == OK and isinstance(said, dict):
            return self._of_answer(place, said)
        if isinstance(said, dict):
            kind, why = TURNED_AWAY if status in TURNING_AWAY else OTHER, said.get("error")
        else:
            kind, why = SERVES_OWN if status == 500 else OTHER, body[:60].decode(errors="replace")
        return f"{kind}{AND}{why}"

    def _of_answer(self, place: int, said: Mapping[str, Any]) -> str:
        outputs = {output["name"]: output["data"][0] for output in said["outputs"]}
        told = said["parameters"]
        truth = self.truths.get(told["policy_id"])
        stage = outputs["stage"]
        if truth is None or stage != told["stage"] or outputs["prediction"] != truth.predictions[stage, place]:
            return f"{WRONG}{AND}{json.dumps(said)}"
        if told["degraded"] and stage < truth.stages[place] and told.get("reason"):
            return f"{DEGRADED}{AND}{told['reason']}"
        if not told["degraded"] and stage == truth.stages[place]:
            return f"{RIGHT}{AND}{told['policy_id']}"
        return f"{WRONG}{AND}{json.dumps(said)}"


@dataclass(frozen=True, slots=True)
class Struck:
    """A load and what disturbed it.   at_s, over_s: when that began and ended, in seconds since the load began."""

    load: LoadResult
    at_s: float
    over_s: float

    @property
    def right_mask(self) -> Bools:
        """Return which requests were answered right, without a mark."""
        return np.char.startswith(self.load.kinds, RIGHT)

    def recovery_s(self, rate: float, right: Bools, ended_s: Floats) -> float | None:
        """Return when all is well again, in seconds since the fault was over; None if it has not come to that.

        From then on every answer is right, and in the first second at a rate near the one before.
        """
        last_bad_s = max((ended_s[~right & (ended_s >= self.at_s)]).max(initial=0.0), self.over_s)
        for start in np.arange(last_bad_s, float(ended_s.max()) - STRETCH_S, STEP_S):
            within = (ended_s > start) & (ended_s <= start + STRETCH_S)
            if within.sum() >= LEAST_SHARE * rate * STRETCH_S:
                return float(start) - self.over_s
        return None

    def figures(self) -> dict[str, Any]:
        """Return what became of every request; times in seconds."""
        load, right, ended_s = self.load, self.right_mask, self.load.ended_s
        names = np.char.partition(load.kinds, AND)[:, 0]
        kinds = Counter(names.tolist())
        turned_away = names == TURNED_AWAY
        warm_s = min(1.0, self.at_s / 2)
        before = (ended_s >= warm_s) & (ended_s < self.at_s)
        rate = float(before.sum()) / (self.at_s - warm_s)
        recovery_s = self.recovery_s(rate, right, ended_s)
        well_s = float(ended_s.max()) if recovery_s is None else self.over_s + recovery_s
        after = (ended_s >= well_s) & (recovery_s is not None)
        during = (ended_s >= self.at_s) & ~after
        return {
            "sent": len(load),
            "right": kinds[RIGHT],
            "degraded": kinds[DEGRADED],
            **{f"status_{status}": int((turned_away & (load.statuses == status)).sum()) for status in TURNING_AWAY},
            "without_retry_after": int((turned_away & ~load.retry_after_mask).sum()),
            "serves_own_500": kinds[SERVES_OWN],
            "other_status": dict(Counter(map(str, load.statuses[names == OTHER].tolist()))),
            "wrong": kinds[WRONG],
            "refused": kinds[REFUSED],
            "reset": kinds[RESET],
            "hung": kinds[TIMEOUT],
            "longest_s": float(load.latency_s.max()),
            "per_s": {"before": rate, "during": _per_s(right & during, well_s - self.at_s)},
            "p99_s": {
                name: self._p99(mask) for name, mask in (("before", before), ("during", during), ("after", after))
            },
            "why": dict(Counter(load.kinds[~right].tolist()).most_common(10)),
            "struck_s": self.over_s - self.at_s,
            "recovery_s": recovery_s,
        }

    def _p99(self, mask: Bools) -> float | None:
        answered = self.load.latency_s[mask & (self.load.statuses == OK)]
        return float(np.quantile(answered, 0.99)) if len(answered) else None

    def n_outdated(self, changes: Sequence[tuple[float, float, str]]) -> int:
        """Return how many were answered by a policy that had been replaced before they were sent.

        changes: when each was asked for, when it was said to be in force, and the policy's id.
        """
        n = 0
        for (_, done_s, policy_id), next_s in zip(
            changes, [*(began for began, *_ in changes[1:]), np.inf], strict=True
        ):
            meanwhile = (self.load.started_s > done_s) & (self.load.ended_s < next_s)
            n += int((meanwhile & self.right_mask & (self.load.kinds != f"{RIGHT}{AND}{policy_id}")).sum())
        return n


def together(one: LoadResult, other: LoadResult) -> LoadResult:
    """Return two loads on one service as one, on the clock of the first."""
    later_s = other.began_at - one.began_at
    return LoadResult(
        began_at=one.began_at,
        warm_up_s=one.warm_up_s,
        seconds=one.seconds,
        started_s=np.concatenate([one.started_s, other.started_s + later_s]),
        latency_s=np.concatenate([one.latency_s, other.latency_s]),
        statuses=np.concatenate([one.statuses, other.statuses]),
        kinds=np.concatenate([one.kinds, other.kinds]),
        retry_after_mask=np.concatenate([one.retry_after_mask, other.retry_after_mask]),
    )


def _per_s(mask: Bools, seconds: float) -> float | None:
    return float(mask.sum()) / seconds if seconds > 0 else None
