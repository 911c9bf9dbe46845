"""Write a logit table again with what is left where only the five best options of each row are known.

python -m jobs.paper.best_five out/paper-logits/photographs out/paper-logits/photographs-five
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.special import softmax

from cauc_ray.data.logits import LogitTable
from cauc_ray.data.writing import read_info, write_info, write_logits
from jobs.paper.folders import convert
from jobs.paper.public_sets import spread

SPLITS = ("calibration", "validation", "test")
N_LISTED = 5


def write_best_five(source: Path, output: Path) -> None:
    """Write the table of a folder with five options a row into another folder."""
    table, info = LogitTable(source), read_info(source)
    for split in SPLITS:
        chain = table.read_chain(table.models, split)
        for model, logits in zip(chain.models, chain.logits, strict=True):
            probabilities = softmax(np.asarray(logits, np.float64), axis=1)
            options = np.argsort(-probabilities, axis=1, kind="stable")[:, :N_LISTED]
            listed = np.take_along_axis(probabilities, options, axis=1)
            write_logits(output, model, split, chain.example_ids, spread(options, listed), chain.labels)
    if info is not None:
        write_info(output, info.model_copy(update={"logit_kind": "log-probabilities"}))


if __name__ == "__main__":
    sys.exit(convert("jobs.paper.best_five", __doc__, write_best_five))
