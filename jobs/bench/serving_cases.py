"""What the serving part asks of whom: the models of each case, its loads, the requests and their right answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.files.documents import write_text
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import EASY_GAP, HARD_GAP, planted_rows, write_pool, write_table

MODELS = ("small", "large")
# The fixed rule of the hand-written sides: a row whose small gap is nearer to 0 goes on.
SURE_GAP = (EASY_GAP + HARD_GAP) / 2
WAIT_S = 0.005
# Rows are shuffled within blocks of so many: any stretch of requests then defers nearly the planted share.
BLOCK = 50

# Sides: cauc-ray with the cascade and with the largest model alone, and the hand-written ones.
OURS, OURS_LARGEST = "cauc-ray", "cauc-ray-largest"
BATCHED, PER_SAMPLE, LARGEST = "batched", "per-sample", "largest"
# Loads, by how many clients there are; options say how many, but for one.
ONE, FEW, SOME, MANY = "one", "few", "some", "many"


@dataclass(frozen=True, slots=True)
class StageSetting:
    """One stage.   model: keyword arguments of from_column.   batch: rows in a call at most; wait_s: for more rows."""

    name: str
    model: dict[str, Any]
    batch: int
    wait_s: float = WAIT_S
    replicas: int = 1
    num_cpus: float = 0.1

    @property
    def seconds_per_row(self) -> float:
        """Return the stage's seconds for a row where every call is full."""
        per_call: float = self.model["seconds_per_call"] / self.batch + self.model["seconds_per_row"]
        return per_call / self.replicas


@dataclass(frozen=True, slots=True)
class Case:
    """Models and loads.   takes: seconds of a call and of a row, for each model.   loads: which sides take turns."""

    takes: tuple[tuple[float, float], ...]
    batch: int
    loads: dict[str, tuple[str, ...]]

    @property
    def sides(self) -> list[str]:
        """Return the sides that any load is on."""
        return list(dict.fromkeys(side for sides in self.loads.values() for side in sides))

    @property
    def settings(self) -> tuple[StageSetting, StageSetting]:
        """Return the two stages."""
        small, large = (
            StageSetting(
                name=name,
                model={"column": f"gap{place}", "seconds_per_call": call, "seconds_per_row": row},
                batch=self.batch,
            )
            for place, (name, (call, row)) in enumerate(zip(MODELS, self.takes, strict=True))
        )
        return small, large

    def predicted_speedup(self, deferral: float) -> float:
        """Return the throughput over the largest model's alone: its seconds per row over the bottleneck's."""
        small, large = (setting.seconds_per_row for setting in self.settings)
        return large / max(small, deferral * large)


CASES = {
    # What an ordinary cascade takes: what the router adds is to be small beside it.
    "sleeping": Case(
        takes=((0.005, 0.0), (0.020, 0.001)),
        batch=64,
        loads={FEW: (OURS, BATCHED), MANY: (OURS, BATCHED, PER_SAMPLE)},
    ),
    # Models of no time: what is left is what serving takes.
    "instant": Case(takes=((0.0, 0.0), (0.0, 0.0)), batch=64, loads={ONE: (OURS, BATCHED)}),
    # A large model so slow that it is the bottleneck with the cascade, too, and not the machine's cores.
    "slow": Case(
        takes=((0.005, 0.0), (0.010, 0.020)),
        batch=4,
        loads={SOME: (OURS, OURS_LARGEST, LARGEST)},
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """What one session measures.   clients: how many each load has.   seconds, warm_up_s: of a turn."""

    cases: tuple[str, ...]
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

    def judge(self, side: str) -> Callable[[int, int, bytes], str]:
        """Return what names an answer by the stage that gave it, or says that it is wrong or no answer."""
        alone = side in (LARGEST, OURS_LARGEST)
        predictions = (self.gaps[:, 1] < 0).astype(int) if alone else self.predictions
        stages = np.zeros(len(self.gaps), np.int64) if alone else self.deferred_mask.astype(np.int64)
        expected = list(zip(predictions.tolist(), stages.tolist(), strict=True))
        names = (MODELS[1],) if alone else MODELS

        def judged(place: int, status: int, body: bytes) -> str:
            if status != 200:
                return f"status {status}"
            data = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
            prediction, stage = expected[place]
            right = data["prediction"] == [prediction] and data["stage"] == [stage]
            return names[stage] if right else "wrong"

        return judged


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


@dataclass(frozen=True, slots=True)
class CascadeFiles:
    """What cauc-ray serves from: a pool, a policy for its chain, and one for the largest model alone."""

    pool: Path
    cascade: Path
    largest: Path


def write_cascade(folder: Path, case: Case, requests: Requests, deferral: float) -> CascadeFiles:
    """Write the files of a case. Raises ExecutionError where the policy would not do as the fixed rule does."""
    stages = [
        {
            "name": setting.name,
            "model": {"kind": "python", "factory": "jobs.bench.models:from_column", "kwargs": setting.model},
            "batch_size": setting.batch,
            "serving": {"batch_wait_s": setting.wait_s},
            "replicas": {"min": setting.replicas, "max": setting.replicas},
            "resources": {"num_cpus": setting.num_cpus},
        }
        for setting in case.settings
    ]
    pool = write_pool(folder / "pool.yaml", stages)
    costs = {name: place + 1.0 for place, name in enumerate(MODELS)}
    cascade = write_table(folder / "LOGITS", costs, [deferral])
    require_same_answers(cascade, requests)
    largest = cauc_ray.fit(folder / "LOGITS", models=[MODELS[1]], method="rf", threshold=0.0)
    files = CascadeFiles(pool, folder / "cascade.json", folder / "largest.json")
    write_text(files.cascade, cascade.to_json())
    write_text(files.largest, largest.to_json())
    return files


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
