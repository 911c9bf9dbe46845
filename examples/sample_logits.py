"""Make the package's sample logit table again: two small networks of scikit-learn's handwritten digits.

    python -m examples.sample_logits cauc_ray/samples/digits

Costs are the multiply-adds of one answer, in thousands. Logits are rounded to 1/64, which compresses well.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from cauc_ray.data.splits import split_shares
from cauc_ray.data.writing import PoolModel, TableInfo, write_info, write_logits

SHARES = {"train": 0.15, "calibration": 0.25, "validation": 0.25, "test": 0.35}
SEED = 0
N_PIXELS, N_CLASSES = 64, 10


def multiply_adds(*widths: int) -> float:
    """Return what one answer of fully connected layers takes, in thousands.

    >>> multiply_adds(64, 8, 10)
    0.592
    """
    return sum(first * second for first, second in pairwise(widths)) / 1000


def classifiers() -> dict[str, tuple[Any, float]]:
    """Return by name a classifier that is not fitted, and its cost; cheapest first."""
    return {
        name: (MLPClassifier((width,), max_iter=400, random_state=SEED), multiply_adds(N_PIXELS, width, N_CLASSES))
        for name, width in (("small", 8), ("large", 256))
    }


def make(folder: Path) -> None:
    """Train the classifiers on their share of the images, and write their logits on the others."""
    digits = load_digits()
    images, labels = digits.data / 16, digits.target
    splits = split_shares(len(labels), SHARES, SEED)
    train = splits.pop("train")
    models = []
    for name, (classifier, cost) in classifiers().items():
        classifier.fit(images[train], labels[train])
        for split, rows in splits.items():
            write_logits(
                folder,
                name,
                split,
                example_ids=[f"digit-{row:04d}" for row in rows],
                labels=labels[rows],
                logits=np.round(64 * classifier.predict_log_proba(images[rows])) / 64,
            )
        models.append(PoolModel(name=name, cost=cost, source=f"scikit-learn's {classifier}"))
    note = "handwritten digits of scikit-learn (UCI, CC BY 4.0); made by examples/sample_logits.py"
    write_info(folder, TableInfo(cost_unit="k multiply-adds", logit_kind="log-probabilities", note=note, models=models))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
