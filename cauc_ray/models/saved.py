"""Models whose logits are already on disk: for benchmarks, simulations and tests."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.files.paths import path_of
from cauc_ray.models.answers import EMBEDDING, Answers, Batch, Model, ModelFacts, require_columns
from cauc_ray.models.kind import DeclaringSpec, InputColumns, Location, Placement
from cauc_ray.numbers.logits import LogitKind

if TYPE_CHECKING:
    from cauc_ray.data.logits import LogitTable


class SavedSpec(DeclaringSpec):
    """`{kind: saved, logits: LOGITS, model: NAME, split: SPLIT, seconds_per_call: 0, seconds_per_row: 0}`.

    Answers from a logit table, a path or a URI, by example_id.

    Attributes:
        logits: The table.
        model: The model in the table.
        split: The split in the table.
        seconds_per_call: Least time that a call takes.
        seconds_per_row: Time that is added for each row.
        logit_kind: Of the table's logits, if its pool.json does not declare it; embedding for an encoder's embeddings.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.saved:SavedModel"
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset({"logit_kind", "seconds_per_call", "seconds_per_row"})
    kind: Literal["saved"]
    logits: Location
    model: str
    split: str
    seconds_per_call: float = Field(default=0, ge=0, allow_inf_nan=False)
    seconds_per_row: float = Field(default=0, ge=0, allow_inf_nan=False)

    @property
    def columns_read(self) -> InputColumns:
        """Return no column: every model gets example_id."""
        return InputColumns()

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of the table's logits."""
        return self.logit_kind or self.table().kinds.get(self.model, self.LOGITS)

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of the table's costs."""
        info = self.table().info
        return info.cost_unit if info else None

    def table(self) -> LogitTable:
        """Return the table, nothing of which has been read."""
        from cauc_ray.data.answer_table import open_table  # pyarrow, which other kinds need not have

        return open_table(self.logits)


class SavedModel(Model):
    """Logits of one model on one split, by example_id, with each call's cost if the table has it."""

    def __init__(self, spec: SavedSpec, placement: Placement) -> None:
        """Read the logits. Raises CaucError if the table does not have them."""
        self._spec = spec
        self.facts = ModelFacts(f"{spec.logits}, model {spec.model}", spec.answers_kind)
        if spec.answers_kind == EMBEDDING:
            from cauc_ray.data.logits import embedding_ids, read_embeddings

            place = path_of(spec.logits), spec.model, spec.split
            ids, self._n_options, self._costs = embedding_ids(*place), None, None
            self._logits = read_embeddings(*place, ids)
            self._texts = None
        else:
            table = spec.table().read_model(spec.model, spec.split, as_stored=True)
            ids = table.example_ids.to_pylist()
            self._logits, self._n_options, self._costs = table.logits, table.n_options, table.costs
            self._texts = getattr(table, "texts", None)
        self._rows = {example: row for row, example in enumerate(ids)}

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch that has a column example_id; unknown examples are failures."""
        started = time.perf_counter()
        require_columns(batch, "example_id")
        ids = batch["example_id"]
        place = f"{self._spec.logits}, model {self._spec.model!r}, split {self._spec.split!r}"
        unknown = [row for row, example in enumerate(ids) if example not in self._rows]
        failures = {row: f"example {ids[row]!r:.100} is not in {place}" for row in unknown}
        rows = np.array([self._rows.get(example, 0) for example in ids], dtype=np.intp)
        n_options = None if self._n_options is None else self._n_options[rows]
        costs = None if self._costs is None else self._costs[rows]
        texts = None if self._texts is None else self._texts[rows].tolist()
        answers = Answers(self._logits[rows], n_options, costs, failures, texts=texts)
        takes_s = self._spec.seconds_per_call + self._spec.seconds_per_row * len(ids)
        time.sleep(max(0.0, takes_s - (time.perf_counter() - started)))
        return answers
