"""Methods that fine-tune a network on the queries' texts, which no policy can read."""

from __future__ import annotations

from pathlib import Path

from cauc_ray.baselines.routing import note_on_the_middle
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method, Paradigm, Reads, imported


def text_method(
    name: str, paradigm: Paradigm, about: str, *notes: str, leaves_middle: bool = False, reads: Reads = "logits"
) -> Method:
    """Return a method, whose fit is networks.full_forms' of that name.

    Args:
        name: Its name.
        paradigm: Its group in tables.
        about: What is fine-tuned, as the documentation of its fit.
        notes: How it differs from the published method.
        leaves_middle: Whether it calls the first and the last model only.
        reads: As of Method.
    """

    def note(fitting: Fitting) -> str:
        n_models = len(fitting.calibration.chain.models)
        if n_models == 1:
            return ""
        middle = note_on_the_middle(n_models) if leaves_middle else ""
        return "; ".join(filter(None, (f"fine-tuned from {Path(fitting.checkpoint or '').name}", *notes, middle)))

    fit = imported(f"cauc_ray.baselines.networks.full_forms:fit_{name.replace('-', '_')}")
    fit.__doc__ = about
    return Method(
        name,
        paradigm,
        fit,
        packages=("torch", "transformers", "sklearn"),
        extra="text-routers",
        note=note,
        needs="texts",
        reads=reads,
        unpublished="reads the queries' texts, which no policy does",
    )
