"""CascadeClassifier: a cascade of scikit-learn's classifiers, in scikit-learn's manners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

import numpy as np

from cauc_ray.api import offline
from cauc_ray.api.evaluated import Evaluation
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.files.documents import atomic_file, write_text
from cauc_ray.models.pool import pool_of
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import signs_of
from cauc_ray.numbers.logits import LogitKind, as_logits, log_softmax
from cauc_ray.numbers.sweep import Objective
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.predictions import Predictions
from cauc_ray.policies.trace import Answered, steps_of

try:
    from sklearn import get_config
    from sklearn.base import BaseEstimator, ClassifierMixin, clone
    from sklearn.frozen import FrozenEstimator
    from sklearn.model_selection import StratifiedShuffleSplit, check_cv
    from sklearn.pipeline import Pipeline
    from sklearn.utils import check_random_state, column_or_1d, get_tags, indexable
    from sklearn.utils.metadata_routing import MetadataRouter, MethodMapping, process_routing
    from sklearn.utils.multiclass import check_classification_targets, unique_labels
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data
except ImportError as missing:
    raise ConfigError("CascadeClassifier needs scikit-learn 1.6 or newer: pip install 'cauc-ray[sklearn]'") from missing

# Parameters that are options of fit() under the same names.
_FIT_OPTIONS = ("costs", "method", "budget", "threshold", "price", "objective", "calibrator", "safe", "validation")
# Below the least score of a row, for a class that a member has not seen.
_UNSEEN = 50.0
# Labels and scores of a member are compared on at most twice as many rows, and may differ on this share of them.
_COMPARED_ROWS, _TOLERATED_SHARE = 500, 0.05


class CascadeClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifiers that answer in turn, cheapest first; the next one is called only for rows on which none is sure.

    >>> from cauc_ray import CascadeClassifier
    >>> from sklearn.datasets import load_digits
    >>> from sklearn.linear_model import LogisticRegression
    >>> from sklearn.svm import SVC
    >>> X, y = load_digits(return_X_y=True)
    >>> members = [("small", LogisticRegression(C=1e-4)), ("large", SVC())]
    >>> model = CascadeClassifier(members, costs=[1, 10], cv=0.5, method="rf").fit(X[:1200], y[:1200])
    >>> bool(model.score(X[1200:], y[1200:]) > 0.8)
    True

    Args:
        estimators: (name, classifier) pairs, cheapest first. Each has predict_proba, else decision_function. They are
            cloned and fitted, but for fitted ones in sklearn.frozen.FrozenEstimator, which stay as they are.
        costs: of a call of each, in their order or by name.
        method: as of cauc_ray.fit(), such as "base" or "rf".
        budget: mean cost per row that the threshold is chosen for.
        threshold: one to use as it is.
        price: of a unit of cost, in errors, which decides the threshold.
        objective: what a chosen threshold maximises, "accuracy" or "macro-f1".
        calibrator: of each member: "temperature", "offsets", or for Base with at most two members "isotonic".
        safe: fuse only where that is supported, and fall back on a single member that is as good.
        cv: how rows are found that a member was not fitted on, as the policy needs: folds, a number of them or any
            splitter, whose rows are answered out of fold before the members are fitted on all rows; or a share between
            0 and 1 that is held out, the members being fitted on the rest.
        validation: share of these rows that the threshold is chosen on; the others calibrate.
        random_state: of these draws.

    Attributes:
        policy_: the policy, as cauc_ray.fit returns it.
        classes_: the labels, sorted; a prediction of the policy is an index of them.
        members_: the fitted classifiers by name; their labels are indexes of classes_, but for frozen ones.
        cost_: the mean cost of a row that the policy expects.
    """

    def __init__(
        self,
        estimators: Sequence[tuple[str, Any]],
        costs: Sequence[float] | Mapping[str, float] | None = None,
        *,
        method: str = "base",
        budget: float | None = None,
        threshold: float | None = None,
        price: float | None = None,
        objective: Objective = "accuracy",
        calibrator: CalibratorKind = "temperature",
        safe: bool = False,
        cv: Any = 5,
        validation: float | None = 0.5,
        random_state: Any = 0,
    ) -> None:
        self.estimators = estimators
        self.costs = costs
        self.method = method
        self.budget = budget
        self.threshold = threshold
        self.price = price
        self.objective = objective
        self.calibrator = calibrator
        self.safe = safe
        self.cv = cv
        self.validation = validation
        self.random_state = random_state

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters, with deep the members and theirs as well: large, large__C."""
        params: dict[str, Any] = super().get_params(deep=False)
        if deep:
            for name, member in self._pairs():
                params[name] = member
                params |= {f"{name}__{key}": value for key, value in member.get_params(deep=True).items()}
        return params

    def set_params(self, **params: Any) -> Self:
        """Set parameters, members by their names, and members' own as large__C."""
        if "estimators" in params:
            self.estimators = params.pop("estimators")
        members = {name: params.pop(name) for name, _ in self._pairs() if name in params}
        if members:
            self.estimators = [(name, members.get(name, member)) for name, member in self._pairs()]
        super().set_params(**params)
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        of_members = [get_tags(member).input_tags for _, member in self._pairs()]
        tags.input_tags.sparse = all(of.sparse for of in of_members)
        tags.input_tags.allow_nan = all(of.allow_nan for of in of_members)
        return tags

    def fit(self, X: Any, y: Any, **fit_params: Any) -> Self:
        """Fit the members, and the policy on rows that they were not fitted on.

        Args:
            X: (N, features) or what else the members take.
            y: Labels, (N,), of any type.
            **fit_params: Metadata, such as sample_weight (N,). With scikit-learn's metadata routing, each member gets
                what it requests. Without it, every member gets all metadata; large__NAME goes to the member large
                alone. A Pipeline passes sample_weight to its last step. The policy counts every row once.

        Raises:
            ValueError: As scikit-learn does, and for a row without a label.
            ConfigError: A parameter, a cost, or the scores of a member, which are not those of its labels.
            BudgetError: No operating point is within the budget.
        """
        names = self._names()
        if self.costs is None:
            raise ConfigError("costs: give what a call of each member costs, as costs=[1, 10]")
        X, y = self._checked(X, y)
        seed = self.random_state
        seed = int(seed if isinstance(seed, Integral) else check_random_state(seed).randint(2**31 - 1))
        # A float is a share; True is a number, too.
        shared = isinstance(self.cv, Real) and not isinstance(self.cv, Integral)
        cv = StratifiedShuffleSplit(1, test_size=float(self.cv), random_state=seed) if shared else self.cv
        folds = list(check_cv(cv, y, classifier=True).split(X, y))
        answers: dict[str, list[Floats]] = {name: [] for name in names}
        kinds: dict[str, LogitKind] = {}
        codes = self._codes(y)
        for fold, (train, held_out) in enumerate(folds):
            self.members_ = self._fitted(X, codes, fit_params, train)
            for name, member in self.members_.items():
                values, kinds[name] = self._scores(name, member, _rows_of(X, held_out))
                answers[name].append(values)
                if not fold:
                    self._require_same_labels(name, member, X, codes, held_out, values)
        if len(folds) > 1:
            self.members_ = self._fitted(X, codes, fit_params)
        held_out = np.concatenate([rows for _, rows in folds])
        order = np.argsort(held_out, kind="stable")
        self.policy_ = offline.fit(
            {name: np.concatenate(parts)[order] for name, parts in answers.items()},
            codes[held_out[order]],
            models=names,
            seed=seed,
            logit_kind=kinds,
            **{name: getattr(self, name) for name in _FIT_OPTIONS},
        )
        if self.policy_.expected is not None:
            self.cost_ = self.policy_.expected.cost
        return self

    def predict(self, X: Any) -> Any:
        """Return the labels (N,); a member is called for the rows that reach it, and no others."""
        answered, _ = self._answer(X)
        return self.classes_[answered.predictions]

    def predict_proba(self, X: Any) -> Floats:
        """Return calibrated probabilities, float64 (N, K), of the stage at which each row stops."""
        _, scores = self._answer(X)
        return np.exp(log_softmax(scores))

    def predictions(self, X: Any) -> Predictions:
        """Return what the policy answers: .prediction (an index of classes_), .confidence, .stage and .cost."""
        answered, _ = self._answer(X)
        return Predictions(
            prediction=answered.predictions,
            confidence=answered.confidences,
            stage=answered.stages,
            cost=answered.costs,
            example_ids=tuple(map(str, range(len(answered)))),
            labels=None,
            models=self.policy_.models,
            cost_unit=self.policy_.cost_unit,
            names=self._names_of_classes(),
        )

    def evaluate(self, X: Any, y: Any) -> Evaluation:
        """Return accuracy and cost on labelled rows, next to each member by itself; all members answer all rows."""
        logits, kinds = self._all_scores(X, self.policy_.models)
        evaluation = offline.evaluate(logits, self.policy_, labels=self._codes(column_or_1d(y)), logit_kind=kinds)
        return replace(evaluation, names=self._names_of_classes())

    def compare(self, X: Any, y: Any, **options: Any) -> Any:
        """Compare methods on the members' scores of labelled rows that the members were not fitted on.

        Args:
            X: Rows, (N, features) or what else the members take; a quarter of them calibrates, a quarter validates,
                and the rest measures, unless options say otherwise.
            y: Labels, (N,).
            **options: Of cauc_ray.compare(), such as methods=["single", "base", "rf"] and budgets=[2, 4].

        Returns:
            The comparison, at the budget of this model if options give none.
        """
        from cauc_ray import compare

        names = self._names()
        logits, kinds = self._all_scores(X, names)
        costs = self.costs
        if costs is not None and not isinstance(costs, Mapping):
            costs = dict(zip(names, costs, strict=True))
        settings: dict[str, Any] = {"models": names, "costs": costs, "logit_kind": kinds, "objective": self.objective}
        if not options.keys() & {"budget", "budgets", "relative_budgets", "points"}:
            settings["budget"] = self.budget
        return compare(logits, self._codes(column_or_1d(y)), **{**settings, **options})

    def get_metadata_routing(self) -> Any:
        """Return which metadata of fit, such as sample_weight, each member requests, and score itself."""
        router = MetadataRouter(owner=type(self).__name__).add_self_request(self)
        return router.add(
            method_mapping=MethodMapping().add(caller="fit", callee="fit"),
            **dict(self._pairs()),
        )

    def _all_scores(self, X: Any, names: Sequence[str]) -> tuple[dict[str, Floats], dict[str, LogitKind]]:
        """Return the scores of all rows by some members, and their kinds."""
        X = self._opened(X)
        kinds = {name: self._scores_kind(self.members_[name]) for name in names}
        return {name: self._scores(name, self.members_[name], X)[0] for name in names}, kinds

    def save_pool(self, path: str | Path, name: str | None = None) -> None:
        """Save the members and a pool file of them, for cauc_ray.run and cauc_ray.serve with the policy.

        Rows need columns of the names that X had when it was fitted; from an array, X has none, and rows need its
        columns in order.

        Args:
            path: The pool file; NAME.joblib of each member lies next to it.
            name: Name of the pool; by default that of the file.

        Raises:
            NotFittedError: The model has not been fitted.
            ConfigError: A member's name cannot be a stage's, a member lacks a class, or its classes are numbers as
                texts that sort otherwise than the numbers.
        """
        import joblib
        import yaml

        check_is_fitted(self, "policy_")
        names, numbers = self._names_of_classes(), [str(number) for number in range(len(self.classes_))]
        stages = []
        for member_name in self.policy_.models:
            member = self.members_[member_name]
            if not isinstance(member, FrozenEstimator):
                if len(self._fitted_classes) < len(names):
                    raise ConfigError(f"member {member_name!r} was fitted without some of the classes: give more rows")
                if sorted(names) == sorted(numbers) and list(names) != numbers:
                    raise ConfigError("the labels are numbers as texts, in another order than the numbers: fit on ints")
            kind = {"logit_kind": "surrogate"} if self._scores_kind(member) == "surrogate" else {}
            model = {"kind": "sklearn", "path": f"{member_name}.joblib", **kind}
            stages.append({"name": member_name, "model": model})
        path = Path(path)
        content = {"name": name or path.stem, "task": "classification", "labels": list(names), "stages": stages}
        pool_of(content, path.parent)
        for member_name in self.policy_.models:
            with atomic_file(path.with_name(f"{member_name}.joblib")) as file:
                joblib.dump(self.members_[member_name], file)
        write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))

    def _names_of_classes(self) -> tuple[str, ...]:
        return tuple(map(str, self.classes_.tolist()))

    def _pairs(self) -> list[tuple[str, Any]]:
        """Return the members; none where estimators are not pairs, which fit() refuses."""
        entries = self.estimators if isinstance(self.estimators, list | tuple) else []
        pairs = [pair for pair in entries if isinstance(pair, list | tuple) and len(pair) == 2]
        return [(name, member) for name, member in pairs if isinstance(name, str)]

    def _names(self) -> list[str]:
        names = [name for name, _ in self._pairs()]
        if not names or len(set(names)) < len(self.estimators):
            entries = self.estimators if isinstance(self.estimators, list | tuple) else [self.estimators]
            described = ", ".join(
                repr(entry[0]) if isinstance(entry, list | tuple) and entry else type(entry).__name__
                for entry in entries
            )
            raise ConfigError(f"estimators: pairs (name, classifier) with each name once, got {described or 'none'}")
        invalid = next((member for _, member in self._pairs() if not hasattr(member, "fit")), None)
        if invalid is not None:
            raise ConfigError(f"estimators: {invalid!r} is not a classifier; leave the pair out")
        parameters = self.get_params(deep=False)
        clashes = [name for name in names if "__" in name or name in parameters]
        if clashes:
            raise ConfigError(f"estimators: {clashes[0]!r} cannot name a member: it has '__' or is a parameter")
        return names

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        """Return rows that can be indexed, and labels, whose classes are set."""
        if y is None:
            raise ValueError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        validate_data(self, X, skip_check_array=True)
        _require_labels(y)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        X, y = indexable(X, y)
        check_consistent_length(X, y)
        frozen = [member for _, member in self._pairs() if isinstance(member, FrozenEstimator)]
        for member in frozen:
            check_is_fitted(member)
        known_labels = [y, *(member.classes_ for member in frozen)]
        unique_labels(*known_labels)  # refuses words next to numbers, which numpy would turn into words
        self.classes_ = np.unique(np.concatenate(known_labels))
        if len(self.classes_) < 2:
            raise ValueError(
                f"a classifier needs samples of at least 2 classes, the data hold {len(self.classes_)} class"
            )
        return X, y

    def _fitted(self, X: Any, codes: Ints, params: Mapping[str, Any], rows: Ints | None = None) -> dict[str, Any]:
        """Return the members, fitted on some rows, None for all.

        Their labels are 0, 1, … without gaps, which some classifiers require: positions in the fitted classes.
        """
        if rows is not None:
            n, X, codes = len(codes), _rows_of(X, rows), codes[rows]
            params = {key: _rows_of(value, rows) if _n_rows(value) == n else value for key, value in params.items()}
        self._fitted_classes, labels = np.unique(codes, return_inverse=True)
        by_member = self._params_of_members(params)
        return {name: clone(member).fit(X, labels, **by_member[name]) for name, member in self._pairs()}

    def _params_of_members(self, params: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what each member's fit takes: what it requests, or without metadata routing all and its own."""
        if get_config()["enable_metadata_routing"]:
            routed = process_routing(self, "fit", **params)
            return {name: dict(routed[name].fit) for name, _ in self._pairs()}
        params = {key: value for key, value in params.items() if value is not None}
        prefixes = tuple(f"{name}__" for name, _ in self._pairs())
        shared = {key: value for key, value in params.items() if not key.startswith(prefixes)}
        by_member = {}
        for (name, member), prefix in zip(self._pairs(), prefixes, strict=True):
            private = {key.removeprefix(prefix): value for key, value in params.items() if key.startswith(prefix)}
            weights = dict(shared)
            if isinstance(member, Pipeline) and "sample_weight" in weights:
                weights[f"{member.steps[-1][0]}__sample_weight"] = weights.pop("sample_weight")
            by_member[name] = weights | private
        return by_member

    def _codes_of(self, member: Any, labels: Any) -> Ints:
        """Return a member's labels, (n,), as indexes of classes_."""
        if isinstance(member, FrozenEstimator):
            return self._codes(np.asarray(labels))
        codes: Ints = self._fitted_classes[np.asarray(labels).astype(np.intp)]
        return codes

    def _require_same_labels(self, name: str, member: Any, X: Any, codes: Ints, rows: Ints, scores: Floats) -> None:
        """Raise ConfigError if a member's labels are right more often than the classes of its highest scores.

        Probabilities that a classifier fits after its labels (SVC) differ in a few rows, and a tuned threshold may cost
        accuracy; scores that are not those of the classes in order differ in many, and answer worse.

        Args:
            name: Name of the member.
            member: Fitted classifier.
            X: Rows of the fit.
            codes: Their labels, as indexes of classes_, (N,).
            rows: Rows that the member was not fitted on, (n,).
            scores: The member's scores of these rows, (n, K).
        """
        if not hasattr(member, "predict"):
            return
        sample = np.arange(0, len(rows), max(1, len(rows) // _COMPARED_ROWS))
        scores, rows = scores[sample], rows[sample]
        predicted, best = self._codes_of(member, np.ravel(member.predict(_rows_of(X, rows)))), scores.argmax(axis=1)
        differ = scores[np.arange(len(rows)), predicted] < scores.max(axis=1)
        comparison = signs_of(predicted == codes[rows], best == codes[rows])
        if differ.mean() > _TOLERATED_SHARE and comparison.gains:
            raise self._not_its_classes(
                name,
                f"its predict() differs from the class of the highest score on {int(differ.sum()):,} of {len(rows):,} "
                "rows, and is right more often",
            )

    def _not_its_classes(self, name: str, reason: str) -> ConfigError:
        return ConfigError(
            f"member {name!r}: {reason}; it must have one score for each class, in the order of classes_, as SVC has "
            "with decision_function_shape='ovr'"
        )

    def _opened(self, X: Any) -> Any:
        check_is_fitted(self, "policy_")
        (X,) = indexable(X)  # the members check their features themselves
        if not hasattr(X, "shape") and not isinstance(X, list | tuple):
            raise TypeError(f"X: rows are expected in an array, a data frame or a list, got {type(X).__name__}")
        return X

    def _codes(self, y: Any) -> Ints:
        """Return labels as indexes of classes_. Raises DataError for one that is not among them."""
        places = {label: place for place, label in enumerate(self.classes_.tolist())}
        labels = y.tolist()
        unknown = [label for label in labels if label not in places]
        if unknown:
            raise DataError(f"label {unknown[0]!r} is not among the classes {', '.join(map(repr, places))}")
        return np.array([places[label] for label in labels], dtype=np.intp)

    def _answer(self, X: Any) -> tuple[Answered, Floats]:
        """Return what the policy answers, and the scores of it, float64 (N, K)."""
        X, policy = self._opened(X), self.policy_
        n = _n_rows(X)
        predictions, stages = np.empty(n, dtype=np.int32), np.empty(n, dtype=np.int8)
        confidences, scores = np.empty(n), np.empty((n, len(self.classes_)))

        def logits_of(stage: int, rows: Ints) -> Floats:
            name = policy.models[stage]
            values, kind = self._scores(name, self.members_[name], X if len(rows) == n else _rows_of(X, rows))
            return as_logits(values, kind)

        for stage, rows, step in steps_of(policy, np.arange(n), logits_of):
            done = rows[step.accepted]
            predictions[done], confidences[done] = step.predictions[step.accepted], step.confidences[step.accepted]
            scores[done], stages[done] = step.scores[step.accepted], stage
        costs = Costs(policy.cost_unit, np.array([stage.cost for stage in policy.stages]))
        return Answered(predictions, confidences, stages, costs.of_stops(stages)), scores

    def _scores_kind(self, member: Any) -> LogitKind:
        return "probabilities" if hasattr(member, "predict_proba") else "surrogate"

    def _scores(self, name: str, member: Any, X: Any) -> tuple[Floats, LogitKind]:
        """Return what a member says of rows, float32 (n, K) in the order of classes_, and of what kind that is."""
        kind = self._scores_kind(member)
        if kind == "surrogate" and not hasattr(member, "decision_function"):
            raise ConfigError(f"member {name!r} has neither predict_proba nor decision_function")
        scores = member.predict_proba(X) if kind == "probabilities" else member.decision_function(X)
        scores = np.asarray(scores, dtype=np.float32)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        codes = self._codes_of(member, member.classes_)
        if scores.shape[1:] != codes.shape:
            raise self._not_its_classes(name, f"it gives {scores.shape[1]} scores for {len(codes)} classes")
        if np.array_equal(codes, np.arange(len(self.classes_))):
            return scores, kind
        # A fold may lack a class: improbable, not impossible.
        unseen = np.zeros(len(scores)) if kind == "probabilities" else scores.min(axis=1) - _UNSEEN
        values = np.repeat(unseen[:, None], len(self.classes_), axis=1).astype(np.float32)
        values[:, codes] = scores
        return values, kind


def _require_labels(y: Any) -> None:
    """Raise ValueError naming a row without a label: None, NaN or pandas' NA."""
    labels = np.asarray(y)
    if labels.dtype.kind not in "fO":
        return
    missing = next((row for row, label in enumerate(labels.ravel().tolist()) if _is_missing(label)), None)
    if missing is not None:
        raise ValueError(f"y: row {missing} has no label ({labels.ravel()[missing]}); leave such rows out of X and y")


def _is_missing(label: object) -> bool:
    try:
        return label is None or bool(label != label)
    except TypeError:  # pandas' NA has no truth value
        return True


def _n_rows(X: Any) -> int:
    """Return how many rows there are, none of what is not an array or a list."""
    shape = getattr(X, "shape", (len(X) if isinstance(X, list | tuple) else 0,))
    return int(shape[0]) if shape else 0


def _rows_of(X: Any, rows: Ints) -> Any:
    if hasattr(X, "iloc"):
        return X.iloc[rows]
    return X[rows] if hasattr(X, "shape") else [X[row] for row in rows]
