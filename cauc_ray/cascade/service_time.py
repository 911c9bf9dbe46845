"""How long a stage's calls take."""

from __future__ import annotations

from collections import deque
from statistics import median

# So many calls are remembered; it takes a few to know anything.
CALLS, FEWEST = 9, 3


class ServiceTime:
    """Remembers the last calls of a stage. All figures are seconds, and 0 before they are known.

    call_s: a call, its wait for those of other routers included.   long_call_s: what one in five takes, or longer.
    compute_s: what the model computes for a call; row_s: for one row of it.
    """

    def __init__(self) -> None:
        self.call_s = self.long_call_s = self.compute_s = self.row_s = 0.0
        self._calls: deque[tuple[float, float, int]] = deque(maxlen=CALLS)

    def note(self, call_s: float, compute_s: float, n_rows: int) -> None:
        """Remember how long a call of so many rows has taken, and its model computed for it."""
        self._calls.append((call_s, compute_s, n_rows))
        if len(self._calls) < FEWEST:
            return
        # Medians: the first call of a model may take a hundred times as long as the next.
        calls = sorted(call for call, _, _ in self._calls)
        self.call_s, self.long_call_s = median(calls), calls[len(calls) * 4 // 5]
        self.compute_s = median(compute for _, compute, _ in self._calls)
        self.row_s = median(compute / n for _, compute, n in self._calls)
