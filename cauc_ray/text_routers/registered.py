"""The methods that train on the queries' texts; their modules import torch and transformers, which only fits do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cauc_ray.baselines.routing import note_on_the_middle
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method, imported

_TEXTS: dict[str, Any] = {
    "packages": ("torch", "transformers", "sklearn"),
    "extra": "text-routers",
    "needs_texts": True,
    "unpublished": "reads the queries' texts, which no policy does",
}


def _note(before: str, *after: str, leaves_middle: bool = False) -> Callable[[Fitting], str]:
    """Return the note of what was fine-tuned.   before: what is, from the checkpoint that follows."""

    def note(fitting: Fitting) -> str:
        n_models = len(fitting.calibration.chain.models)
        if n_models == 1 and before == "fine-tuned from":
            return ""
        middle = note_on_the_middle(n_models) if leaves_middle else ""
        return "; ".join(filter(None, (f"{before} {Path(fitting.checkpoint or '').name}", *after, middle)))

    return note


_FULL_FORMS, _ROUTELLM = "cauc_ray.text_routers.full_forms", "cauc_ray.text_routers.routellm"

FRUGALGPT_BERT = Method(
    "frugalgpt-bert",
    "cascade",
    imported(f"{_FULL_FORMS}:fit_frugalgpt_bert"),
    note=_note("scorers fine-tuned from"),
    **_TEXTS,
)
ROUTERDC_ENCODER = Method(
    "routerdc-encoder",
    "router",
    imported(f"{_FULL_FORMS}:fit_routerdc_encoder"),
    note=_note("fine-tuned from", "clusters by PCA"),
    **_TEXTS,
)
ROUTELLM_BERT = Method(
    "routellm-bert",
    "router",
    imported(f"{_ROUTELLM}:fit_routellm_bert"),
    note=_note("fine-tuned from", "labels from correctness", leaves_middle=True),
    **_TEXTS,
)
ROUTELLM_CAUSAL = Method(
    "routellm-causal",
    "router",
    imported(f"{_ROUTELLM}:fit_routellm_causal"),
    note=_note(
        "fine-tuned from",
        "scored by the first model's probability of the right option, not by a judge",
        leaves_middle=True,
    ),
    **_TEXTS,
)
