"""The GPU time of a network's forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


class DeviceTime:
    """Adds up the GPU time of a call's forward passes, without reading, preparing, copying and waiting."""

    def __init__(self, device: torch.device, new_event: Callable[[], Any] | None = None) -> None:
        """Measure on a GPU only.   new_event: makes events as torch.cuda.Event instead."""
        on_gpu = device.type == "cuda"
        self._new_event = new_event or (partial(torch.cuda.Event, enable_timing=True) if on_gpu else None)
        self._passes: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Drop the passes of a failed call."""
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
        """Wait for the passes since the start and return their seconds; None if nothing is measured."""
        if self._new_event is None:
            return None
        for _, end in self._passes:
            end.synchronize()
        return float(sum(begin.elapsed_time(end) for begin, end in self._passes) / 1000)
