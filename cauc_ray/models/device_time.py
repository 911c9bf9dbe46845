"""How long a network's forward passes keep a GPU at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, Self

import torch


class Event(Protocol):
    """A mark among the work that a device has been given, as torch.cuda.Event is."""

    def record(self) -> None:
        """Put the mark after the work given so far."""

    def synchronize(self) -> None:
        """Wait until the device has come to the mark."""

    def elapsed_time(self, later: Self, /) -> float:
        """Return the milliseconds that the device took from this mark to a later one."""


class DeviceTime:
    """Adds up the device's time of a call's forward passes: not of reading, preparing, copying and waiting."""

    def __init__(self, device: torch.device, new_event: Callable[[], Event] | None = None) -> None:
        """Measure on a GPU, and nothing elsewhere.   new_event: makes the device's events instead."""
        if new_event is None and device.type == "cuda":
            new_event = _cuda_event
        self._new_event = new_event
        self._passes: list[tuple[Event, Event]] = []

    def start(self) -> None:
        """Forget the passes of a call that failed."""
        self._passes = []

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count a forward pass: the inputs are on the device before, the outputs are taken from it after."""
        if self._new_event is None:
            yield
            return
        begin, end = self._new_event(), self._new_event()
        begin.record()
        yield
        end.record()
        self._passes.append((begin, end))

    def seconds(self) -> float | None:
        """Wait for the passes since the start and return their seconds; None where nothing is measured."""
        if self._new_event is None:
            return None
        for _, end in self._passes:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self._passes) / 1000


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)
    return event
