"""Fitted estimators in files, of scikit-learn or with its interface, such as XGBoost's and LightGBM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.models.answers import (
    Answers,
    Batch,
    Model,
    ModelFacts,
    answered,
    as_answers,
    batch_size,
    require_columns,
    require_same_labels,
)
from cauc_ray.models.kind import LocalFile, Placement, TableSpec
from cauc_ray.models.passes import option_order
from cauc_ray.models.prompts import Labelled
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Floats

_NOT_FEATURES = ("example_id", "label")


class SklearnSpec(Labelled, TableSpec):
    """`{kind: sklearn, path: model.joblib, columns: [age, income]}`: a fitted classifier or pipeline in a file.

    Attributes:
        path: A joblib or pickle file, which runs code when it is loaded, or a skops file (.skops), which does not.
        columns: The columns that it reads, in its order; by default those that it was fitted on by name, else all.
        trusted: Types in a skops file that are not known to be safe, by their full names.
        labels: The pool's labels; scores are given in their order, by default in that of the estimator's classes.
        logit_kind: "surrogate" for an estimator that has decision_function and no predict_proba.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.sklearn:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("sklearn", "sklearn", "joblib")
    FILES: ClassVar[tuple[str, ...]] = ("path",)
    LOGITS: ClassVar[LogitKind] = "probabilities"
    kind: Literal["sklearn"]
    path: LocalFile
    trusted: tuple[str, ...] = ()


def load(spec: SklearnSpec, placement: Placement) -> SklearnModel:
    """Load the estimator. Raises ConfigError if it cannot be loaded, or is not a fitted classifier of the labels."""
    is_skops = spec.path.endswith(".skops")
    if is_skops:
        spec.require("sklearn", "skops")
    try:
        if is_skops:
            from skops.io import load as load_skops

            estimator = load_skops(spec.path, trusted=list(spec.trusted))
        else:
            import joblib

            estimator = joblib.load(spec.path)
    except Exception as error:  # damaged files and missing modules raise errors of many types
        remedy = "; list the types that you trust under trusted" if is_skops else ""
        raise ConfigError(f"{spec.path} cannot be loaded: {first_line(error)}{remedy}") from error
    return SklearnModel(spec, estimator)


class SklearnModel(Model):
    """A fitted estimator."""

    def __init__(self, spec: SklearnSpec, estimator: Any) -> None:
        self._spec, self._estimator = spec, estimator
        method = "decision_function" if spec.answers_kind == "surrogate" else "predict_proba"
        if not hasattr(estimator, "classes_") or not hasattr(estimator, method):
            remedy = "; declare logit_kind: surrogate" if hasattr(estimator, "decision_function") else ""
            raise ConfigError(f"{spec.path} holds {type(estimator).__name__} without classes_ and {method}{remedy}")
        self._score = getattr(estimator, method)
        classes = [str(label) for label in np.asarray(estimator.classes_).tolist()]
        self._names = spec.label_names or tuple(classes)
        self._order = option_order(spec.path, classes, self._names)
        self._fitted_names: Sequence[str] = [str(name) for name in getattr(estimator, "feature_names_in_", ())]
        if self._fitted_names:
            spec.require("sklearn", "pandas")
            import pandas as pd  # here, since the first call would take the longer

            self._frame = pd.DataFrame
        if self._fitted_names and spec.columns and len(spec.columns) != len(self._fitted_names):
            raise ConfigError(
                f"{spec.path} was fitted on {len(self._fitted_names)} columns ({', '.join(self._fitted_names)}), "
                f"columns has {len(spec.columns)}"
            )
        self._is_checked = False
        self.facts = ModelFacts(f"sklearn {spec.path}", spec.answers_kind, labels=self._names)

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch; rows with missing values fail if the estimator takes none.

        Raises DataError for a missing column, ConfigError if the scores are not those of the labels.
        """
        n = batch_size(batch)
        try:
            return as_answers(self._scores(batch), n)
        except ValueError:
            columns = [batch[name] for name in self._columns(batch)]
            missing = [row for row, values in enumerate(zip(*columns, strict=True)) if any(map(_is_missing, values))]
            if not missing:
                raise
        rows = sorted({*range(n)} - {*missing})
        scores = self._scores({name: column[rows] for name, column in batch.items()}) if rows else ()
        faults = dict.fromkeys(missing, "one of its values is missing")
        return answered(n, dict(zip(rows, scores, strict=True)), faults, {})

    def _scores(self, batch: Batch) -> Floats:
        """Return scores in the order of the labels, (n, K). The estimator's labels of the first batch must agree."""
        rows = self._rows(batch)
        scores = np.asarray(self._score(rows), np.float32)
        if scores.ndim == 1:  # of the second of two classes
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        if scores.shape[1:] != (len(self._order),):
            raise ConfigError(
                f"{self._spec.path} gives {scores.shape[1]} scores for {len(self._order)} labels: fit it with one "
                "score for each label, such as decision_function_shape='ovr'"
            )
        scores = scores[:, self._order]
        if not self._is_checked:
            labels = np.asarray(self._estimator.predict(rows)).tolist()
            try:
                require_same_labels(self._spec.path, Answers(scores), labels, self._names)
            except ConfigError as error:
                # Probabilities and decision values of one estimator may order rows otherwise, as in SVC.
                has_both = self._spec.answers_kind != "surrogate" and hasattr(self._estimator, "decision_function")
                hint = "; its probabilities are fitted apart from its labels: declare logit_kind: surrogate"
                raise ConfigError(f"{error}{hint if has_both else ''}") from None
            self._is_checked = True
        return scores

    def _columns(self, batch: Batch) -> Sequence[str]:
        return self._spec.columns or self._fitted_names or [name for name in batch if name not in _NOT_FEATURES]

    def _rows(self, batch: Batch) -> Any:
        """Return the features of a batch: a data frame if it was fitted on columns by name, else an array (n, d)."""
        names = self._columns(batch)
        require_columns(batch, *names)
        if self._fitted_names:
            frame = {fitted: batch[name] for fitted, name in zip(self._fitted_names, names, strict=True)}
            return self._frame(frame).infer_objects()
        columns = [batch[name] for name in names]
        try:
            return np.column_stack([np.stack(list(column)) for column in columns])
        except (TypeError, ValueError) as error:
            raise DataError(f"{self._spec.path} reads numbers: {first_line(error)}") from error


def _is_missing(value: object) -> bool:
    return value is None or (isinstance(value, float | np.floating) and bool(np.isnan(value)))
