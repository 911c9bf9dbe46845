"""How many requests are open, and whether more are likely to come soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The most requests that were open at once are remembered for one to two of these.
WINDOW_S = 0.5


class OpenRequests:
    """Counts open requests.

    Clients that send their next request when they have their answer come back together: waiting for
    them pays while fewer requests are open than recently, and never for a single client.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_open = 0
        self._most = self._most_before = 0
        self._window_ends = 0.0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Count a request for the length of the block."""
        self.came(1)
        try:
            yield
        finally:
            self.left(1)

    def came(self, n: int) -> None:
        """Count n requests that are open from now on."""
        self._turn_window()
        self._n_open += n
        self._most = max(self._most, self._n_open)

    def left(self, n: int) -> None:
        """Count n requests that are no longer open."""
        self._n_open -= n

    def expects_more(self) -> bool:
        """Return whether fewer requests are open than there were at once a moment ago."""
        self._turn_window()
        return self._n_open < max(self._most, self._most_before)

    def _turn_window(self) -> None:
        now = self._clock()
        if now < self._window_ends:
            return
        # A window that nobody looked into was as empty as it is now.
        lately = now < self._window_ends + WINDOW_S
        self._most_before = self._most if lately else self._n_open
        self._most = self._n_open
        self._window_ends = now + WINDOW_S
