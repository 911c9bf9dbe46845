"""The nodes of the current Ray session: which are live, what fits on them, whether more can be started."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from cauc_ray.errors import ExecutionError, warn
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.resources import Resources, amounts_text

# A cluster's monitor first reports within this; where none reports, nothing starts nodes.
MONITOR_S = 10.0


def cpus_needed(stages: Sequence[StageSpec]) -> float:
    """Return the logical CPUs of all stages at their smallest replica counts."""
    return sum(stage.resources.num_cpus * stage.replicas.min for stage in stages)


def live_nodes() -> dict[str, dict[str, Any]]:
    """Return what Ray knows of the live nodes, by id, without those that it drains: they are about to end."""
    drained = draining_nodes()
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in drained}


def draining_nodes() -> set[str]:
    """Return the ids of the nodes that are about to end, and on which Ray places nothing more."""
    return set(ray._private.state.state.get_draining_nodes())  # Ray 2.60 has no public function for it


def autoscales(patience_s: float = 0.0) -> bool:
    """Return whether an autoscaler starts nodes for what waits for a place on this cluster.

    patience_s: how long to wait for the first report of a cluster that has just started.
    Ray 2.60 has no public question for this. Its second autoscaler is there where it is switched on. The first one runs
    on every cluster and reports the type of each node; where it can start none, it makes the type up from the name.
    """
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.autoscaler._private.util import format_readonly_node_type
    from ray.autoscaler.v2.utils import is_autoscaler_v2
    from ray.experimental.internal_kv import _internal_kv_get

    if is_autoscaler_v2(fetch_from_server=True):
        return True
    ends = time.monotonic() + patience_s
    while True:
        report = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("autoscaler_report") or {}
        types = report.get("node_type_mapping") or {}
        if types or time.monotonic() >= ends:  # the first report may be of no node yet
            return any(kind != format_readonly_node_type(node) for node, kind in types.items())
        time.sleep(0.1)


def store_bytes() -> float:
    """Return the object store of the live node that has the smallest."""
    stores = [float(node["Resources"].get("object_store_memory", 0.0)) for node in live_nodes().values()]
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

    def give_back(self, needs: Resources) -> None:
        for name, amount in needs.amounts.items():
            self.free[name] = self.free.get(name, 0.0) + amount


def _nodes(free: bool = False) -> dict[str, _Node]:
    """Return the live nodes by id, with all that they have, or with what is free on them now."""
    left = ray._private.state.available_resources_per_node() if free else {}  # Ray 2.60 has no public function for it
    return {
        id: _Node(dict(node.get("Labels") or {}), dict(left.get(id, {}) if free else node["Resources"]))
        for id, node in live_nodes().items()
    }


def in_the_way(waiting: Resources, placed: Sequence[tuple[Resources, str]]) -> int | None:
    """Return the number of a placed actor that fits elsewhere and without which its node would take one that waits.

    placed: what each occupies, and the id of its node.   None where the one that waits fits as it is, or no move helps.
    """
    nodes = _nodes(free=True)
    if any(node.takes(waiting) for node in nodes.values()):
        return None
    for number, (needs, id) in enumerate(placed):
        if id in nodes and any(node.takes(needs) for node_id, node in nodes.items() if node_id != id):
            without = _Node(nodes[id].labels, dict(nodes[id].free))
            without.give_back(needs)
            if without.takes(waiting):
                return number
    return None


def room_for(needs: Resources, most: int) -> int:
    """Return how many actors that need so much fit on the live nodes, at most so many."""
    return _placed([(needs, 0, most)], _nodes())[0][0]


def require_fit(stages: Sequence[StageSpec]) -> None:
    """Raise ExecutionError naming the first stage whose least replicas do not fit on the live nodes.

    An actor that cannot be placed waits in Ray without end or a word, so this asks beforehand. Where an autoscaler
    starts nodes, they are waited for.
    """
    asked = [(f"stage {stage.name!r}", stage.resources, stage.replicas.min) for stage in stages]
    _require_placed(asked, _nodes(), "lower its resources or replicas, or add nodes")


def require_room(asked: Sequence[tuple[str, Resources, int]], remedy: str) -> None:
    """Raise ExecutionError naming the first actors that do not fit next to all that runs now, as require_fit does.

    asked: what they are, what each needs, and how many there are.   remedy: what can be done.
    """
    _require_placed(asked, _nodes(free=True), remedy)


def _require_placed(asked: Sequence[tuple[str, Resources, int]], nodes: dict[str, _Node], remedy: str) -> None:
    _, unfit = _placed([(needs, n, n) for _, needs, n in asked], nodes)
    if unfit is not None:
        wait_for_nodes(_does_not_fit(*asked[unfit], nodes), remedy)


def wait_for_nodes(what: str, remedy: str) -> None:
    """Warn that nodes are waited for, where an autoscaler starts them for what waits; raise ExecutionError elsewhere.

    what: what does not fit on the live nodes.
    """
    if not autoscales(MONITOR_S):
        raise ExecutionError(f"{what}; {remedy}")
    warn(f"{what}; waiting for the cluster's autoscaler to start nodes")


def replicas_that_fit(stages: Sequence[StageSpec]) -> list[int]:
    """Return how many replicas of each stage the live nodes hold: its minimum, then more in turn up to its maximum.

    Raises ExecutionError naming the first stage whose minimum does not fit, with what it asks and what there is.
    """
    nodes = _nodes()
    counts, unfit = _placed([(stage.resources, stage.replicas.min, stage.replicas.max) for stage in stages], nodes)
    if unfit is not None:
        stage = stages[unfit]
        raise ExecutionError(_does_not_fit(f"stage {stage.name!r}", stage.resources, stage.replicas.min, nodes))
    return counts


def _placed(requests: Sequence[tuple[Resources, int, int]], nodes: dict[str, _Node]) -> tuple[list[int], int | None]:
    """Place actors on nodes: the least number of each, then more in turn up to the most.

    Args:
        requests: The resources of each kind of actor, and its least and greatest number.
        nodes: The nodes; what is placed is taken from what is free.

    Returns:
        How many of each are placed, and the number of the first kind whose least number does not fit; no others are
        tried then.
    """
    counts = [0] * len(requests)
    asked = {name for needs, _, _ in requests for name, amount in needs.amounts.items() if amount} - {"CPU"}

    def place(index: int) -> bool:
        needs = requests[index][0]
        fitting = [node for node in nodes.values() if node.takes(needs)]
        if not fitting:
            return False
        # The node with the least that others ask for: first GPUs and custom resources, then free CPUs.
        unused = [name for name in asked if not needs.amounts.get(name)]

        def spare(node: _Node) -> tuple[int, float]:
            return sum(node.free.get(name, 0.0) > 0 for name in unused), node.free.get("CPU", 0.0)

        min(fitting, key=spare).place(needs)
        counts[index] += 1
        return True

    for index in hardest_first([needs for needs, _, _ in requests]):
        while counts[index] < requests[index][1]:
            if not place(index):
                return counts, index
    growing = list(range(len(requests)))
    while growing:
        growing = [index for index in growing if counts[index] < requests[index][2] and place(index)]
    return counts, None


def hardest_first(requests: Sequence[Resources]) -> list[int]:
    """Return the numbers of what is to be placed in the order in which to do so: what fewest nodes take comes first.

    Others would fill the only nodes that it has; Ray, too, places actors in the order in which they are asked for.
    """
    nodes = _nodes().values()
    n_nodes = [sum(node.takes(needs) for node in nodes) for needs in requests]
    return sorted(range(len(requests)), key=lambda index: (n_nodes[index], -requests[index].num_cpus))


def _does_not_fit(what: str, needs: Resources, n: int, nodes: dict[str, _Node]) -> str:
    names = [name for name, amount in needs.amounts.items() if amount]
    free = "; ".join(amounts_text({name: node.free.get(name, 0.0) for name in names}) for node in nodes.values())
    return (
        f"{what} with at least {n} replica{'s' * (n > 1)} of {needs} does not fit next to the others (left on the "
        f"nodes: {free})"
    )
