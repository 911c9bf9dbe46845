"""Logit tables whose rows lack options, written with -inf or with a mask, and the same as probabilities."""

from __future__ import annotations

import numpy as np
from synthetic import SPLITS, chain, write_chains

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


def write_masked(folder, chains, mask):
    """Write chains with a mask for missing options."""
    return write_chains(folder, chains, lambda logits: np.where(np.isneginf(logits), np.float32(mask), logits))
