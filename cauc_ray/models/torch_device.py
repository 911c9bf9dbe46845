"""Networks in torch: where and how precisely they compute, and for how long."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import PASS_TOKENS, Answers, ModelFacts
from cauc_ray.models.kind import Precision, TorchDevice
from cauc_ray.models.passes import Inputs, LocalModel
from cauc_ray.models.resources import amounts_text
from cauc_ray.numbers.types import Floats

# Multiplications that an H100 does while Python launches a forward pass's kernels.
_LAUNCH_WORK = 4e12
# Passes of short texts gain nothing from more threads.
_MOST_THREADS = 8
# Rows of a weight that are converted at a time.
_CONVERTED_ROWS = 2**15


class TorchModel(LocalModel):
    """A network on a device that measures the GPU time of its forward passes alone.

    Args:
        network: The network.
        facts: Facts that the network does not show.
        device: Where it computes.
        dtype: The precision in which it computes.
        new_event: Makes events such as torch.cuda.Event, which GPUs have.
    """

    def __init__(
        self,
        network: nn.Module,
        facts: ModelFacts,
        device: torch.device,
        dtype: torch.dtype,
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        params_b = facts.params_b or n_parameters(network) / 1e9
        self.facts = replace(facts, params_b=params_b, dtype=dtype_name(dtype))
        self._network, self._device = network, device
        self._on_gpu = device.type == "cuda"
        # What a pass costs in itself, in tokens: of those that several threads compute together, as many more.
        on_host = PASS_TOKENS * min(torch.get_num_threads(), _MOST_THREADS)
        self.pass_tokens = max(PASS_TOKENS, round(_LAUNCH_WORK / 1e9 / params_b)) if self._on_gpu else on_host
        self._new_event = new_event or (partial(torch.cuda.Event, enable_timing=True) if self._on_gpu else None)
        self._events: list[Any] = []
        if self._new_event is not None:
            network.register_forward_pre_hook(self._record)
            network.register_forward_hook(self._record)

    def take(self, inputs: Any, launched: torch.Tensor, counts: Counter[str]) -> Iterable[Floats]:
        """Return the logits of each row of a pass."""
        logits: Floats = launched.float().cpu().numpy()
        return logits

    def answer(self, prepared: Inputs) -> Answers:
        """Compute a batch."""
        self._events = []  # without those of a call that failed
        with torch.inference_mode(), _without_tf32 if self.facts.dtype == "float32" else nullcontext():
            return super().answer(prepared)

    def device_s(self) -> float | None:
        """Wait for the forward passes of a call and return their seconds, None if nothing is measured."""
        if self._new_event is None:
            return None
        for end in self._events[1::2]:
            end.synchronize()
        passes = zip(self._events[::2], self._events[1::2], strict=True)
        return float(sum(begin.elapsed_time(end) for begin, end in passes) / 1000)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a pass, in pinned memory for a GPU."""
        return tensor.pin_memory() if self._on_gpu else tensor

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a pass on the network's device; the host does not wait for it."""
        return tensor.to(self._device, non_blocking=True)

    def _record(self, *_: Any) -> None:
        assert self._new_event is not None
        self._events.append(self._new_event())
        self._events[-1].record()


def choose_device(device: TorchDevice) -> torch.device:
    """Return the device to use; on a GPU, this thread's work does not wait for that of other threads from now on.

    Raises ConfigError if a GPU is required and the stage has none.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
    if device != "cpu" and not backends[device].is_available():
        raise ConfigError(f"device {device}: no GPU is visible; give the stage num_gpus under resources, or device cpu")
    if device == "cuda":  # stages may be threads of one process, which all use one stream otherwise
        torch.cuda.set_stream(torch.cuda.Stream())
    return torch.device(device)


def require_memory(model: str, n_bytes: int, num_gpus: float) -> None:
    """Raise ConfigError if the GPUs of the stage, or its share of one, cannot hold so many bytes of weights."""
    memory = _gpu_memory(num_gpus)
    n_free, size = sum(free for free, _ in memory), memory[0][1]
    if n_bytes > n_free:
        gpus = amounts_text({"GPU": len(memory) * min(1.0, num_gpus or 1.0)})
        raise ConfigError(
            f"model {model!r} has {n_bytes / 1e9:,.1f} GB of weights, more than the {n_free / 1e9:,.1f} GB free on "
            f"{gpus} of {size / 1e9:,.1f} GB; give it num_gpus: {n_bytes // size + 1} under resources"
        )


def free_bytes(device: torch.device, num_gpus: float) -> int:
    """Return the memory that tensors may still take on a stage's GPUs or share of one; of the host's, a quarter."""
    if device.type != "cuda":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    memory = _gpu_memory(num_gpus)
    return len(memory) * max(0, int(min(free for free, _ in memory)))


def _gpu_memory(num_gpus: float) -> list[tuple[float, int]]:
    """Return the bytes that tensors may still take, and all bytes, of each of a stage's GPUs or its share of one."""
    memory = []
    for gpu in range(torch.cuda.device_count() if num_gpus > 1 else 1):
        (free, total), allocated = torch.cuda.mem_get_info(gpu), torch.cuda.memory_allocated(gpu)
        unused = torch.cuda.memory_reserved(gpu) - allocated
        memory.append((min(free + unused, min(1.0, num_gpus or 1.0) * total - allocated), total))
    return memory


def compute_in_float32(layer: Any) -> None:
    """Let a linear layer, the last one of a network, return float32 logits whatever its weights' precision."""
    if type(layer) is not nn.Linear:  # one of quantised weights has its own arithmetic
        return

    def forward(states: torch.Tensor) -> torch.Tensor:
        with torch.autocast(states.device.type, enabled=False):
            if layer.weight.dtype == torch.float32:
                return linear(states.float(), layer.weight, layer.bias)
            logits = states.new_empty(*states.shape[:-1], layer.out_features, dtype=torch.float32)
            for start in range(0, layer.out_features, _CONVERTED_ROWS):
                rows = slice(start, start + _CONVERTED_ROWS)
                bias = None if layer.bias is None else layer.bias[rows].float()
                logits[..., rows] = linear(states.float(), layer.weight[rows].float(), bias)
            return logits

    # Where accelerate spreads a network, its own forward moves the inputs and calls the old one.
    setattr(layer, "_old_forward" if hasattr(layer, "_old_forward") else "forward", forward)


def last_linear(network: nn.Module) -> nn.Module | None:
    """Return a network's last linear layer, None without one."""
    return next((module for module in reversed([*network.modules()]) if isinstance(module, nn.Linear)), None)


def choose_dtype(dtype: Precision, device: torch.device) -> torch.dtype:
    """Return the precision to compute in: as asked, else bfloat16 on a GPU that has it and float32 elsewhere."""
    if dtype == "auto":
        # Older GPUs emulate it, and are slow.
        has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        dtype = "bfloat16" if has_it else "float32"
    chosen: torch.dtype = getattr(torch, dtype)
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """Return a precision's name as pool files have it."""
    return str(dtype).removeprefix("torch.")


def n_parameters(*parts: nn.Module) -> int:
    """Return how many numbers the parts of a network hold; those that parts share count once."""
    return sum(weights.numel() for weights in {weights for part in parts for weights in part.parameters()})


class WithoutTF32:
    """A block in which float32 is computed as such: GPUs shorten the factors of convolutions to 10 bits by default.

    The setting is the process's: the first thread to enter changes it, and the last one to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n_inside = 0
        self._before: list[bool] = []

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_inside:
                self._before = [backend.allow_tf32 for backend in _TF32]
                self._set([False] * len(_TF32))
            self._n_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_inside -= 1
            if not self._n_inside:
                self._set(self._before)

    def _set(self, allowed: list[bool]) -> None:
        for backend, value in zip(_TF32, allowed, strict=True):
            backend.allow_tf32 = value


_TF32 = (torch.backends.cuda.matmul, torch.backends.cudnn)
_without_tf32 = WithoutTF32()
