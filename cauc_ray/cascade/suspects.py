"""The inputs of a stage of a service that may end or hang its replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.cascade.rows import Owner

# Seconds for which an input is remembered that has ended replicas, and the most of them.
REFUSED_S = 300.0
MOST_REMEMBERED = 1000

Verdict: TypeAlias = Literal["clear", "suspected", "guilty"]


@dataclass(frozen=True, slots=True)
class VerdictReached:
    """A new verdict on an input of a stage.

    Attributes:
        stage: The stage.
        digest: Of the input.
        verdict: The verdict.
        deadly: Whether a replica ended, not only hung.
    """

    stage: int
    digest: bytes
    verdict: Verdict
    deadly: bool


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is known of an input.

    Attributes:
        verdict: The verdict.
        since: When the input was first suspected.
        until: When it is forgotten.
        deadly: Whether a replica ended, not only hung.
    """

    verdict: Verdict
    since: float
    until: float
    deadly: bool


class Suspects:
    """Remembers inputs of a stage by their digests.

    An input is suspected once a replica ended in a call that had it, until it is answered, and guilty once one ended
    while it computed nothing else.

    Attributes:
        news: New verdicts for other routers: digest, verdict, and whether a replica ended.
    """

    def __init__(self) -> None:
        self._records: dict[bytes, Suspicion] = {}
        self.news: list[tuple[bytes, Verdict, bool]] = []

    def verdict(self, owner: Owner, now: float) -> Verdict:
        """Return the verdict on an owner's input."""
        record = self.of(owner, now)
        return "clear" if record is None else record.verdict

    def of(self, owner: Owner, now: float) -> Suspicion | None:
        """Return what is known of an owner's input, None if it is clear."""
        if not self._records:  # no digest is worked out as long as none is needed
            return None
        record = self._records.get(owner.fingerprint() or b"")
        return record if record is not None and now < record.until else None

    def note(self, owner: Owner, verdict: Verdict, now: float, *, deadly: bool = True) -> None:
        """Remember a verdict on an owner's input.   deadly: whether a replica ended, not only hung."""
        if (verdict == "clear" and not self._records) or (digest := owner.fingerprint()) is None:
            return
        record = self._records.get(digest)
        if verdict != ("clear" if record is None else record.verdict):
            self.news.append((digest, verdict, deadly))
        self.learn(digest, verdict, now, deadly=deadly)

    def learn(self, digest: bytes, verdict: Verdict, now: float, *, deadly: bool) -> None:
        """Take a verdict, also of another router."""
        record = self._records.pop(digest, None)
        if record is not None and record.verdict == "guilty" and verdict == "suspected":
            verdict = "guilty"  # what another router has suspected meanwhile
        if verdict != "clear":
            since = now if record is None else record.since
            self._records[digest] = Suspicion(verdict, since, now + REFUSED_S, deadly)
        if len(self._records) > MOST_REMEMBERED:
            del self._records[next(iter(self._records))]
