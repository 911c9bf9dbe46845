"""Ray sessions: joined when there is one, started and ended when there is none; their nodes and what fits on them."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError

from cauc_ray.errors import CaucWarning, ExecutionError
from cauc_ray.execution.output import model_output
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.resources import Resources, amounts_text

REACH_DEADLINE_S = 10.0
# For a task that asks whether the nodes of a cluster use tokens.
ASK_DEADLINE_S = 60.0
# A session of this machine claims so many logical CPUs for each core at most: every replica is a process.
MOST_CPUS_PER_CORE = 128
# A cluster's monitor first reports within this; where none reports, nothing starts nodes.
MONITOR_S = 10.0
# What models print takes so long to arrive.
OUTPUT_S = 0.3


@contextmanager
def ray_session(address: str | None, n_cpus: float) -> Iterator[None]:
    """Use the Ray session of this process, or connect one for the length of the block.

    address: of a cluster; without it the one that RAY_ADDRESS names (as Ray jobs set it), else a session of
    this machine's own, whose count of logical CPUs is n_cpus if that is more than it has, within reason.
    Raises ExecutionError when the cluster cannot be reached, or when its tokens and this process's do not agree.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
    if address == "local":
        # Ray 2.60 shows every GPU to actors that asked for none by default.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        keep_store_free()
        n_cores = os.cpu_count() or 1
        claimed = min(max(n_cores, math.ceil(n_cpus)), MOST_CPUS_PER_CORE * n_cores)
        options |= {"num_cpus": claimed, "include_dashboard": False}
    else:
        _require_reachable(address)
    try:
        ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {(str(error).splitlines() or ['?'])[0]}") from error
    try:
        if address != "local":
            _require_tokens_there(address)
        with model_output():
            yield
            time.sleep(OUTPUT_S)
    finally:
        ray.shutdown()


def keep_store_free() -> None:
    """Have a Ray session that this process starts drop unneeded objects within a tenth of a second.

    Ray's second lets a small store fill with what is already released, and spill it to disk.
    """
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "100")


def _require_reachable(address: str) -> None:
    """Raise ExecutionError where nothing listens: Ray would end the whole process after a long wait."""
    if address.startswith("ray://"):
        raise ExecutionError(
            f"address {address!r} is a Ray Client address, which is not supported; give HOST:PORT of the head node"
        )
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray looks for a cluster of this machine and raises if there is none
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_DEADLINE_S).close()
    except (OSError, UnicodeError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {getattr(error, 'strerror', None) or error}") from error
    if _sends_token() and not _has_token():
        raise ExecutionError(
            "RAY_AUTH_MODE is token, but no token is set: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file; or "
            "RAY_AUTH_MODE=disabled for a cluster without tokens"
        )
    if _refuses_token(address):
        remedy = "set RAY_AUTH_TOKEN to the cluster's own, or RAY_AUTH_TOKEN_PATH to its file"
        if _sends_token():
            raise ExecutionError(f"the Ray cluster at {address!r} refuses this token: {remedy}")
        remedy = "" if _has_token() else f", and {remedy}"
        raise ExecutionError(f"the Ray cluster at {address!r} asks for a token: set RAY_AUTH_MODE=token{remedy}")


def _sends_token() -> bool:
    """Return whether this process sends Ray's token: Ray itself sets the variable where it turns tokens on."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _has_token() -> bool:
    """Return whether Ray finds a token, in the order in which it looks for one."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()


def _refuses_token(address: str) -> bool:
    """Return whether a cluster's head refuses this process for its token, or because it sends none.

    Ray 2.60 would try for twenty seconds, with a line of log for each try, and then not name the cause. It has no
    public question for this: its client is given the id of no cluster, which the head refuses after the token.
    """
    try:
        ray._raylet.GcsClient(address=address, cluster_id="00" * 28).check_alive([], timeout=REACH_DEADLINE_S)
    except AuthenticationError as error:
        return "InvalidAuthToken" in str(error)
    except Exception:  # another Ray may have no such client, or the head another fault: ray.init reports it
        return False
    return False


def _require_tokens_there(address: str) -> None:
    """Raise ExecutionError where this process uses tokens and the cluster's nodes use none.

    The head takes such a process, but the actors that it starts die: they cannot answer it.
    """
    if not _sends_token():
        return
    try:
        mode = ray.get(ray.remote(num_cpus=0)(os.getenv).remote("RAY_AUTH_MODE"), timeout=ASK_DEADLINE_S)
    except GetTimeoutError:
        return  # no node has started a process yet; nothing is known
    except RayError as error:
        raise ExecutionError(f"the Ray cluster at {address!r} runs no task for this process: {error}") from error
    if (mode or "").lower() != "token":
        raise ExecutionError(
            f"the Ray cluster at {address!r} uses no tokens, but RAY_AUTH_MODE is token here: set "
            "RAY_AUTH_MODE=disabled"
        )


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


def _nodes() -> list[_Node]:
    return [_Node(dict(node.get("Labels") or {}), dict(node["Resources"])) for node in live_nodes().values()]


def room_for(needs: Resources, most: int) -> int:
    """Return how many actors that need so much fit on the live nodes, at most so many."""
    return _placed([(needs, 0, most)])[0][0]


def require_fit(stages: Sequence[StageSpec]) -> None:
    """Raise ExecutionError naming the first stage whose least replicas do not fit on the live nodes.

    An actor that cannot be placed waits in Ray without end or a word, so this asks beforehand. Where an autoscaler
    starts nodes, they are waited for.
    """
    _, unfit, nodes = _placed([(stage.resources, stage.replicas.min, stage.replicas.min) for stage in stages])
    if unfit is not None:
        wait_for_nodes(_does_not_fit(stages[unfit], nodes), "lower its resources or replicas, or add nodes")


def wait_for_nodes(what: str, remedy: str) -> None:
    """Warn that nodes are waited for, where an autoscaler starts them for what waits; raise ExecutionError elsewhere.

    what: what does not fit on the live nodes.
    """
    if not autoscales(MONITOR_S):
        raise ExecutionError(f"{what}; {remedy}")
    warnings.warn(f"{what}; waiting for the cluster's autoscaler to start nodes", CaucWarning, stacklevel=4)


def replicas_that_fit(stages: Sequence[StageSpec]) -> list[int]:
    """Return how many replicas of each stage the live nodes hold: its minimum, then more in turn up to its maximum.

    Raises ExecutionError naming the first stage whose minimum does not fit, with what it asks and what there is.
    """
    counts, unfit, nodes = _placed([(stage.resources, stage.replicas.min, stage.replicas.max) for stage in stages])
    if unfit is not None:
        raise ExecutionError(_does_not_fit(stages[unfit], nodes))
    return counts


def _placed(wanted: Sequence[tuple[Resources, int, int]]) -> tuple[list[int], int | None, list[_Node]]:
    """Place actors on the live nodes: the least number of each, then more in turn up to the most.

    wanted: what each occupies, and how many at least and at most.   Returns how many of each are placed, the number of
    the first whose least do not fit (then no others are tried), and the nodes as that leaves them.
    """
    nodes, counts = _nodes(), [0] * len(wanted)
    asked = {name for needs, _, _ in wanted for name, amount in needs.amounts.items() if amount} - {"CPU"}

    def place(index: int) -> bool:
        needs = wanted[index][0]
        fitting = [node for node in nodes if node.takes(needs)]
        if not fitting:
            return False
        # The node with the least that others ask for: first GPUs and custom resources, then free CPUs.
        others = [name for name in asked if not needs.amounts.get(name)]
        min(fitting, key=lambda n: (sum(n.free.get(o, 0.0) > 0 for o in others), n.free.get("CPU", 0.0))).place(needs)
        counts[index] += 1
        return True

    for index in hardest_first([needs for needs, _, _ in wanted]):
        while counts[index] < wanted[index][1]:
            if not place(index):
                return counts, index, nodes
    growing = list(range(len(wanted)))
    while growing:
        growing = [index for index in growing if counts[index] < wanted[index][2] and place(index)]
    return counts, None, nodes


def hardest_first(wanted: Sequence[Resources]) -> list[int]:
    """Return the numbers of what is to be placed in the order in which to do so: what fewest nodes take comes first.

    Others would fill the only nodes that it has; Ray, too, places actors in the order in which they are asked for.
    """
    nodes = _nodes()
    n_nodes = [sum(node.takes(needs) for node in nodes) for needs in wanted]
    return sorted(range(len(wanted)), key=lambda index: (n_nodes[index], -wanted[index].num_cpus))


def _does_not_fit(stage: StageSpec, nodes: Sequence[_Node]) -> str:
    n, names = stage.replicas.min, [name for name, amount in stage.resources.amounts.items() if amount]
    free = "; ".join(amounts_text({name: node.free.get(name, 0.0) for name in names}) for node in nodes)
    return (
        f"stage {stage.name!r} with at least {n} replica{'s' * (n > 1)} of {stage.resources} does not fit next to the "
        f"others (left on the nodes: {free})"
    )
