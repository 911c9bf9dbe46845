"""A Ray session of a part's own, and the memory of its processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import ray

from cauc_ray.execution.session import keep_store_free

# What the titles of Ray's actors and tasks hold, by what they do in a run; the driver is this process.
DRIVER = "driver"
ROLES = {"controller": "RunController", "reader": "read_blocks", "worker": "StageWorker"}


@contextmanager
def own_session(n_cpus: int, store_mb: float | None = None) -> Iterator[None]:
    """Start a Ray session with so many CPUs and such an object store, for the length of the block."""
    keep_store_free()
    ray.init(
        address="local",
        num_cpus=n_cpus,
        object_store_memory=None if store_mb is None else int(store_mb * 1e6),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield
    finally:
        ray.shutdown()


def session_is_up() -> str | None:
    """Return why a part cannot start a session of its own, None where it can."""
    return "a Ray session is up, and this needs one of its own" if ray.is_initialized() else None


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What the processes held at one time.

    at_s: seconds since the sampling began.   n_rows: rows finished by then.   rss: bytes in memory of each
    process of a role.   stored, spilled: bytes in the object store, and ever moved from it to disk.
    """

    at_s: float
    n_rows: int
    rss: dict[str, tuple[int, ...]]
    stored: int
    spilled: int


@dataclass(slots=True)
class Sampler:
    """Takes samples in a thread, until it is stopped. n_rows is set from outside."""

    every_s: float
    n_rows: int = 0
    samples: list[MemorySample] = field(default_factory=list)
    _stopped: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Take samples for the length of the block."""
        thread = threading.Thread(target=self._sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stopped.set()
            thread.join(60)

    def _sample(self) -> None:
        started = time.monotonic()
        while not self._stopped.wait(self.every_s):
            stored, spilled = object_store_bytes()
            sample = MemorySample(time.monotonic() - started, self.n_rows, rss_by_role(), stored, spilled)
            self.samples.append(sample)

    def peak(self, role: str) -> int:
        """Return the most bytes that any one process of a role held."""
        return max((n for sample in self.samples for n in sample.rss.get(role, ())), default=0)

    def peak_together(self, role: str) -> int:
        """Return the most bytes that all processes of a role held at one time; what they share is counted in each."""
        return max((sum(sample.rss.get(role, ())) for sample in self.samples), default=0)


def rss_by_role() -> dict[str, tuple[int, ...]]:
    """Return the bytes in memory of each process of the session, by its role in a run."""
    found: dict[str, list[int]] = {DRIVER: [psutil.Process().memory_info().rss], **{role: [] for role in ROLES}}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            role = next((role for role, name in ROLES.items() if title.startswith("ray::") and name in title), None)
            if role is not None:
                found[role].append(process.memory_info().rss)
        except psutil.Error:  # it has ended since it was listed
            continue
    return {role: tuple(sizes) for role, sizes in found.items()}


def object_store_bytes() -> tuple[int, int]:
    """Return the bytes that objects take in the store now, and those that were ever spilled from it."""
    # What `ray memory --stats-only` prints: Ray has no public call for it, and its metrics are ten seconds old.
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    store = get_memory_info_reply(state).store_stats
    return int(store.object_store_bytes_used), int(store.spilled_bytes_total)
