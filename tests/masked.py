"""Logit tables whose rows lack options, written with -inf or with a mask, and the same as probabilities."""

from __future__ import annotations

import json

import numpy as np
from synthetic import SPLITS, chain

from cauc_ray.data.writing import write_logits

MODELS = ("m0", "m1")
MASKS = (-1e4, -65504.0, -1e9, float(np.finfo(np.float32).min))


def splits(n=240, *, ragged=True, k=5):
    """Return planted chains of two models by split, whose rows may lack options."""
    return {
        split: chain(11, n, k, strengths=(1.0, 2.2), ragged=ragged, shift=place) for place, split in enumerate(SPLITS)
    }


def softmax(logits):
    """Return float32 probabilities, 0 for missing options."""
    terms = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return (terms / terms.sum(axis=1, keepdims=True)).astype(np.float32)


def write(folder, chains, written, **info):
    """Write chains with written(logits) in the place of their logits; info: more of pool.json."""
    for split, data in chains.items():
        for model, logits in zip(MODELS, data.logits, strict=True):
            ids = [f"{split}-{example}" for example in data.example_ids]
            write_logits(folder, model, split, example_ids=ids, labels=data.labels, logits=written(logits))
    models = [{"name": name, "cost": cost} for name, cost in zip(MODELS, (1.0, 4.0), strict=True)]
    (folder / "pool.json").write_text(json.dumps({"cost_unit": "GFLOPs", "models": models, **info}))
    return folder


def write_masked(folder, chains, mask):
    """Write chains with a mask for missing options."""
    return write(folder, chains, lambda logits: np.where(np.isneginf(logits), np.float32(mask), logits))
