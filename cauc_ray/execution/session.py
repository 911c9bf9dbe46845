"""Ray sessions: joined when there is one, started and ended when there is none; and what fits on them."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from cauc_ray.errors import ExecutionError
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.resources import Resources
from cauc_ray.models.service import Replicas

REACH_DEADLINE_S = 10.0
# A session of this machine claims so many logical CPUs for each core at most: every replica is a process.
MOST_CPUS_PER_CORE = 128


@contextmanager
def ray_session(address: str | None, n_cpus: float) -> Iterator[None]:
    """Use the Ray session of this process, or connect one for the length of the block.

    address: of a cluster; without it the one that RAY_ADDRESS names (as Ray jobs set it), else a session of
    this machine's own, whose count of logical CPUs is n_cpus if that is more than it has, within reason.
    Raises ExecutionError when the cluster cannot be reached.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        # Ray 2.60 shows every GPU to actors that asked for none unless told otherwise.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        keep_store_free()
        n_cores = os.cpu_count() or 1
        claimed = min(max(n_cores, math.ceil(n_cpus)), MOST_CPUS_PER_CORE * n_cores)
        options |= {"num_cpus": claimed, "include_dashboard": False}
    else:
        _require_reachable(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {(str(error).splitlines() or ['?'])[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def keep_store_free() -> None:
    """Have a Ray session that this process starts drop what nobody needs within a tenth of a second.

    Ray's second lets a small store fill with what is already released, and spill it to disk.
    """
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "100")


def _require_reachable(address: str) -> None:
    """Raise ExecutionError where nothing listens: Ray would end the whole process after a long wait."""
    if address.startswith("ray://"):
        raise ExecutionError(
            f"address {address!r} is of a Ray Client, which is not supported; give HOST:PORT of the head"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray looks for a cluster of this machine and says so when there is none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_DEADLINE_S).close()
    except (OSError, UnicodeError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {getattr(error, 'strerror', None) or error}") from error


def cpus_needed(stages: Sequence[StageSpec]) -> float:
    """Return the logical CPUs of all stages at their smallest replica counts."""
    return sum(stage.resources.num_cpus * stage.replicas.min for stage in stages)


def store_bytes() -> float:
    """Return the object store of the live node that has the smallest."""
    stores = [float(node["Resources"].get("object_store_memory", 0.0)) for node in ray.nodes() if node["Alive"]]
    return min(store for store in stores if store)


@dataclass(slots=True)
class _Node:
    labels: dict[str, str]
    free: dict[str, float]

    def takes(self, needs: Resources) -> bool:
        enough = all(self.free.get(name, 0.0) >= amount for name, amount in needs.amounts.items())
        return enough and needs.met_by(self.labels)

    def place(self, needs: Resources) -> None:
        for name, amount in needs.amounts.items():
            self.free[name] = self.free.get(name, 0.0) - amount


def _nodes() -> list[_Node]:
    return [_Node(dict(node.get("Labels") or {}), dict(node["Resources"])) for node in ray.nodes() if node["Alive"]]


def room_for(needs: Resources, most: int) -> int:
    """Return how many actors that need so much fit on the live nodes, at most so many."""
    nodes, n = _nodes(), 0
    while n < most and (node := next((node for node in nodes if node.takes(needs)), None)) is not None:
        node.place(needs)
        n += 1
    return n


def require_fit(stages: Sequence[StageSpec]) -> None:
    """Raise ExecutionError naming the first stage whose least replicas do not fit on the live nodes.

    An actor that cannot be placed waits in Ray for ever and says nothing, so this asks beforehand.
    """
    least = [Replicas(min=stage.replicas.min, max=stage.replicas.min) for stage in stages]
    replicas_that_fit([s.model_copy(update={"replicas": n}) for s, n in zip(stages, least, strict=True)])


def replicas_that_fit(stages: Sequence[StageSpec]) -> list[int]:
    """Return how many replicas of each stage the live nodes hold: its minimum, then more in turn up to its maximum.

    Raises ExecutionError naming the first stage whose minimum does not fit, with what it asks and what there is.
    """
    nodes = _nodes()
    counts = [0] * len(stages)

    def place(place_of: int) -> bool:
        stage = stages[place_of]
        # The node with the fewest free CPUs that takes it, so that large gaps stay for large stages.
        fitting = sorted((n for n in nodes if n.takes(stage.resources)), key=lambda n: n.free.get("CPU", 0.0))
        if not fitting:
            return False
        fitting[0].place(stage.resources)
        counts[place_of] += 1
        return True

    for place_of, stage in enumerate(stages):
        for _ in range(stage.replicas.min):
            if not place(place_of):
                raise ExecutionError(_does_not_fit(stage, nodes))
    growing = list(range(len(stages)))
    while growing:
        growing = [p for p in growing if counts[p] < stages[p].replicas.max and place(p)]
    return counts


def _does_not_fit(stage: StageSpec, nodes: Sequence[_Node]) -> str:
    names = stage.resources.amounts
    free = "; ".join(", ".join(f"{n.free.get(name, 0):g} {_plural(name)}" for name in names) for n in nodes)
    return (
        f"stage {stage.name!r} with at least {stage.replicas.min} replicas of {stage.resources} does not fit beside "
        f"the others (left on the nodes: {free}); lower its resources or replicas, or add nodes"
    )


def _plural(name: str) -> str:
    return f"{name}s" if name in ("CPU", "GPU") else name
