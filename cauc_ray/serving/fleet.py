"""An edge service's part in a fleet: it pulls its policy, which is signed, and reports what it has seen."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpcore2

from cauc_ray.errors import CaucError, ConfigError, PolicyError, one_line
from cauc_ray.files.documents import atomic_file, make_folder
from cauc_ray.models.fleet import FleetSpec
from cauc_ray.policies.policy import SIGNED, Policy
from cauc_ray.policies.signing import SIGNATURE, SIGNATURE_BYTES, SignatureError, public_key, verified
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.feedback_queue import Batch, FeedbackQueue
from cauc_ray.serving.http_app import MAX_POLICY_BYTES
from cauc_ray.serving.policies_live import PolicyChange, require_same_chain
from cauc_ray.serving.service import repeat

if TYPE_CHECKING:
    from cauc_ray.serving.service import Service

# One request, from the connection to the last byte.
DEADLINE_S = 30.0
# Edges that started together do not ask together for long: the share by which pauses vary.
JITTER = 0.2
# A policy and its signature are two files: while they are replaced, they may not fit each other.
TRIES, RETRY_S = 3, 0.5

logger = logging.getLogger(__name__)


class UnreachableError(Exception):
    """A server does not answer, or not with what was asked for."""


class KeptPolicy:
    """The last good policy on disk, in one file with its signature, so that both change at once."""

    def __init__(self, folder: Path, key_file: str) -> None:
        self.key = public_key(key_file)
        self._path = folder / "policy.signed"
        self.content: bytes | None = None

    def newer(self, given: Policy) -> Policy:
        """Return the kept policy, verified again, or the given one where none is kept or it is the newer one."""
        if not self._path.exists():
            return given
        try:
            kept = self._path.read_bytes()
            signature, content = kept[:SIGNATURE_BYTES], kept[SIGNATURE_BYTES:]
            policy = verified(content, signature, self.key, str(self._path))
            require_same_chain(policy, given)
            require_not_older(policy, given.issued_at)
        except (CaucError, OSError) as error:
            logger.warning(f"the kept policy is not used: {error}")
            return given
        self.content = content
        return policy

    def keep(self, content: bytes, signature: bytes) -> None:
        """Write a good policy's file and signature. Raises ConfigError."""
        with atomic_file(self._path) as file:
            file.write_bytes(signature + content)
        self.content = content


def require_not_older(policy: Policy, than: datetime | None) -> None:
    """Raise PolicyError if a signed policy was issued before a time."""
    if than is not None and policy.issued_at is not None and policy.issued_at < than:
        raise PolicyError(f"policy {policy.id} was issued at {policy.issued_at}, before the active one, at {than}")


def is_expired(policy: Policy) -> bool:
    """Return whether a policy has expired."""
    return policy.expires_at is not None and policy.expires_at <= datetime.now(UTC)


class Edge:
    """One edge of a fleet, whose service has its policy and takes others.

    policy: to begin with: the last good one that is kept, else the given one.   queue: feedback to be reported.
    """

    def __init__(self, spec: FleetSpec, given: Policy) -> None:
        """Read what is kept, and connect to nothing yet. Raises ConfigError."""
        self._spec, self._tls, state = spec, spec.trust("the fleet"), Path(spec.state)
        make_folder(state)
        for part in state.glob(".cauc-*.part"):  # of a process that was killed while it wrote
            part.unlink(missing_ok=True)
        self._token = spec.token("the fleet")
        self._kept = None if spec.public_key is None else KeptPolicy(state, spec.public_key)
        self.policy = given if self._kept is None else self._kept.newer(given)
        self._newest = self.policy.issued_at
        most_bytes = int(spec.queue_mb * 1e6)
        self.queue = None if spec.report is None else FeedbackQueue(state / "feedback", most_bytes)
        self._name, self._life, self._sequence = spec.name or socket.gethostname(), uuid.uuid4().hex, 0
        self._etag: str | None = None
        self._said: dict[str, str | None] = {}

    async def run(self, service: Service) -> None:
        """Pull and report until cancelled."""
        self._service, every_s = service, self._spec.every_s
        connections = httpcore2.AsyncConnectionPool(self._tls)
        async with connections as self._connections, asyncio.TaskGroup() as tasks:
            for do, url in ((self.pull, self._spec.policy), (self.report, self._spec.report)):
                if url is not None:
                    tasks.create_task(repeat(do, every_s, JITTER))

    async def feedback(self, body: bytes) -> None:
        """Keep feedback that the service has taken, until it is reported."""
        if self.queue is None:
            return
        message = json.loads(body)
        try:
            n_dropped = await asyncio.to_thread(self.queue.add, message)
            self._say("queue", "the queue is full; the oldest feedback is dropped" if n_dropped else None)
        except OSError as error:
            n_dropped = len(message["label"])
            self._say("queue", f"feedback cannot be kept for the fleet: {error}")
        self._service.metrics.feedback(dropped=n_dropped)

    async def pull(self) -> None:
        """Make the source's policy the active one, unless it must be refused: then the active one stays."""
        says = None
        try:
            await self._pull()
        except (PolicyError, UnreachableError) as error:
            says = f"{error}; policy {self._service.in_force.id} stays active"
            self._service.metrics.policy_change("refused" if isinstance(error, PolicyError) else "unreachable")
        except (RequestError, ConfigError) as error:  # the service has refused and counted it, or it cannot be kept
            says = f"{self._spec.policy}: {error}"
        self._say("pull", says)
        active = self._service.in_force
        expired = is_expired(active.policy)
        self._service.metrics.policy_expired(expired)
        says = f"policy {active.id} expired at {active.policy.expires_at}; it stays active" if expired else None
        self._say("expired", says)

    async def _pull(self) -> None:
        """Take and keep the source's policy if it is another one. Raises what pull() catches."""
        for left in reversed(range(TRIES)):
            try:
                return await self._take()
            except SignatureError:
                if not left:
                    raise
            await asyncio.sleep(RETRY_S * random.uniform(1 - JITTER, 1 + JITTER))
        return None

    async def _take(self) -> None:
        assert self._kept is not None
        assert self._spec.policy is not None
        url = self._spec.policy
        content, etag = await self._asked("GET", url, {"If-None-Match": self._etag})
        if content is None or content == self._kept.content:
            self._etag = etag
            return
        signature = (await self._asked("GET", url + SIGNATURE, {}, most_bytes=SIGNATURE_BYTES))[0] or b""
        policy = await asyncio.to_thread(verified, content, signature, self._kept.key, url)
        if is_expired(policy):
            raise PolicyError(f"{url} expired at {policy.expires_at}")
        for active in (self._newest, self._service.in_force.policy.issued_at):
            require_not_older(policy, active)
        await self._service.set_policy(PolicyChange(policy=policy.packed()))
        self._newest = policy.issued_at
        await asyncio.to_thread(self._kept.keep, content, signature)
        self._etag = etag

    async def report(self) -> None:
        """Report what the service has seen since it began, and the feedback that waits, batch by batch."""
        assert self.queue is not None
        assert self._spec.report is not None
        problem, more = None, True
        while more and problem is None:
            batch = await asyncio.to_thread(self.queue.oldest)
            content = json.dumps(await self._seen(batch), allow_nan=False).encode()
            try:
                await self._asked("POST", self._spec.report, {"Content-Type": "application/json"}, content)
                if batch is not None:
                    await asyncio.to_thread(self.queue.remove, batch)
            except (PolicyError, UnreachableError) as error:
                problem = str(error)
            self._say("report", problem)
            self._service.metrics.report("failed" if problem else "taken", self.queue.n_bytes)
            more = batch is not None and self.queue.n_bytes > 0

    async def _seen(self, batch: Batch | None) -> dict[str, Any]:
        """Return a report as JSON (fleet_reports.FleetReport)."""
        in_force, metrics = self._service.in_force, self._service.metrics
        metrics.flush()
        self._sequence += 1
        return {
            "edge": self._name,
            "life": self._life,
            "sequence": self._sequence,
            "policy_id": in_force.id,
            **in_force.policy.model_dump(mode="json", include={*SIGNED}),
            "counters": metrics.totals(),
            "watch": await self._service.watch(),
            "feedback": None if batch is None else asdict(batch),
        }

    async def _asked(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str | None],
        body: bytes = b"",
        most_bytes: int = MAX_POLICY_BYTES,
    ) -> tuple[bytes | None, str | None]:
        """Make a request; return the content of the answer and its tag, None for what has not changed.

        Headers without a value are not sent. Raises UnreachableError, and PolicyError for what is too long.
        """
        own = {name: value for name, value in headers.items() if value is not None}
        if self._token is not None and urlsplit(url).netloc == urlsplit(self._spec.report or url).netloc:
            own["Authorization"] = f"Bearer {self._token}"
        content = b""
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                self._connections.stream(method, url, headers=[*own.items()], content=body) as answer,
            ):
                tag = next((value.decode("latin-1") for name, value in answer.headers if name.lower() == b"etag"), None)
                if answer.status == 304:
                    return None, tag or headers.get("If-None-Match")
                if not 200 <= answer.status < 300:
                    raise UnreachableError(f"{url} answers with status {answer.status}")
                async for chunk in answer.aiter_stream():
                    content += chunk
                    if len(content) > most_bytes:
                        raise PolicyError(f"{url} is longer than {most_bytes:,} bytes")
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, ValueError) as error:
            raise UnreachableError(f"{url} cannot be reached: {one_line(error)}") from error
        return content, tag

    def _say(self, about: str, problem: str | None) -> None:
        """Log a problem when it begins, not again and again while it lasts, and when it is over."""
        if problem != self._said.get(about):
            logger.log(*((logging.WARNING, problem) if problem else (logging.INFO, f"solved: {self._said[about]}")))
        self._said[about] = problem
