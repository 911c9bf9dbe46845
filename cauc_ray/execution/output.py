"""What models print and log on their replicas, for whoever has started them."""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# Has what models print, as INFO: a line begins with its stage.
logger = logging.getLogger("cauc_ray.output")

# What the names of stages' workers begin with on Ray, and what Serve makes of its replicas' names.
STAGE = "stage "
_SERVED = re.compile(r"ServeReplica:.*:stage:(.+)")
# What Serve logs for its own log files; warnings and errors are reported here too.
_SERVE_LOG = re.compile(r"(INFO|DEBUG) \d{4}-\d\d-\d\d ")
# The number of distinct lines that are remembered.
MOST_LINES = 10_000
REPEATED_S = 1.0


@contextmanager
def model_output() -> Iterator[None]:
    """Log what models print on the current Ray session, which must send it to its driver, in place of Ray's own print.

    Ray 2.60 writes what replicas print to standard output, which is for results, with process ids and repetitions.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler(logger.name, ModelOutput().take)
    try:
        yield
    finally:
        dispatcher.remove_handler(logger.name)


class ModelOutput:
    """Lines of all replicas, logged as if each stage had one: what each of them prints once appears once.

    Lines that differ in their digits alone (times, process ids) count as the same. Progress bars are left out, and
    what a process repeats within a second: where several nodes are one machine, each of them sends each line.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], Counter[Any]] = {}
        self._last: dict[tuple[Any, str], float] = {}

    def take(self, batch: Mapping[str, Any]) -> None:
        """Log the lines of a batch as Ray sends it, if they are of a stage."""
        name = batch.get("actor_name") or ""
        if served := _SERVED.fullmatch(name):
            name = f"{STAGE}{served[1]!r}"
        if not name.startswith(STAGE):
            return
        if len(self._last) > MOST_LINES:
            self._seen.clear()
            self._last.clear()
        now, replica = time.monotonic(), (batch["ip"], batch["pid"])
        for line in batch["lines"]:
            last, self._last[replica, line] = self._last.get((replica, line), -math.inf), now
            if "\r" in line or not line.strip() or (served and _SERVE_LOG.match(line)) or now - last < REPEATED_S:
                continue
            seen = self._seen.setdefault((name, _without_digits(line)), Counter())
            seen[replica] += 1
            if seen[replica] > seen["logged"]:
                seen["logged"] += 1
                logger.info("%s: %s", name, _plain(line))


def _without_digits(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def _plain(line: str) -> str:
    """Return a line without colours and other terminal control sequences."""
    return "".join(each for each in re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", line) if each.isprintable() or each == "\t")
