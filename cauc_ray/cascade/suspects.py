"""Rows that a replica may have ended for: what is known of requests with the same input."""

from __future__ import annotations

from typing import Literal, TypeAlias

from cauc_ray.cascade.rows import Owner

# So long an input that has ended replicas is refused at once, and so many are remembered.
REFUSED_S = 300.0
MOST_REMEMBERED = 1000

Verdict: TypeAlias = Literal["clear", "suspected", "guilty"]


class Suspects:
    """Remembers inputs by their digests.

    An input is suspected once a replica ended in a call that had it, until it is answered, and guilty once one ended
    while it computed nothing else.
    """

    def __init__(self) -> None:
        self._verdicts: dict[bytes, tuple[Verdict, float]] = {}

    def verdict(self, owner: Owner, now: float) -> Verdict:
        """Return what is known of an owner's input."""
        if not self._verdicts:  # no digest is worked out as long as none is needed
            return "clear"
        verdict, until = self._verdicts.get(owner.fingerprint() or b"", ("clear", 0.0))
        return verdict if now < until else "clear"

    def note(self, owner: Owner, verdict: Verdict, now: float) -> None:
        """Remember what has become known of an owner's input."""
        if (verdict == "clear" and not self._verdicts) or (digest := owner.fingerprint()) is None:
            return
        self._verdicts.pop(digest, None)
        if verdict != "clear":
            self._verdicts[digest] = verdict, now + REFUSED_S
        if len(self._verdicts) > MOST_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
