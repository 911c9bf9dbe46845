"""Datasets as people have them, rows in files of every format and images in folders, and what is read of them."""

from __future__ import annotations

import csv
import json
import pickle
import warnings
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.data.datasets import Dataset, DatasetSpec, open_dataset
from cauc_ray.errors import CaucWarning, DataError


def dataset(text, seed=0, task=None, split=None, labels=None, **columns) -> Dataset:
    """Open a dataset, without warnings; the task is that of questions, or that of images where there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)
        spec = DatasetSpec(str(text), task or "multiple-choice", columns, seed, labels)
        try:
            return open_dataset(spec, split)
        except DataError:
            if task is not None:
                raise
            with suppress(DataError):
                return open_dataset(replace(spec, task="image-classification"), split)
            raise


def rows_of(opened, split="all", rows=1000, done=()):
    """Return every row of a split as a dict, with its id and label."""
    if split not in opened.split_sizes:
        opened = dataset(
            opened.spec.dataset, opened.spec.seed, opened.spec.task, split, opened.spec.labels, **opened.spec.columns
        )
    chosen = {split: np.ones(opened.split_sizes[split], bool)}
    source = pickle.loads(pickle.dumps(opened.blocks(rows, masks=chosen)))
    read = []
    for _, block in sorted(
        (block for group in range(source.n_groups) for block in source.blocks(group, done)), key=lambda block: block[0]
    ):
        columns = {name: list(column) for name, column in block.columns.items()}
        assert columns.pop("example_id") == block.example_ids
        labels = [None] * len(block.example_ids) if block.labels is None else block.labels.tolist()
        columns = {**columns, "id": block.example_ids, "label": labels}
        read += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return read


def values_of(opened, name, split="all"):
    return [row[name] for row in rows_of(opened, split)]


def questions(n, first=0):
    return [
        {"id": f"q{i}", "question": f"what is {i}?", "choices": [f"{i}", "none", "both"], "label": i % 3}
        for i in range(first, first + n)
    ]


def write(path, rows, **options):
    """Write rows, or an Arrow table, as the file's name says; in CSV choices are JSON lists. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), path, **options)
    elif path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows({k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_images(folder, classes, n=3, ending="JPG"):
    """Write n files for each class; their bytes say where they lie, no image is ever decoded."""
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(n):
            (folder / name / f"{i}.{ending}").write_bytes(f"{folder.name}/{name}/{i}".encode())


def damage(file, row_group, column, byte=b"\xff"):
    """Overwrite all pages of a column in one row group of a Parquet file."""
    meta = pq.read_metadata(file).row_group(row_group).column(column)
    start = min(offset for offset in (meta.dictionary_page_offset, meta.data_page_offset) if offset)
    with file.open("r+b") as opened:
        opened.seek(start)
        opened.write(byte * meta.total_compressed_size)
