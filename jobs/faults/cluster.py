"""A small real Ray cluster of this machine, its processes, and what can be done to them."""

from __future__ import annotations

import ctypes
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import cluster_utils

from cauc_ray.errors import ExecutionError
from jobs.bench.processes import processes

# A dead node is noticed after about this many seconds; Ray's own setting would take fifteen.
NOTICED_S = 2.0
CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 500,
    "health_check_failure_threshold": 3,
}
NETWORK = "10.77.0."
HEAD = f"{NETWORK}1"


class Cluster:
    """A head, and nodes on whose CPUs the stages fit twice but for one; where there are none, the head has the CPUs.

    Attributes:
        address: Its address.
    """

    def __init__(
        self,
        n_nodes: int = 0,
        store_bytes: int = 5 * 10**8,
        *,
        spills: bool = True,
        has_networks: bool = False,
    ) -> None:
        """Start it.

        Args:
            n_nodes: Nodes other than the head.
            store_bytes: Of each node's object store.
            spills: Whether these move objects to disk.
            has_networks: Each node has a network namespace of its own, on a bridge in that of this process, which must
                not be the machine's (unshare --net).
        """
        self._n_nodes, self._store_bytes, self._has_networks = n_nodes, store_bytes, has_networks
        if has_networks:
            _ip("link set lo up", "link add bridge type bridge", "link set bridge up", f"addr add {HEAD}/24 dev bridge")
        config = {"automatic_object_spilling_enabled": spills, **(CHECKS if n_nodes else {})}
        head = {"num_cpus": 0 if n_nodes else 8, "object_store_memory": store_bytes, "_system_config": config}
        network = {"node_ip_address": HEAD} if has_networks else {}
        self._cluster = cluster_utils.Cluster(True, head_node_args={**head, **network, "include_dashboard": False})
        self.address: str = self._cluster.address
        self._nodes: dict[int, Any] = {}  # by number, which no two ever share; the head is 1
        self._numbers = count(2)
        self._holders: list[subprocess.Popen[bytes]] = []
        self.restore()
        addresses = {f"_{key}": value for key, value in network.items()}
        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", **addresses)

    def close(self) -> None:
        """End the cluster."""
        ray.shutdown()
        self._cluster.shutdown()

    def restore(self) -> None:
        """Have as many nodes as at first. Ray starts them from the main thread only."""
        while len(self._nodes) < self._n_nodes:
            number = next(self._numbers)
            options: dict[str, Any] = {"wait": False, "num_cpus": 2, "object_store_memory": self._store_bytes}
            with ExitStack() as network:
                if self._has_networks:
                    self._holders.append(_namespace(number))
                    network.enter_context(_inside(self._holders[-1].pid))
                    options["node_ip_address"] = f"{NETWORK}{number}"
                self._nodes[number] = self._cluster.add_node(**options)

    def strike_node(self, rng: random.Random, having: set[int], cut_s: float | None, *, replaced: bool) -> bool:
        """Cut a node off for some seconds, or kill its raylet, with it the object store, and all of its workers.

        having: a node at random that has one of these processes. Returns whether there was one.
        """
        numbers = [n for n in self._nodes if having & {process.pid for process in self._processes(n)}]
        if not numbers:
            return False
        number = rng.choice(numbers)
        victims = self._processes(number)
        if cut_s is None:
            kill(victims)
        else:  # no packet arrives, and neither side is notified
            _ip(f"link set node{number} nomaster")
            time.sleep(cut_s)
            _ip(f"link set node{number} master bridge")
        if cut_s is None or cut_s > NOTICED_S:
            victims[0].wait(30)  # a raylet that hears that it has been given up ends
            del self._nodes[number]
        if replaced:
            self.restore()
        return True

    def _processes(self, number: int) -> list[psutil.Process]:
        raylet = psutil.Process(self._nodes[number].all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]


def replicas(notes: Path, stage: int) -> list[psutil.Process]:
    """Return the live processes of a stage, of a run or a service; their models note themselves in a folder."""
    return [process for process in processes("") if (notes / f"process-{stage}-{process.pid}").exists()]


def kill(victims: list[psutil.Process]) -> bool:
    """Kill processes. Returns whether there were any."""
    for process in victims:
        with suppress(psutil.Error):
            process.kill()
    return bool(victims)


def wait_until(true: Callable[[], bool], deadline_s: float) -> bool:
    """Say whether something has become true in time."""
    ends = time.monotonic() + deadline_s
    while not true():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def _namespace(number: int) -> subprocess.Popen[bytes]:
    """Start a process in a network namespace of its own, joined to the bridge; it ends with this one."""
    holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)
    namespace = Path("/proc", str(holder.pid), "ns/net")
    wait_until(lambda: not namespace.samefile("/proc/self/ns/net"), 10.0)
    _ip(f"link add node{number} type veth peer name eth0 netns {holder.pid}", f"link set node{number} master bridge up")
    with _inside(holder.pid):
        _ip("link set lo up", f"addr add {NETWORK}{number}/24 dev eth0", "link set eth0 up")
    return holder


@contextmanager
def _inside(pid: int) -> Iterator[None]:
    """Have this thread, and what it starts, use the network of another process for the length of the block."""
    set_namespace = ctypes.CDLL(None).setns  # os.setns, from Python 3.12 on
    with open("/proc/self/ns/net") as before, open(f"/proc/{pid}/ns/net") as inside:
        if set_namespace(inside.fileno(), 0):
            raise ExecutionError(f"the network namespace of process {pid} cannot be entered")
        try:
            yield
        finally:
            set_namespace(before.fileno(), 0)


def _ip(*commands: str) -> None:
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
