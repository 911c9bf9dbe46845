"""Requests that a replica may have ended for: which they are, and what is known of their inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from cauc_ray.serving.flight import Flight

# So long an input that has ended replicas is refused at once, and so many are remembered.
REFUSED_S = 300.0
MOST_REMEMBERED = 1000

Verdict: TypeAlias = Literal["clear", "suspected", "guilty"]


class Suspects:
    """Remembers inputs by their digests.   clock: seconds.

    An input is suspected once a replica ended in a call that had it, until it is answered, and guilty once one ended
    while it computed nothing else.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._verdicts: dict[bytes, tuple[Verdict, float]] = {}

    def verdict(self, flight: Flight) -> Verdict:
        """Return what is known of a request's input."""
        if not self._verdicts:  # no digest is worked out as long as none is needed
            return "clear"
        verdict, until = self._verdicts.get(flight.fingerprint(), ("clear", 0.0))
        return verdict if self._clock() < until else "clear"

    def note(self, flight: Flight, verdict: Verdict) -> None:
        """Remember what has become known of a request's input."""
        if verdict == "clear" and not self._verdicts:
            return
        self._verdicts.pop(flight.fingerprint(), None)
        if verdict != "clear":
            self._verdicts[flight.fingerprint()] = verdict, self._clock() + REFUSED_S
        if len(self._verdicts) > MOST_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]
