"""Networks that read handwritten digits, as stages of a cascade: their weights are in files below this one's folder."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def load(weights: str) -> Callable[[Mapping[str, Any]], Any]:
    """Return a function from a batch with `image`, float32 (n, 64), to logits, float32 (n, 10).

    weights: the path, from this module's folder, of an .npz file. It has E networks of H hidden units: weights
    (E, 64, H) and (E, H, 10), biases (E, 1, H) and (E, 1, 10), in this order. Logits are means over the networks.
    """
    hidden, output, hidden_bias, output_bias = np.load(Path(__file__).parent / weights).values()

    def answer(batch: Mapping[str, Any]) -> Any:
        active = np.maximum(batch["image"] @ hidden + hidden_bias, 0.0)
        return (active @ output + output_bias).mean(axis=0)

    return answer
