"""Answers in words as numbers."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.answer_keys import (
    NO_ANSWER,
    agreement_keys,
    answer_keys,
    answer_vectors,
    confidences_in,
    said_keys,
)


def test_vectors_hold_keys_exactly_and_tell_a_missing_confidence() -> None:
    texts = [None, *(f"answer {i}" for i in range(5000))]
    keys = answer_keys(texts)
    assert keys[0] == NO_ANSWER
    assert keys[1:].min() > 0
    assert len(np.unique(keys)) == len(keys)
    assert (answer_keys(texts[::-1]) == keys[::-1]).all()

    confidences = np.random.default_rng(0).uniform(-30, 1, (len(keys), 2)).astype(np.float32)
    confidences[::3, 0] = np.nan
    vectors = answer_vectors(keys, confidences, predicted=keys[::-1])
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(agreement_keys(vectors), keys)
    np.testing.assert_array_equal(said_keys(vectors), keys[::-1])
    np.testing.assert_array_equal(confidences_in(vectors), confidences)
