"""What properties of many tests are drawn from."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

seeds = st.integers(0, 2**32 - 1)
# Rows and options of a matrix of logits.
shapes = st.tuples(st.integers(20, 300), st.integers(2, 12))


def answers(seed, n=200):
    """Return confidences, some equal and some on the edges of bins, and which are right, more or less as they say."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0, 1, 31), rng.random(50)], n)
    return confidences, rng.random(n) < confidences ** rng.uniform(0.5, 2)
