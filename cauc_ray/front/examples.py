"""The splits of a logit table as methods see them: logits, and the queries' embeddings and texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.logits import LogitTable
from cauc_ray.data.queries import Texts, read_embeddings
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.policies.method import Fitting
from cauc_ray.policies.trace import EmbeddingCall, Examples


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Reads a chain of models on the splits of a table.

    costs: of a call of each model; None for the table's.   embedding: an encoder of the table; one that is named like a
    model of the table is that model up to its last layer, whose call is paid by who looks.   texts: of the queries.
    """

    table: LogitTable
    models: Sequence[str]
    costs: Sequence[float] | None = None
    embedding: str | None = None
    texts: Texts | None = None

    def read(self, split: str) -> Examples:
        """Read a split. Raises DataError or ConfigError as LogitTable.read_chain and read_embeddings do."""
        return self._with_queries(self.table.read_chain(self.models, split, costs=self.costs), split)

    def read_labelled(self, split: str, purpose: str) -> Examples:
        """Read a split whose examples all need a label, for a purpose that the DataError names otherwise."""
        examples = self.read(split)
        examples.chain.require_labels(purpose)
        return examples

    def read_final(self, split: str, purpose: str, fitting: Fitting) -> Examples:
        """Read the split that is measured, which nothing was fitted or chosen on."""
        final = self.read_labelled(split, purpose)
        for other in (fitting.calibration, fitting.validation):
            if final.chain.source == other.chain.source:
                raise ConfigError(f"split {split!r} is what methods are fitted or chosen on; measure them on another")
        _require_alike(fitting.calibration, final)
        return final

    def read_fitting_splits(self, calibration: str, validation: str) -> tuple[Examples, Examples]:
        """Read what methods are fitted and thresholds are chosen on."""
        if calibration == validation:
            raise ConfigError(f"calibration and validation must be two splits, both are {calibration!r}")
        if validation not in self.table.splits(self.models[0]):
            raise DataError(f"{self.table.path} has no split {validation!r}, which thresholds are chosen on")
        first = self.read_labelled(calibration, "calibration")
        second = self.read_labelled(validation, "choosing thresholds")
        _require_alike(first, second)
        return first, second

    def _with_queries(self, chain: ChainLogits, split: str) -> Examples:
        ids = chain.example_ids
        return Examples(
            chain,
            None if self.embedding is None else read_embeddings(self.table.path, self.embedding, split, ids),
            None if self.texts is None else self.texts.of(ids),
            self._embedding_call(chain, split),
        )

    def _embedding_call(self, chain: ChainLogits, split: str) -> EmbeddingCall | None:
        """Return the call that the embeddings take. Raises DataError where what it costs is not known."""
        name = self.embedding
        if name is None or name not in self.table.models:
            return None
        if name in chain.models:
            return EmbeddingCall(name, chain.models.index(name))
        own = self.table.read_chain_heads([name], split, per_call_costs=chain.per_call_costs).known
        costs = own["costs"].per_call
        if costs.ndim == 1:
            return EmbeddingCall(name, None, float(costs[0]))
        rows = pc.index_in(
            pa.array(chain.example_ids, pa.string()), value_set=pa.array(own["example_ids"], pa.string())
        )
        if rows.null_count:
            example = chain.example_ids[pc.index(rows.is_null(), True).as_py()]
            raise DataError(
                f"{chain.source}: what model {name!r}, whose embedding is looked at, costs for {example!r} "
                "is not in the table"
            )
        return EmbeddingCall(name, None, costs[np.asarray(rows), 0])


def _require_alike(first: Examples, other: Examples) -> None:
    """Raise DataError where the embeddings of two splits differ in length."""
    if first.embeddings is None or other.embeddings is None:
        return
    lengths = first.embeddings.shape[1], other.embeddings.shape[1]
    if lengths[0] != lengths[1]:
        at = f"{other.chain.source}: its embeddings"
        raise DataError(f"{at} have {lengths[1]} numbers, those of {first.chain.source} have {lengths[0]}")
