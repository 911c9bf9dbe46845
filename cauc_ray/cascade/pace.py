"""How long a stage's calls take."""

from __future__ import annotations

from collections import deque
from statistics import median

# So many calls are remembered; it takes a few to know anything.
CALLS, FEWEST = 9, 3


class Pace:
    """Remembers the last calls of a stage."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, float, int]] = deque(maxlen=CALLS)

    def note(self, call_s: float, compute_s: float, n_rows: int) -> None:
        """Remember how long a call of so many rows has taken, and its model computed for it, in seconds."""
        self._calls.append((call_s, compute_s, n_rows))

    # Medians: the first call of a model may take a hundred times as long as the next.
    @property
    def call_s(self) -> float:
        """Return how long a call takes, its wait for those of other routers included; 0 before that is known."""
        return median(call for call, _, _ in self._calls) if len(self._calls) >= FEWEST else 0.0

    @property
    def long_call_s(self) -> float:
        """Return how long one call in five takes or longer; 0 before that is known."""
        calls = sorted(call for call, _, _ in self._calls)
        return calls[len(calls) * 4 // 5] if len(calls) >= FEWEST else 0.0

    @property
    def compute_s(self) -> float:
        """Return how long a model computes for a call; 0 before that is known."""
        return median(compute for _, compute, _ in self._calls) if len(self._calls) >= FEWEST else 0.0

    @property
    def row_s(self) -> float:
        """Return how long a model computes for a row of a call; 0 before that is known."""
        return median(compute / n for _, compute, n in self._calls) if len(self._calls) >= FEWEST else 0.0
