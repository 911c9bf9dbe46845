"""Ids of answers: they hold what every router must know of an answer whose rows feedback names."""

from __future__ import annotations

import secrets
from hashlib import shake_128

import numpy as np

from cauc_ray.numbers.types import Bools


def new_answer_id(*, sampled: bool, drawn: bool = False) -> str:
    """Return an id for an answer.

    Args:
        sampled: Whether its rows may be in the shadow sample.
        drawn: Whether its policy was drawn among several.
    """
    return f"{int(sampled)}{secrets.randbits(123) << 1 | drawn:031x}"


def was_drawn(answer_id: str) -> bool:
    """Return whether the policy of an answer was drawn among several."""
    return bool(int(answer_id[-1], 16) & 1)


def sampled_rows(answer_id: str, n: int, share: float) -> Bools | None:
    """Return which of an answer's n rows are in the shadow sample, bool (n,); None for none.

    Its id alone decides, so that every router knows it of the rows that feedback names.
    """
    if not share or answer_id[0] == "0":
        return None
    # Faster than to seed a generator, and the first rows' are the same for any n.
    chosen: Bools = np.frombuffer(shake_128(answer_id.encode()).digest(4 * n), "<u4") < share * 2.0**32
    return chosen if chosen.any() else None
