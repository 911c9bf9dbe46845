"""A policy's answers, one for each example: as arrays and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from cauc_ray.display import Grid, Sheet, Shown, count_text, percent
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.answer_arrays import answer_chain, answer_columns_of, holds_columns, texts_of
from cauc_ray.numbers.answer_keys import are_vectors
from cauc_ray.numbers.arrays import array_chain
from cauc_ray.numbers.chain import UNKNOWN_LABEL, Chain, Costs, cost_text
from cauc_ray.numbers.ids import NumberIds, rows_of
from cauc_ray.numbers.logits import ANSWERS
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered, replay

# Names of options in their order, or texts by the keys of answers in words.
OptionNames: TypeAlias = Sequence[str] | Mapping[int, str]


def predictions_table(
    example_ids: Sequence[str] | pa.Array,
    predictions: Ints,
    confidences: Floats,
    stages: Ints,
    costs: Floats,
    labels: Ints | None,
    names: OptionNames | None = None,
) -> pa.Table:
    """Return the predictions as a table: one row per example, with its label where labels are known.

    Args:
        example_ids: Str (N,).
        predictions: Int (N,).
        confidences: Float (N,).
        stages: Int (N,), which one answered, 0 the cheapest.
        costs: Float (N,), of all calls made.
        labels: Int (N,) or None.
        names: Names of the options, or texts by keys of answers, for columns of them; None without these. An option
            without a name is its number.
    """
    columns = {
        "example_id": _id_column(example_ids),
        "prediction": pa.array(predictions.astype(np.int32)),
        "confidence": pa.array(confidences.astype(np.float32)),
        "stage": pa.array(stages.astype(np.int8)),
        "cost": pa.array(costs.astype(np.float32)),
    }
    if names is not None:
        columns["prediction_label"] = _named(predictions, names)
    if labels is not None:
        columns["label"] = pa.array(labels.astype(np.int32), mask=labels == UNKNOWN_LABEL)
    if labels is not None and names is not None:
        columns["label_name"] = _named(labels, names)
    return pa.table(columns)


def _named(options: Ints, names: OptionNames) -> pa.Array:
    by_option = names if isinstance(names, Mapping) else dict(enumerate(names))
    default = (lambda option: None) if isinstance(names, Mapping) else str
    texts = [by_option.get(option, default(option) if option >= 0 else None) for option in options.tolist()]
    return pa.array(texts, pa.string())


def _id_column(ids: Sequence[str] | pa.Array) -> pa.Array:
    if isinstance(ids, NumberIds):
        return pa.array(ids.numbers).cast(pa.string())
    return pa.array(ids, pa.string())


@dataclass(frozen=True, slots=True, repr=False)
class Predictions(Shown):
    """What a policy answers, one entry for each example.

    Attributes:
        prediction: Int32 (N,), the index of the option.
        confidence: Float64 (N,), calibrated.
        stage: Int8 (N,), which one answered, 0 the cheapest.
        cost: Float64 (N,), of all calls made for the example, in cost_unit.
        example_ids: Str (N,); of arrays the position as text.
        labels: Int32 (N,), None where there are none.
        models: The chain.
        cost_unit: Unit of the costs.
        names: Names of the options, or what keys of answers in words stand for; None if unknown.
    """

    prediction: Ints
    confidence: Floats
    stage: Ints
    cost: Floats
    example_ids: Sequence[str]
    labels: Ints | None
    models: tuple[str, ...]
    cost_unit: str
    names: OptionNames | None = None

    @classmethod
    def of(cls, answers: Answered, chain: Chain, cost_unit: str) -> Predictions:
        """Return a replay's answers on a chain."""
        return cls(
            prediction=answers.predictions,
            confidence=answers.confidences,
            stage=answers.stages,
            cost=answers.costs,
            example_ids=chain.example_ids,
            labels=chain.labels if chain.labelled.any() else None,
            models=chain.models,
            cost_unit=cost_unit,
        )

    def __len__(self) -> int:
        return len(self.prediction)

    def of_rows(self, rows: Ints) -> Predictions:
        """Return some of them, int (n,)."""
        return replace(
            self,
            prediction=self.prediction[rows],
            confidence=self.confidence[rows],
            stage=self.stage[rows],
            cost=self.cost[rows],
            example_ids=rows_of(self.example_ids, rows),
            labels=None if self.labels is None else self.labels[rows],
        )

    def to_arrow(self) -> pa.Table:
        """Return them as a predictions file has them: example_id, prediction, confidence, stage, cost.

        And prediction_label, label and label_name, where these are known. Confidences and costs are float32 there.
        """
        columns = (self.example_ids, self.prediction, self.confidence, self.stage, self.cost, self.labels)
        return predictions_table(*columns, self.names)

    def to_pandas(self) -> Any:
        """Return to_arrow() as a pandas DataFrame. Raises ConfigError where pandas is missing."""
        return pandas_frame(self.to_arrow())

    def sheet(self) -> Sheet:
        """Return how many examples each stage answered, and the mean cost."""
        answered = np.bincount(self.stage, minlength=len(self.models)).tolist()
        rows = [(name, f"{n:,}", percent(n / max(1, len(self)))) for name, n in zip(self.models, answered, strict=True)]
        mean = float(self.cost.mean()) if len(self) else 0.0
        title = f"{count_text(len(self), 'prediction')} at a mean cost of {cost_text(mean, self.cost_unit)}"
        return Sheet(title, [Grid("", ("answered by", "examples", "share"), tuple(rows))])


def predict(policy: Policy, logits: Mapping[str, Any], example_ids: Any = None) -> Predictions:
    """Answer rows of logits that are all here; see Policy.predict."""
    if not isinstance(logits, Mapping):
        raise ConfigError(f"logits: arrays by model, as {{'small': (N, K)}}; got {type(logits).__name__}")
    kinds = policy.kinds_by_model
    models, encoder = [stage.name for stage in policy.answering], policy.encoder
    costs = Costs(policy.cost_unit, np.array([stage.cost for stage in policy.answering]))
    in_words = policy.logit_kind == ANSWERS and not all(are_vectors(logits.get(model)) for model in models)
    if in_words or holds_columns(logits):
        columns = answer_columns_of(logits, models, rules=rules_of(policy))
        policy.require_formats({model: of.answer_format for model, of in columns.items()})
        chain = answer_chain(columns, None, costs=costs, example_ids=example_ids)
        return replace(
            Predictions.of(replay(policy, chain), chain, policy.cost_unit),
            names=texts_of((of.keys, of.texts) for of in columns.values()),
        )
    chain = array_chain(logits, models, None, costs=costs, kinds=kinds, example_ids=example_ids)
    if encoder is not None:
        chain = chain.after_encoder(encoder, vectors_of(logits, encoder, len(chain)), policy.stages[0].cost)
    return Predictions.of(replay(policy, chain), chain, policy.cost_unit)


def rules_of(policy: Policy) -> dict[str, str | None]:
    """Return by model the rule by which its answers in words are the same, None of others."""
    return {stage.name: getattr(stage, "rule", None) for stage in policy.answering}


def vectors_of(logits: Mapping[str, Any], encoder: str, n: int) -> Floats:
    """Return the embeddings among arrays by an encoder's name, float32 (N, d). Raises ConfigError or DataError."""
    if encoder not in logits:
        raise ConfigError(f"the policy reads embeddings by {encoder!r}, which the arrays lack")
    vectors = np.asarray(logits[encoder], dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != n or not np.isfinite(vectors).all():
        raise DataError(f"{encoder!r}: embeddings must be finite numbers ({n}, d), got {vectors.shape}")
    return vectors


def pandas_frame(table: pa.Table) -> Any:
    """Return a table as a pandas DataFrame. Raises ConfigError with the install command where pandas is missing."""
    try:
        return table.to_pandas()
    except ImportError as error:
        raise ConfigError("a DataFrame needs pandas: pip install pandas") from error
