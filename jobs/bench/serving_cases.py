"""What the serving part asks of whom: the models of each case, its loads, the requests and their right answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cauc_ray.errors import ExecutionError
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import EASY_GAP, HARD_GAP, column_model, planted_rows, stage, write_pool, write_table

MODELS = ("small", "large")
# The fixed rule of the hand-written side: a row whose small gap is nearer to 0 goes on.
SURE_GAP = (EASY_GAP + HARD_GAP) / 2
BATCH, WAIT_S = 64, 0.005
# Rows are shuffled within blocks of so many: any stretch of requests then defers nearly the planted share.
BLOCK = 50

OURS, BATCHED, CALL_EACH = "cauc-ray", "batched", "call-each"
# Loads, by how many clients there are; options say how many, but for one.
ONE, FEW, MANY = "one", "few", "many"


@dataclass(frozen=True, slots=True)
class Case:
    """Models and loads.   takes: seconds of a call and of a row, for each model.   loads: which sides take turns."""

    takes: tuple[tuple[float, float], ...]
    loads: dict[str, tuple[str, ...]]

    @property
    def sides(self) -> tuple[str, ...]:
        """Return the sides that any load is on."""
        return tuple(dict.fromkeys(side for sides in self.loads.values() for side in sides))

    @property
    def models(self) -> list[dict[str, Any]]:
        """Return the two models as a pool has them."""
        return [column_model(place, per_call=call, per_row=row) for place, (call, row) in enumerate(self.takes)]


CASES = {
    # What an ordinary cascade takes: what the router adds is to be small next to it.
    "sleeping": Case(
        takes=((0.005, 0.0), (0.020, 0.001)), loads={FEW: (OURS, BATCHED), MANY: (OURS, BATCHED, CALL_EACH)}
    ),
    # Models of no time: what is left is what serving takes.
    "instant": Case(takes=((0.0, 0.0), (0.0, 0.0)), loads={ONE: (OURS, BATCHED)}),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What one session measures.   clients: how many each load has.   seconds, warm_up_s: of a turn."""

    cases: Sequence[str]
    clients: dict[str, int]
    rows: int
    deferral: float
    turns: int
    seconds: float
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class Requests:
    """One row a request.   gaps: float32 (N, 2), what it carries.   bodies: as JSON."""

    gaps: Floats
    bodies: tuple[bytes, ...]

    @property
    def deferred_mask(self) -> Bools:
        """Return which rows the fixed rule sends on."""
        mask: Bools = np.abs(self.gaps[:, 0]) < SURE_GAP
        return mask

    @property
    def predictions(self) -> Ints:
        """Return the cascade's answers, int64 (N,)."""
        answering = np.where(self.deferred_mask, self.gaps[:, 1], self.gaps[:, 0])
        predictions: Ints = (answering < 0).astype(np.int64)
        return predictions

    def judge(self, place: int, status: int, body: bytes) -> str:
        """Name an answer by the stage that gave it, or say that it is wrong or no answer."""
        if status != 200:
            return f"status {status}"
        data = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
        stage = int(self.deferred_mask[place])
        right = data["prediction"] == [int(self.predictions[place])] and data["stage"] == [stage]
        return MODELS[stage] if right else "wrong"


def plant_requests(n: int, deferral: float) -> Requests:
    """Plant n requests of which the small model defers a share, and the large one is sure of all.

    Were it not sure, the policy's fusion with the small model's logits would answer some otherwise than it alone.
    """
    rng = np.random.default_rng(0)
    sizes = [min(BLOCK, n - start) for start in range(0, n, BLOCK)]
    gaps = np.concatenate([planted_rows(rng, size, [deferral]).gaps for size in sizes])
    gaps[:, 1] = np.copysign(np.float32(EASY_GAP), gaps[:, 1])
    return Requests(gaps, tuple(body_of(row) for row in gaps.tolist()))


def body_of(row: Sequence[float]) -> bytes:
    """Return a row as the body of an inference request."""
    inputs = [{"name": f"gap{place}", "shape": [1], "datatype": "FP32", "data": [gap]} for place, gap in enumerate(row)]
    outputs = [{"name": "prediction"}, {"name": "stage"}]
    return json.dumps({"inputs": inputs, "outputs": outputs}).encode()


def write_cascade(folder: Path, case: Case, requests: Requests, deferral: float) -> tuple[Path, Policy]:
    """Write the pool of a case; return it and its policy. Raises ExecutionError where that differs from the rule."""
    serving = {"serving": {"batch_wait_s": WAIT_S}}
    stages = [stage(name, model, BATCH) | serving for name, model in zip(MODELS, case.models, strict=True)]
    policy = write_table(folder / "LOGITS", {name: place + 1.0 for place, name in enumerate(MODELS)}, [deferral])
    require_same_answers(policy, requests)
    return write_pool(folder / "pool.yaml", stages), policy


def require_same_answers(policy: Policy, requests: Requests) -> None:
    """Raise ExecutionError where a policy answers otherwise than the fixed rule."""
    small, large = (np.stack([gap, np.zeros_like(gap)], axis=1) for gap in requests.gaps.T)
    first = policy.start(small)
    deferred = ~first.accepted
    second = policy.step(1, large[deferred], first.state[deferred])
    predictions = np.where(deferred, 0, first.predictions)
    predictions[deferred] = second.predictions
    if not np.array_equal(deferred, requests.deferred_mask) or not np.array_equal(predictions, requests.predictions):
        raise ExecutionError("the fitted policy does not answer these rows as the fixed rule does")
