"""The input of a run: rows with an example_id and the columns that the models read."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from cauc_ray.data.blocks import NOTHING_DONE, BlockSource, Done
from cauc_ray.data.image_input import ImageInput, is_image
from cauc_ray.data.parquet_input import ParquetInput
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import has_parquet_files


class RunInput(Protocol):
    """What a run reads its rows from."""

    @property
    def path(self) -> Path:
        """Where the rows come from, for people."""

    @property
    def n_rows(self) -> int | None:
        """How many rows there are; None where that is unknown until they are read."""

    @property
    def row_bytes(self) -> float:
        """A row's mean size in bytes, uncompressed; 0 where it is unknown."""

    @property
    def identity(self) -> dict[str, int]:
        """Rows by a text that changes when what is read does: what a resumed run compares."""

    def source(self, block_rows: int, done: Done = NOTHING_DONE) -> BlockSource:
        """Return the blocks of at most so many rows, without those that are done."""


def open_input(path: str | Path) -> RunInput:
    """Open a run's input: Parquet files (one, or all in a folder and below), else images.

    Raises DataError, in one line, where there is neither, and for files that are unreadable or do not fit together.

    >>> open_input("absent.parquet")
    Traceback (most recent call last):
    cauc_ray.errors.DataError: there is no file absent.parquet
    """
    path = Path(path)
    try:
        if path.is_dir() and not has_parquet_files(path):
            return ImageInput(path)
        return ImageInput(path) if path.is_file() and is_image(path) else ParquetInput(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
