"""The splits of a logit table as methods see them: logits, and the queries' embeddings and texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.sources import Source
from cauc_ray.data.logits import CallCosts, LogitTable
from cauc_ray.data.queries import Texts, read_embeddings
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.policies.trace import EmbeddingCall, Examples


@dataclass(frozen=True, slots=True)
class ExampleReader:
    """Reads the splits that methods are fitted, chosen and measured on.

    embedding: an encoder of the table; one that is named like a model of the table is that model up to its last layer,
    whose call is paid by who looks.   texts: of the queries.
    """

    source: Source
    embedding: str | None = None
    texts: Texts | None = None

    def read(self, purpose: str) -> tuple[Examples, Examples, Examples]:
        """Read calibration, validation and the split that is measured, all of whose examples need a label.

        purpose: of that measuring, for messages. Raises DataError or ConfigError as LogitTable.read_chain and
        read_embeddings do, and where splits are missing or differ.
        """
        chains, splits = self.source.read_all(self.source.models, self.source.costs), self.source.splits
        missing = next((split for split in splits if split not in chains), None)
        if missing is not None:
            raise DataError(f"{self.source.path} has no split {missing!r}, which thresholds are chosen on")
        for split, why in zip(splits, ("calibration", "choosing thresholds", purpose), strict=True):
            chains[split].require_labels(why)
        first, *others = (self._with_queries(chains[split], self.source.origin(split)) for split in splits)
        for other in others:
            _require_alike(first, other)
        return first, others[0], others[1]

    def _with_queries(self, chain: ChainLogits, split: str) -> Examples:
        texts = None if self.texts is None else self.texts.of(chain.example_ids)
        if self.embedding is None:
            return Examples(chain, None, texts)
        table = self.source.table
        if table is None:
            raise ConfigError(f"embedding: {self.embedding!r} is looked up in a logit table; arrays have no embeddings")
        embeddings = read_embeddings(table.path, self.embedding, split, chain.example_ids)
        return Examples(chain, embeddings, texts, _embedding_call(table, self.embedding, chain, split))


def _embedding_call(table: LogitTable, name: str, chain: ChainLogits, split: str) -> EmbeddingCall | None:
    """Return the call that the embeddings take. Raises DataError where what it costs is not known."""
    if name not in table.models:
        return None
    if name in chain.models:
        return EmbeddingCall(name, chain.models.index(name))
    counted: CallCosts = "per-call" if chain.per_call_costs else "per-model"
    own = table.read_chain_heads([name], split, costs=counted).known
    costs = own["costs"].per_call
    if costs.ndim == 1:
        return EmbeddingCall(name, None, float(costs[0]))
    rows = pc.index_in(pa.array(chain.example_ids, pa.string()), value_set=pa.array(own["example_ids"], pa.string()))
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
