"""Requests that are repeated: one with the Idempotency-Key of another is not computed again."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from starlette.responses import Response

from cauc_ray.protocol.tensors import RequestError

# A response and its fields for the log.
Answered: TypeAlias = tuple[Response, Mapping[str, Any]]

# An answer is kept for so long, and all of them together take so many bytes at most; those of one router.
KEPT_S = 300.0
KEPT_BYTES = 64_000_000
# What a kept answer takes next to its body.
_OWN_BYTES = 2000
LONGEST_KEY = 200
# The digest of a longer body is computed in a thread.
LONG_BODY = 1_000_000
# What may differ in a request that is repeated: the time that is left for it.
_TIMEOUT = re.compile(rb'"timeout"\s*:\s*\d+')


@dataclass(slots=True)
class _Kept:
    """A request that is or was answered.   digest: of its body.   until: when its answer is dropped."""

    digest: bytes
    answering: asyncio.Task[Answered]
    until: float = float("inf")
    n_bytes: int = field(default=0)


class Repeats:
    """The requests of late, by their keys.

    A request with a key is answered to its end even if its client goes away: the client is likely to come back. Only
    good answers are kept, in the order in which they were given.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._n_bytes = 0

    async def answer(self, key: str, body: bytes, compute: Callable[[], Awaitable[Answered]]) -> Answered:
        """Return what compute returns, or has returned for the same request.

        Raises RequestError: 400 for a bad key, 422 for one of another request, and what compute raises.
        """
        if not (key.isprintable() and 1 <= len(key) <= LONGEST_KEY):
            raise RequestError(f"an Idempotency-Key has 1 to {LONGEST_KEY} printable characters")
        digest = _digest(body) if len(body) < LONG_BODY else await asyncio.to_thread(_digest, body)
        self._drop_old()
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = _Kept(digest, asyncio.ensure_future(compute()))
            kept.answering.add_done_callback(lambda _: self._answered(key, kept))
        elif kept.digest != digest:
            raise RequestError("this Idempotency-Key was used for another request", 422)
        return await asyncio.shield(kept.answering)

    def _answered(self, key: str, kept: _Kept) -> None:
        """Keep an answer as the latest one, forget anything else."""
        self._kept.pop(key, None)
        if kept.answering.cancelled() or kept.answering.exception() is not None:
            return
        response, fields = kept.answering.result()
        if fields.get("degraded"):
            return
        kept.until, kept.n_bytes = time.monotonic() + KEPT_S, len(response.body) + _OWN_BYTES
        self._kept[key] = kept
        self._n_bytes += kept.n_bytes
        self._drop_old()

    def _drop_old(self) -> None:
        now = time.monotonic()
        for key, kept in list(self._kept.items()):
            if not kept.answering.done():
                continue
            if kept.until > now and self._n_bytes <= KEPT_BYTES:
                break  # the others are younger
            del self._kept[key]
            self._n_bytes -= kept.n_bytes


def _digest(body: bytes) -> bytes:
    return blake2b(_TIMEOUT.sub(b"", body), digest_size=16).digest()
