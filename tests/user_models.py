"""Factories such as a user would write, for pools of kind python."""

from __future__ import annotations

import os
import signal

import numpy as np

no_callable = dict


def by_x(factor=1.0):
    """Answer with two logits: the column x times a factor, and 0."""
    return lambda batch: np.stack([factor * batch["x"], np.zeros(len(batch["x"]))], axis=1)


def ragged():
    """Answer with as many options as the row's number."""
    return lambda batch: [np.full(place + 1, x) for place, x in enumerate(batch["x"])]


def fails_on(example):
    """Answer, but raise on any batch that holds one example."""

    def answer(batch):
        if example in batch["example_id"]:
            raise ValueError(f"cannot look at {example}\nat all")
        return by_x()(batch)

    return answer


def always_fails():
    """Raise on every batch."""

    def answer(batch):
        raise RuntimeError("no such device")

    return answer


def cannot_load():
    """Raise while loading."""
    raise OSError("weights.pt is not there")


def dies_on(example):
    """Answer, but be killed on any batch that holds one example."""

    def answer(batch):
        if example in batch["example_id"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return by_x()(batch)

    return answer


def empties_its_batch():
    """Answer, and leave nothing of the batch, which is the model's own."""

    def answer(batch):
        logits = by_x()(batch)
        batch.clear()
        return logits

    return answer


def writes_to_its_input():
    """Answer after writing to the batch, which is the model's own."""

    def answer(batch):
        batch["x"][:] = batch["x"] + 1.0
        return by_x()(batch)

    return answer
