"""Feedback that waits on disk until the fleet's service has it: bounded, and whole after a process is killed."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# A batch is a file of about so many bytes.
BATCH_BYTES = 250_000
_ENDING = ".jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Batch:
    """Messages that are sent together, the same ones whenever they are sent again.   id: no other batch has it."""

    id: str
    messages: tuple[dict[str, Any], ...]


class FeedbackQueue:
    """A folder of batches: files of JSON lines whose names are in the order in which they began.

    Lines are only ever added to the newest file, and only by the process that began it, so that a line which a kill
    has torn is the last of its file and is skipped. A power cut may lose what the system has not yet written.
    most_bytes: on disk; beyond that the oldest batch is dropped. Methods may block for the disk, and raise OSError.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._most_bytes = folder, most_bytes
        self._sizes = {path.stem: path.stat().st_size for path in sorted(folder.glob(f"*{_ENDING}"))}
        self._newest: str | None = None  # takes more lines
        self._lock = threading.RLock()

    @property
    def n_bytes(self) -> int:
        """Return how many bytes wait."""
        with self._lock:
            return sum(self._sizes.values())

    def add(self, message: dict[str, Any]) -> int:
        """Append a message; return how many rows were dropped for it."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            batch, self._newest = self._newest, None  # after an error, the next line begins another file
            if batch is None or self._sizes[batch] + len(line) > BATCH_BYTES:
                batch = f"{time.time_ns():020d}-{uuid.uuid4().hex[:12]}"
            self._sizes[batch] = self._sizes.get(batch, 0) + len(line)
            with self._path(batch).open("ab") as file:
                file.write(line)
            self._newest = batch
            n_dropped = 0
            while self.n_bytes > self._most_bytes and (oldest := next(iter(self._sizes))) != batch:
                n_dropped += sum(len(one.get("label", ())) for one in self._read(oldest))
                self._remove(oldest)
        return n_dropped

    def oldest(self) -> Batch | None:
        """Return the oldest batch, which takes no more messages from now on; None if nothing waits."""
        with self._lock:
            while (batch := next(iter(self._sizes), None)) is not None:
                if batch == self._newest:
                    self._newest = None
                if messages := self._read(batch):
                    return Batch(batch, messages)
                self._remove(batch)
        return None

    def remove(self, batch: Batch) -> None:
        """Delete a batch that has arrived."""
        with self._lock:
            if batch.id in self._sizes:
                self._remove(batch.id)

    def _remove(self, batch: str) -> None:
        self._path(batch).unlink(missing_ok=True)
        del self._sizes[batch]

    def _read(self, batch: str) -> tuple[dict[str, Any], ...]:
        """Return a batch's messages, without lines that are not whole."""
        path, messages = self._path(batch), []
        for line in path.read_bytes().splitlines() if path.exists() else ():
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if isinstance(message, dict):
                messages.append(message)
            else:
                logger.warning(f"{path}: a line of feedback is not whole and is skipped")
        return tuple(messages)

    def _path(self, batch: str) -> Path:
        return self._folder / f"{batch}{_ENDING}"
