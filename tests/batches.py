"""Batches as models get them, and what models refuse."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cauc_ray.errors import ConfigError


def column(values: Iterable[Any]) -> np.ndarray:
    """Return values of any type as a column of objects."""
    listed = list(values)
    made = np.empty(len(listed), dtype=object)
    for row, value in enumerate(listed):
        made[row] = value
    return made


def question_batch(*rows: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """Return (question, choices[, context]) of each row as columns."""
    filled = [(*row, None)[:3] for row in rows]
    return {name: column(row[at] for row in filled) for at, name in enumerate(("question", "choices", "context"))}


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image as a file's bytes."""
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def refused(act: Callable[[], object]) -> str:
    """Return the message, of one line, with which an act is refused."""
    with pytest.raises(ConfigError) as error:
        act()
    assert "\n" not in str(error.value)
    return str(error.value)


def assert_same(values: np.ndarray, expected: np.ndarray, tolerance: float = 1e-4) -> None:
    """Compare numbers.   tolerance: in units of their spread; by default what sums in another order may change."""
    assert values.shape == expected.shape
    assert expected.std() > 0
    assert np.abs(values - expected).max() <= tolerance * expected.std()
