"""The kinds of fault: what each strikes, and how."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import numpy as np
import psutil
import pyarrow.parquet as pq
import ray
from ray import serve
from ray.exceptions import RayError

from cauc_ray.errors import ExecutionError
from cauc_ray.execution.commits import CLAIMS
from cauc_ray.execution.ledger import ATTEMPT_REPLICAS
from cauc_ray.files.parquet import parquet_files
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.app import application
from jobs.bench.processes import ROOT, processes
from jobs.faults.cascade import WIDE, Cascade, Row, answers_of, give_order, pool_file
from jobs.faults.cluster import NOTICED_S, Cluster, kill, replicas, wait_until

# Returns whether there was something to hit.
Strike: TypeAlias = "Callable[[Scene], bool]"

TARGETS = ("run", "collection", "service")
_BOTH = ("run", "service")
# How the cluster of each session differs from one whose head has all the CPUs.
STORE_BYTES = 100 * 2**20
SESSIONS: dict[str, dict[str, Any]] = {
    "machine": {},
    "nodes": {"n_nodes": 3, "store_bytes": 2 * 10**8},
    "network": {"n_nodes": 3, "store_bytes": 2 * 10**8, "has_networks": True},
    "small-store": {"store_bytes": STORE_BYTES},
    "store-without-disk": {"store_bytes": STORE_BYTES, "spills": False},
}
_MANY: dict[str, Any] = {"large": {"replicas": {"min": 6, "max": 6}, "resources": {"num_cpus": 0.1}, "batch_size": 4}}
_ANSWERS: dict[str, Any] = {"n_options": WIDE, "batch_size": 64}
_IMPATIENT: dict[str, Any] = {"call_timeout_s": 2.0}
# A request waits for two replicas that start one after the other, however long that takes.
_PATIENT: dict[str, Any] = {"serving": {"timeout_s": 50.0}}
_ALONE: dict[str, Any] = {"replicas": {"min": 1}}
# The last stage is down after this many seconds without a replica.
_SOON_DOWN: dict[str, Any] = {"large": {"down_after_s": 4.0}}
# A stage of a service is down for this long, an object store full.
DOWN_S, HELD_S = 6.0, 4.0
# The budget of the next version's policy; the first one's is 8.
NEXT_BUDGET = 12.0
# A busy machine: for this long, the service's processes run for the second of these times after each of the first.
BUSY_S, PAUSED_S, RUNS_S = 15.0, 0.5, 0.05
# Hostile clients: so many with a body of this many bytes, with one that does not go on, and without a byte. They wait
# this long for an answer.
N_LARGE, LARGE_BYTES, N_SLOW, N_SILENT, HOSTILE_S = 3, 52_000_000, 100, 300, 30.0
# What takes longer hangs.
DEADLINE_S = 240.0


@dataclass(slots=True)
class Scene:
    """A run, a collection or a service, in a folder with a log and the notes of its models; and chance.

    Attributes:
        cascade: The cascade.
        cluster: The cluster.
        folder: The folder.
        rng: Decides what is struck.
        target: "run", "collection" or "service".
        asked: The rows, by example_id.
        input: Where its rows are.
        out: Where its answers go.
        must_fail: The rows that nothing can answer.
        hits: How often it was struck.
        child: The process that asked for it.
        url: Address of the service.
        of_next: The answers of the version that is deployed meanwhile.
        reached: What strikes have brought about, of SOMETIMES_SERVED.
    """

    cascade: Cascade
    cluster: Cluster
    folder: Path
    rng: random.Random
    target: str
    asked: Sequence[str]
    input: AnyPath = Path()
    out: AnyPath = Path()
    must_fail: set[str] = field(default_factory=set)
    hits: int = 0
    child: subprocess.Popen[bytes] | None = None
    url: str = ""
    of_next: Mapping[str, Row] | None = None
    reached: set[str] = field(default_factory=set)

    @property
    def notes(self) -> Path:
        """Where models note what they do."""
        return self.folder / "notes"

    @property
    def serves(self) -> bool:
        """Say whether it is a service."""
        return self.target == "service"

    @property
    def is_over(self) -> bool:
        """Say whether the process has ended that asked for the run."""
        return self.child is not None and self.child.poll() is not None

    def start(self, *, resumed: bool = False) -> None:
        """Start `cauc run` or `cauc collect` on the cluster."""
        pool = self.folder / "pool.yaml"
        words: list[object] = ["run", pool, "--policy", self.cascade.policy, "--input", self.input, "-o", self.out]
        if self.target == "collection":
            words = ["collect", pool, "--dataset", self.input, "--split", "all", "--models", "large", "-o", self.out]
        elif resumed:
            words.append("--resume")
        command = [sys.executable, "-m", "jobs.faults.run", *map(str, words), "--address", self.cluster.address]
        with (self.folder / "log").open("wb") as log:
            self.child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait(self) -> int:
        """Wait for that process, and return its exit code. Raises ExecutionError."""
        assert self.child is not None
        self.until(lambda: self.is_over, "end")
        return self.child.wait()

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Wait until something is true. Raises ExecutionError where it has not come to that in time."""
        if not wait_until(true, DEADLINE_S):
            raise ExecutionError(f"it did not {what} within {DEADLINE_S:g} s; its last line: {self.last_line()}")

    def last_line(self) -> str:
        """Return the last line that the process printed."""
        return ((self.folder / "log").read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]

    def note_answer(self, row: Row) -> None:
        """Note whether the version that is deployed meanwhile has answered."""
        example, prediction = row["example_id"], row["prediction"]
        if (
            self.of_next
            and self.of_next[example]["prediction"] == prediction != self.cascade.expected[example]["prediction"]
        ):
            self.reached.add(_NEXT)

    def strike(self, strike: Strike, moments: Sequence[float]) -> None:
        """Strike at moments, in seconds from now, each time until there is something to hit; count that."""
        began = time.monotonic()
        for moment in sorted(moments):
            wait_until(lambda: self.is_over, began + moment - time.monotonic())
            while not self.is_over and time.monotonic() < began + DEADLINE_S:
                if strike(self):
                    self.hits += 1
                    break
                time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: Its name.
        hits: What it strikes, for people.
        strike: Strikes once.
        on: The targets that it applies to.
        session: The cluster that it needs.
        times: How often it strikes.
        when: Before the start, as soon as the input is read, or at any moment from the first call on.
        pool: How the pool differs.
        ends: Words of the error that ends a run, to be resumed; "" where the fault kills the run's process.
        loses: It ends what holds the requests of a service.
        goes_unnoticed: No client of a service may meet any trouble.
        remote: The input of a run, and the output of a collection, are in a store at a distance.
        sometimes: What some of several trials must show, of SOMETIMES or SOMETIMES_SERVED.
    """

    name: str
    hits: str
    strike: Strike
    on: tuple[str, ...] = _BOTH
    session: str = "machine"
    times: int = 1
    when: Literal["before", "reading", "calls"] = "calls"
    pool: Mapping[str, Any] = field(default_factory=dict)
    ends: str | None = None
    loses: bool = False
    goes_unnoticed: bool = False
    remote: bool = False
    sometimes: tuple[str, ...] = ()


# What the ledger of a run shows of the ways in which it got over a fault.
SOMETIMES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "a call was made again": lambda call: call["attempt"] > 1,
    "a call was lost": lambda call: not call["accepted"] + call["deferred"],
    "another attempt went on": lambda call: call["replica"] >= ATTEMPT_REPLICAS,
}
_AGAIN, _LOST, _ATTEMPT = SOMETIMES
# And a service under a fault that only services have.
SOMETIMES_SERVED = (
    "the next version answered",
    "a large body was refused",
    "a slow body was refused",
    "a silent connection was held",
)
_NEXT, _LARGE, _SLOW, _SILENT = SOMETIMES_SERVED


def killed(*titles: str, stage: int | None = None, every: bool = False) -> Strike:
    """Kill a process of Ray with such a title, or a replica of a stage, or every one at once."""

    def strike(scene: Scene) -> bool:
        targets = processes(*titles) if stage is None else replicas(scene.notes, stage)
        return kill(targets if every else scene.rng.sample(targets, min(1, len(targets))))

    return strike


def model_fault(does: str, *stages: int, seconds: float = 0.0, **order: Any) -> Strike:
    """Have models of stages misbehave: see cascade.give_order; for some seconds, in all calls."""

    def strike(scene: Scene) -> bool:
        return all(give_order(scene.notes, stage, does=does, until=time.time() + seconds, **order) for stage in stages)

    return strike


def guilty_rows(does: str, n: int) -> Strike:
    """Have the second stage fail on certain rows whenever it sees them: they, and no others, must fail."""

    def strike(scene: Scene) -> bool:
        reach = [example for example in scene.asked if scene.cascade.expected[example]["stage"] >= 1]
        scene.must_fail.update(scene.rng.sample(reach, n))
        rows = [int(example.removeprefix("test-")) for example in scene.must_fail]
        return give_order(scene.notes, 1, does=does, rows=rows)

    return strike


def dies_loading(scene: Scene) -> bool:
    """Kill a replica of the last stage; the next ones die while they load."""
    return give_order(scene.notes, 2, loads=3) and killed(stage=2)(scene)


def stage_down(scene: Scene) -> bool:
    """Kill the last stage, and all that loads of it: in a run for good, in a service for some seconds."""
    give_order(scene.notes, 2, loads=1000)
    struck = killed(stage=2, every=True)(scene)
    if scene.serves and struck:
        time.sleep(DOWN_S)
        give_order(scene.notes, 2)
    return struck


def node_killed(*, replaced: bool) -> Strike:
    """Kill a node with a stage; another comes, or the others have room."""
    return lambda scene: scene.cluster.strike_node(scene.rng, _stages(scene), None, replaced=replaced)


def network_cut(seconds: float) -> Strike:
    """Cut a node with a stage off from all others for some seconds; another comes where it is given up."""
    return lambda scene: scene.cluster.strike_node(scene.rng, _stages(scene), seconds, replaced=True)


def reader_node_killed(scene: Scene) -> bool:
    """Kill a node with a task that reads the input; another comes."""
    readers = {process.pid for process in processes("read_blocks")}
    return scene.cluster.strike_node(scene.rng, readers, None, replaced=True)


def second_driver(scene: Scene) -> bool:
    """Have a second process resume the run while the first is at work, which is then to end.

    Its models pause until the second has begun, which on a busy machine takes longer than the run.
    """
    first, claims = scene.child, scene.folder / "out" / CLAIMS
    if first is None or not claims.is_dir():
        return False
    models = [process for stage in range(3) for process in replicas(scene.notes, stage)]
    _signal(models, psutil.Process.suspend)
    scene.start(resumed=True)
    wait_until(lambda: scene.is_over or len(list(claims.iterdir())) > 1, DEADLINE_S)
    _signal(models, psutil.Process.resume)
    return first.wait(DEADLINE_S) != 0


def _signal(victims: Sequence[psutil.Process], signal: Callable[[psutil.Process], None]) -> None:
    for process in victims:
        with suppress(psutil.Error):
            signal(process)


def _stages(scene: Scene) -> set[int]:
    return {process.pid for stage in range(3) for process in replicas(scene.notes, stage)}


def store_full(scene: Scene) -> bool:
    """Fill the object store as far as it lets itself be filled, and leave it so for some seconds."""
    held = []
    with suppress(RayError):
        for _ in range(24):
            held.append(ray.put(np.ones(STORE_BYTES // 12, np.uint8)))
    time.sleep(HELD_S)
    return bool(held)


def input_away(scene: Scene) -> bool:
    """Have something else in place of all input files for a moment when they are first read."""
    hidden = {path: path.with_name(f".{path.name}") for path in parquet_files(scene.folder / "input")}
    for path, aside in hidden.items():
        path.rename(aside)
        path.write_bytes(b"not now " * 100)
        os.utime(path, (0, time.time()))  # so that it is seen when one is read
    seen = wait_until(lambda: any(path.stat().st_atime for path in hidden), 10.0)
    time.sleep(scene.rng.uniform(0.0, 0.5))
    for path, aside in hidden.items():
        aside.replace(path)
    return seen


def input_damaged(scene: Scene) -> bool:
    """Damage the payloads of a row group of the input for good: its rows, and no others, must fail, under their ids."""
    path = scene.rng.choice(parquet_files(scene.folder / "input"))
    with pq.ParquetFile(path) as file:
        group = scene.rng.randrange(file.metadata.num_row_groups)
        column = file.metadata.row_group(group).column(file.schema_arrow.names.index("payload"))
        hit = file.read_row_group(group, columns=["example_id"])["example_id"].to_pylist()
    scene.must_fail.update(hit)
    with path.open("r+b") as raw:
        raw.seek(column.data_page_offset + 1000)
        raw.write(os.urandom(4096))
    return True


def next_version(scene: Scene) -> bool:
    """Deploy other models and another policy in place of those that answer, and wait until they do.

    The machine may be busy while one version takes over from the other.
    """
    options = {"on_failure": "degrade", "shift": 1, "load_s": scene.rng.choice((0.0, 5.0)), **_ALONE}
    pool = load_pool(pool_file(scene.folder / "next.yaml", scene.notes, **options))
    policy = Policy.load(scene.cascade.policy).with_budget(NEXT_BUDGET)
    scene.of_next = answers_of(scene.cascade.next_table, policy)
    target = serve.RunTarget(application(pool, policy), name=pool.name, route_prefix="/", logging_config=None)
    with ThreadPoolExecutor(1) as threads:
        slowed = threads.submit(_slow_down, scene, scene.rng.choice((0.0, BUSY_S)))
        serve.run_many([target])
        slowed.result()
    return True


def _slow_down(scene: Scene, seconds: float) -> None:
    """Have the replicas of the service run for a share of the time only, once the next models have loaded."""
    wait_until(lambda: all(len(replicas(scene.notes, stage)) > 1 for stage in range(3)), DEADLINE_S)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        victims = processes("ServeReplica:faults")
        _signal(victims, psutil.Process.suspend)
        time.sleep(PAUSED_S)
        _signal(victims, psutil.Process.resume)
        time.sleep(RUNS_S)


def hostile_bodies(scene: Scene) -> bool:
    """Send bodies of megabytes, bodies that do not go on, and connections without a byte, all at once."""
    at = urlsplit(scene.url)
    head = "POST /v1/decisions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"

    def status(n_bytes: int, body: bytes) -> str:
        """Return the status of the answer to a body that is announced with n_bytes, "none" without an answer."""
        with suppress(OSError), socket.create_connection((at.hostname, at.port), HOSTILE_S) as connection:
            connection.sendall(head.format(n_bytes).encode() + body)
            return connection.recv(100).decode().partition(" ")[2][:3]
        return "none"

    with ExitStack() as silent, ThreadPoolExecutor(N_LARGE + N_SLOW) as clients:
        for _ in range(N_SILENT):
            silent.enter_context(socket.create_connection((at.hostname, at.port)))
        question = b'{"model": "faults", "input": "' + bytes([scene.rng.randrange(97, 123)]) * LARGE_BYTES
        large = [clients.submit(status, len(question), question) for _ in range(N_LARGE)]
        slow = [clients.submit(status, 1000, question[: scene.rng.randrange(900)]) for _ in range(N_SLOW)]
        for path, answers, right in ((_LARGE, large, "413"), (_SLOW, slow, "408")):
            scene.reached |= {path} if right in [answer.result() for answer in answers] else set()
        scene.reached.add(_SILENT)
    return True


def driver_killed(scene: Scene) -> bool:
    """Kill the process that asked for the run."""
    return (scene.folder / "out" / "run.json").exists() and kill([scene.child])


KINDS = (
    Kind("none", "nothing", lambda scene: True),
    Kind("replica-killed", "stage 1", killed(stage=0), times=2, sometimes=(_AGAIN, _LOST)),
    Kind("replica-killed-last", "last stage", killed(stage=2), times=2, sometimes=(_AGAIN,)),
    Kind("replicas-killed", "last stage, all at once", killed(stage=2, every=True), pool=_MANY, sometimes=(_LOST,)),
    Kind("replica-hangs", "stage 2", model_fault("hangs", 1, calls=2), pool=_IMPATIENT),
    Kind("replica-hangs-on", "stage 2", model_fault("hangs", 1, replicas=1), pool=_IMPATIENT),
    Kind("replica-turns-bad", "stage 2", model_fault("raises", 1, replicas=1)),
    Kind("replica-turns-nan", "stage 1", model_fault("nan", 0, replicas=1)),
    Kind("replica-turns-shape", "last stage", model_fault("shape", 2, replicas=1)),
    Kind("replica-turns-deadly", "stage 2", model_fault("dies", 1, replicas=2)),
    Kind("replicas-turn-bad", "last stage, 4 of 6", model_fault("length", 2, replicas=4), pool=_MANY),
    Kind("bad-for-a-while", "stage 2, all replicas", model_fault("raises", 1, seconds=8.0)),
    Kind("nan", "every stage", model_fault("nan", 0, 1, 2, calls=3)),
    Kind("shape", "every stage", model_fault("shape", 0, 1, 2, calls=3)),
    Kind("raises", "every stage", model_fault("raises", 0, 1, 2, calls=3)),
    Kind("row-raises", "3 rows, stage 2", guilty_rows("raises", 3), when="before"),
    Kind("row-kills", "a row, stage 2", guilty_rows("dies", 1), when="before", pool=_PATIENT),
    Kind("dies-loading", "last stage", dies_loading),
    Kind("stage-down", "last stage", stage_down, pool=_SOON_DOWN | {"on_failure": "degrade"}),
    Kind("stage-down-resumed", "last stage", stage_down, ("run",), pool=_SOON_DOWN, ends="has had no live replica for"),
    Kind("controller-killed", "controller", killed("RunController", "ServeController"), sometimes=(_ATTEMPT,)),
    Kind("reader-killed", "what reads", killed("read_blocks"), ("run",), times=2),
    Kind("driver-killed", "driver, resumed", driver_killed, ("run",), ends="", sometimes=(_ATTEMPT,)),
    Kind("driver-doubled", "a second driver", second_driver, ("run",), sometimes=(_ATTEMPT,)),
    Kind("input-away", "input", input_away, ("run",), when="reading"),
    Kind("input-damaged", "input", input_damaged, ("run",), when="before"),
    Kind("router-killed", "router, 1 of 2", killed("ServeReplica:faults:Router"), ("service",), loses=True),
    Kind("proxy-killed", "Serve's proxy", killed("ProxyActor"), ("service",), loses=True),
    Kind(
        "version-next",
        "pool and policy",
        next_version,
        ("service",),
        pool=_ALONE,
        goes_unnoticed=True,
        sometimes=(_NEXT,),
    ),
    Kind(
        "bodies-hostile",
        "bodies and connections",
        hostile_bodies,
        ("service",),
        goes_unnoticed=True,
        sometimes=(_LARGE, _SLOW, _SILENT),
    ),
    Kind("node-killed", "a node, room elsewhere", node_killed(replaced=False), session="nodes", loses=True),
    Kind("node-replaced", "a node, another comes", node_killed(replaced=True), session="nodes", loses=True),
    Kind("reader-node-killed", "a node that reads", reader_node_killed, ("run",), "nodes", remote=True),
    Kind(
        "answers-node-killed",
        "a node with large answers",
        node_killed(replaced=True),
        ("collection",),
        "nodes",
        pool=_ANSWERS,
        remote=True,
    ),
    Kind("collection-controller-killed", "controller", killed("RunController"), ("collection",), pool=_ANSWERS),
    Kind("network-cut", "a node, until given up", network_cut(3 * NOTICED_S), session="network", loses=True),
    Kind("network-stalls", "a node, soon back", network_cut(NOTICED_S / 3), session="network", loses=True),
    Kind("store-full", "object store", store_full, ("run",), session="small-store"),
    Kind("store-full-no-spilling", "object store, no disk", store_full, ("run",), session="store-without-disk"),
)
