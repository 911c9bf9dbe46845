"""Where and how precisely torch computes, and the GPU time of a network's forward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from cauc_ray.errors import ConfigError
from cauc_ray.models.kind import Device, Precision
from cauc_ray.models.resources import amounts_text


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


def params_b(network: nn.Module) -> float:
    """Return the number of a network's parameters, in billions."""
    return float(sum(p.numel() for p in network.parameters()) / 1e9)


def choose_device(device: Device) -> torch.device:
    """Return the device to use; on a GPU, this thread's work does not wait for that of other threads from now on.

    Raises ConfigError if a GPU is required and the stage has none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: no GPU is visible; give the stage num_gpus under resources, or device cpu")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":  # stages may be threads of one process, which all use one stream otherwise
        torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device(device)


def require_memory(model: str, n_bytes: int, over_gpus: bool) -> None:
    """Raise ConfigError if the GPUs of the stage, or the one that is used, cannot hold so many bytes of weights."""
    sizes = [torch.cuda.mem_get_info(gpu)[1] for gpu in range(torch.cuda.device_count() if over_gpus else 1)]
    if n_bytes > sum(sizes):
        raise ConfigError(
            f"model {model!r} has {n_bytes / 1e9:,.1f} GB of weights, more than {amounts_text({'GPU': len(sizes)})} of "
            f"{sizes[0] / 1e9:,.1f} GB can hold; give it num_gpus: {n_bytes // sizes[0] + 1} under resources"
        )


def choose_dtype(dtype: Precision, device: torch.device) -> torch.dtype:
    """Return the precision to compute in: as asked, else bfloat16 on a GPU that has it and float32 elsewhere."""
    if dtype == "auto":
        # Older GPUs emulate it, and are slow.
        has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if has_it else torch.float32
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """Return a precision's name as pool files have it."""
    return str(dtype).removeprefix("torch.")
