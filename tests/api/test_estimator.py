"""CascadeClassifier behaves as scikit-learn's classifiers do, and pays only for rows that are deferred."""

import numpy as np
import pandas as pd
import pytest
from sklearn import config_context
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import NotFittedError, UnsetMetadataPassedError
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, ShuffleSplit, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import estimator_checks_generator

import cauc_ray
from cauc_ray import CascadeClassifier
from cauc_ray.errors import BudgetError, ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore")


class Counting(ClassifierMixin, BaseEstimator):
    """Nearest centroids, which count the rows that they answer and remember those that they were fitted on."""

    def __init__(self, n_pixels=64):
        self.n_pixels = n_pixels

    def fit(self, X, y):
        self.classes_ = np.unique(y)
        self.centroids_ = np.stack([X[y == one, : self.n_pixels].mean(axis=0) for one in self.classes_])
        self.seen_, self.answered_ = {row.tobytes() for row in X}, []
        return self

    def predict_proba(self, X):
        assert not self.seen_ & {row.tobytes() for row in X}
        self.answered_.append(len(X))
        z = -((X[:, None, : self.n_pixels] - self.centroids_) ** 2).sum(axis=2)
        odds = np.exp(z - z.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    X = X / 16
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    return X[:1000], names[y[:1000]], X[1000:], names[y[1000:]]


def members(small=None):
    large = RandomForestClassifier(20, random_state=0)
    return [("small", small or LogisticRegression(C=1e-3)), ("large", large)]


CHECKED = CascadeClassifier(members(), costs=[1, 10], cv=3)


@pytest.mark.parametrize(
    ("estimator", "check"),
    [
        pytest.param(estimator, check, id=getattr(check, "func", check).__name__)
        for estimator, check in estimator_checks_generator(CHECKED)
    ],
)
def test_it_passes_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("cv", [0.5, 3, ShuffleSplit(2, random_state=0)], ids=str)
def test_it_calibrates_on_rows_that_members_were_not_fitted_on(digits, cv):
    X, y, X_test, y_test = digits
    model = CascadeClassifier([("small", Counting(20)), ("large", Counting())], [1, 10], cv=cv).fit(X, y)
    if cv == 0.5:
        assert len(model.members_["small"].seen_) < len(X)  # and Counting asserts the rest
    assert model.score(X_test, y_test) > 0.7


@pytest.mark.parametrize("method", ["base", "rf"])
def test_only_deferred_rows_reach_the_next_member_and_are_paid_for(digits, method):
    X, y, X_test, _ = digits
    model = CascadeClassifier([("small", Counting(20)), ("large", Counting())], [1, 10], method=method, budget=6.0)
    model.fit(X, y)
    for member in model.members_.values():
        member.answered_.clear()
    answer_rows = model.predictions(X_test)
    assert model.members_["small"].answered_ == [len(X_test)]
    n_deferred = int((answer_rows.stage > 0).sum())
    assert 0 < n_deferred < len(X_test)
    assert model.members_["large"].answered_ == [n_deferred]
    np.testing.assert_array_equal(answer_rows.cost, np.where(answer_rows.stage > 0, 11.0, 1.0))
    assert model.cost_ <= 6.0


def test_its_answers_are_those_of_its_policy(digits):
    X, y, X_test, y_test = digits
    model = CascadeClassifier(members(), {"large": 10, "small": 1}, method="rf", cv=0.5).fit(X, y)
    evaluation = model.evaluate(X_test, y_test)
    assert model.score(X_test, y_test) == evaluation.measures.accuracy.value
    answer_rows = model.predictions(X_test)
    assert answer_rows.to_arrow().equals(evaluation.to_arrow().drop_columns(["label", "label_name"]))
    assert answer_rows.cost.mean() == pytest.approx(evaluation.measures.cost)
    probabilities = model.predict_proba(X_test)
    np.testing.assert_allclose(probabilities.max(axis=1), answer_rows.confidence, rtol=1e-12)
    np.testing.assert_array_equal(model.classes_[probabilities.argmax(axis=1)], model.predict(X_test))


def test_fitted_members_stay_as_they_are(digits):
    X, y, _, _ = digits
    fitted = [(name, FrozenEstimator(clone(member).fit(X[:500], y[:500]))) for name, member in members()]
    model = CascadeClassifier(fitted, [1, 10]).fit(X[500:], y[500:])
    assert model.members_["large"].estimator is fitted[1][1].estimator
    whole = {name: member.predict_proba(X[500:]) for name, member in fitted}
    codes = np.searchsorted(model.classes_, y[500:])
    policy = cauc_ray.fit(whole, codes, costs=[1, 10], validation=0.5, logit_kind="probabilities")
    assert model.policy_.to_json() == policy.to_json()
    # A class that the new rows lack is known all the same.
    few = y[500:] != "nine"
    assert "nine" in CascadeClassifier(fitted, [1, 10]).fit(X[500:][few], y[500:][few]).classes_


def test_pipelines_searches_frames_and_members_of_other_kinds(digits):
    pd = pytest.importorskip("pandas")
    X, y, _, _ = digits
    frame = pd.DataFrame(X, columns=[f"pixel{i}" for i in range(X.shape[1])])
    model = CascadeClassifier(members(LinearSVC(C=1e-3)), [1, 10], cv=0.5)
    search = GridSearchCV(make_pipeline(StandardScaler(), model), {
        "cascadeclassifier__method": ["base", "rf"], "cascadeclassifier__large__max_depth": [2, 8],
    }, cv=2)  # fmt: skip
    search.fit(frame, y)
    assert search.best_params_["cascadeclassifier__large__max_depth"] == 8
    assert search.score(frame.iloc[:50], y[:50]) > 0.8
    assert model.set_params(small=LogisticRegression(), small__C=2.0).get_params()["small__C"] == 2.0


@pytest.mark.parametrize("cv", [0.5, 3])
def test_what_members_are_fitted_with_follows_their_rows(digits, cv):
    X, y, X_test, _ = digits
    weights = (np.arange(len(X)) % 3 > 0).astype(float)
    lone = [("small", LogisticRegression(C=1e-3, max_iter=300)), ("large", GaussianNB())]
    model = CascadeClassifier(lone, [1, 10], cv=cv).fit(X, y, sample_weight=weights)
    plain = CascadeClassifier(lone, [1, 10], cv=cv).fit(X, y)
    assert (model.predict_proba(X_test) != plain.predict_proba(X_test)).any()
    if cv == 3:  # then fitted on all rows
        weighted = GaussianNB().fit(X, y, sample_weight=weights)
        np.testing.assert_array_equal(model.members_["large"].theta_, weighted.theta_)
    search = GridSearchCV(CascadeClassifier(lone, [1, 10], cv=2), {"method": ["base", "rf"]}, cv=2)
    assert search.fit(X, y, sample_weight=np.ones(len(X))).best_score_ > 0.7


class ZeroBased(LogisticRegression):
    """Takes the labels 0, 1, … without gaps and no others, as XGBoost does."""

    def fit(self, X, y, sample_weight=None):
        if not np.array_equal(np.unique(y), np.arange(y.max() + 1)):
            raise ValueError(f"expected labels 0, 1, …, got {np.unique(y)}")
        self.weights_ = sample_weight
        return super().fit(X, y, sample_weight)


class Shuffled(LogisticRegression):
    """Scores in another order than its classes, as pairwise scores of three classes are."""

    def predict_proba(self, X):
        return np.roll(super().predict_proba(X), 1, axis=1)

    def predict(self, X):
        return self.classes_[super().predict_proba(X).argmax(axis=1)]


def labels_of(kind, y):
    codes = np.unique(y, return_inverse=True)[1]
    return {"names": y, "numbers": codes + 3, "objects": np.asarray(y, dtype=object), "floats": codes / 2}[kind]


@pytest.mark.parametrize("kind", ["names", "numbers", "objects"])
@pytest.mark.parametrize("cv", [0.5, 3, "a fold without a class"], ids=str)
def test_members_may_take_only_labels_that_count_from_zero(digits, kind, cv):
    X, y, X_test, y_test = digits
    y, y_test = np.split(labels_of(kind, np.concatenate([y, y_test])), [len(y)])
    if cv == "a fold without a class":
        first = np.flatnonzero(y != y[0])[:400]
        cv = [(first, np.setdiff1d(np.arange(len(y)), first)), (np.arange(500, 1000), np.arange(500))]
    small = ZeroBased(C=1e-3, max_iter=200)
    model = CascadeClassifier([("small", small), ("large", ZeroBased(max_iter=300))], [1, 10], cv=cv).fit(X, y)
    np.testing.assert_array_equal(model.classes_, np.unique(y))
    assert model.score(X_test, y_test) > 0.85
    named = model.predictions(X_test).to_arrow()["prediction_label"].to_pylist()
    assert named == [str(label) for label in model.predict(X_test).tolist()]
    evaluated = model.evaluate(X_test, y_test).to_arrow()
    assert evaluated["prediction_label"].to_pylist() == named
    assert evaluated["label_name"].to_pylist() == [str(label) for label in np.asarray(y_test).tolist()]


def test_weights_reach_the_last_step_of_a_pipeline_and_those_with_a_members_name_that_member(digits):
    X, y, X_test, _ = digits
    piped = make_pipeline(StandardScaler(), LogisticRegression(C=1e-3, max_iter=200))
    model = CascadeClassifier([("small", piped), ("large", ZeroBased(C=1e-2))], [1, 10], cv=0.5)
    model.fit(X, y, sample_weight=np.where(y == "three", 0.0, 1.0), large__sample_weight=np.full(len(X), 2.0))
    answers = model.classes_[model.members_["small"].predict(X_test)]
    assert not (answers == "three").any()
    assert (model.members_["large"].weights_ == 2.0).all()


def test_metadata_routing_gives_each_member_what_it_requests(digits):
    X, y, _, _ = digits
    weights = np.linspace(0.5, 1.5, len(X))
    with config_context(enable_metadata_routing=True):
        asking = ZeroBased(C=1e-3, max_iter=200).set_fit_request(sample_weight=True)
        refusing = ZeroBased(C=1e-2, max_iter=200).set_fit_request(sample_weight=False)
        model = CascadeClassifier([("small", asking), ("large", refusing)], [1, 10], cv=3)
        piped = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        members_ = piped.fit(X, y, sample_weight=weights)[-1].members_
        with pytest.raises(UnsetMetadataPassedError, match="sample_weight"):
            clone(model).set_params(small=ZeroBased()).fit(X, y, sample_weight=weights)
    np.testing.assert_array_equal(members_["small"].weights_, weights)
    assert members_["large"].weights_ is None


def test_results_show_each_member_alone_and_compare_methods_at_the_budget(digits):
    X, y, X_test, y_test = digits
    model = CascadeClassifier(members(), [1, 10], budget=5, cv=3).fit(X, y)
    evaluation = model.evaluate(X_test, y_test)
    for name, single in zip(("small", "large"), evaluation.models, strict=True):
        right = model.classes_[model.members_[name].predict(X_test)] == y_test
        assert (single.name, single.accuracy.value) == (name, pytest.approx(right.mean()))
        assert single.gain.value == pytest.approx(model.score(X_test, y_test) - right.mean())
    model.set_params(costs=np.array([1, 10]))
    comparison = model.compare(X_test, y_test, methods=["single", "base"])
    assert comparison.about["budget"] == 5
    assert {"single:small", "single:large", "base"} == {row["method"] for row in comparison.rows}


def test_metadata_routing_gives_score_the_weights_that_it_requests(digits):
    X, y, X_test, y_test = digits
    weights = np.where(y_test == "three", 1.0, 1e-3)
    with config_context(enable_metadata_routing=True):
        silent = [(name, member.set_fit_request(sample_weight=False)) for name, member in members()]
        model = CascadeClassifier(silent, [1, 10], cv=3).set_score_request(sample_weight=True)
        rows, labels = np.concatenate([X, X_test]), np.concatenate([y, y_test])
        halves = [(np.arange(len(X)), np.arange(len(X), len(rows)))]
        both = np.concatenate([np.ones(len(X)), weights])
        (score,) = cross_val_score(model, rows, labels, cv=halves, params={"sample_weight": both})
    fitted = CascadeClassifier(members(), [1, 10], cv=3).fit(X, y)
    assert score == pytest.approx(fitted.score(X_test, y_test, sample_weight=weights))
    assert score != pytest.approx(fitted.score(X_test, y_test))


def test_no_weights_are_as_none_passed(digits):
    X, y, X_test, _ = digits
    lone = [("small", LogisticRegression(C=1e-3)), ("large", KNeighborsClassifier())]
    model = CascadeClassifier(lone, [1, 10], cv=0.5).fit(X, y, sample_weight=None)
    np.testing.assert_array_equal(model.predict(X_test), clone(model).fit(X, y).predict(X_test))


@pytest.mark.parametrize("wrong", ["numbers", "another word", None, np.nan], ids=str)
@pytest.mark.parametrize("result", ["evaluate", "compare"])
def test_labels_that_are_not_its_classes_are_named(digits, result, wrong):
    X, y, X_test, y_test = digits
    model = CascadeClassifier(members(), np.array([1, 10]), cv=0.5).fit(X, y)
    labels = labels_of("numbers" if wrong == "numbers" else "objects", y_test)
    labels[0] = 12 if wrong == "numbers" else wrong
    with pytest.raises(DataError, match=f"label {labels[:1].tolist()[0]!r} is not among the classes 'eight', 'five'"):
        getattr(model, result)(X_test, labels)


@pytest.mark.parametrize("rows", [None, {"pixel0": [1.0]}], ids=str)
def test_what_has_no_rows_is_refused(digits, rows):
    X, y, _, _ = digits
    model = CascadeClassifier(members(), [1, 10], cv=0.5).fit(X, y)
    with pytest.raises(TypeError, match=f"rows are expected.*got {type(rows).__name__}"):
        model.predict(rows)


@pytest.mark.parametrize("missing", [None, np.nan, "NA of pandas"], ids=str)
@pytest.mark.parametrize("kind", ["objects", "floats"])
def test_a_row_without_a_label_is_named(digits, missing, kind):
    X, y, _, _ = digits
    y = labels_of(kind, y)
    if missing == "NA of pandas":
        missing = pytest.importorskip("pandas").NA
    if kind == "objects" or missing is not np.nan:
        y = np.asarray(y, dtype=object)
    y[7] = missing
    with pytest.raises(ValueError, match=r"row 7 has no label.*leave"):
        CascadeClassifier(members(), [1, 10], cv=0.5).fit(X, y)


def test_classifiers_whose_labels_are_not_quite_their_scores_are_taken(digits):
    """SVC fits its probabilities by cross-validation, after its labels."""
    X, y, X_test, y_test = digits
    svc = SVC(probability=True, random_state=0, C=0.2)
    model = CascadeClassifier([("small", LogisticRegression(C=1e-3)), ("large", svc)], [1, 10], cv=0.5).fit(X, y)
    assert (svc.fit(X, y).predict(X_test) != svc.classes_[svc.predict_proba(X_test).argmax(axis=1)]).any()
    assert model.score(X_test, y_test) > 0.8


BAD = [
    ({"costs": None}, ConfigError, "costs"),
    ({"budget": 0.5}, BudgetError, "cheapest"),
    ({"estimators": []}, ConfigError, "estimators"),
    ({"estimators": [("a", LogisticRegression()), ("b", "drop")]}, ConfigError, "not a classifier"),
    ({"estimators": [("a", FrozenEstimator(LogisticRegression()))]}, NotFittedError, "not fitted"),
    ({"estimators": [("cv", LogisticRegression())]}, ConfigError, "'cv' cannot name"),
    ({"estimators": [("a", LogisticRegression()), ("a", LogisticRegression())]}, ConfigError, "each name once"),
    ({"estimators": [("a", FrozenEstimator(GaussianNB().fit(np.eye(64), np.arange(64))))]}, ValueError, "Mix of label"),
    ({"estimators": [LogisticRegression(C=0.123), LogisticRegression()]}, ConfigError, "got LogisticRegression, Log"),
    ({"estimators": [("a", SVC(decision_function_shape="ovo"))]}, ConfigError, "'a'.*45 scores for 10 classes.*ovr"),
    ({"estimators": [("a", Shuffled())]}, ConfigError, "'a'.*predict.*differs.*order of classes_"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD, ids=[str(change) for change, _, _ in BAD])
def test_bad_parameters_are_refused(digits, change, error, words):
    X, y, _, _ = digits
    model = CascadeClassifier(members(), [1, 10], cv=0.5)
    for name, value in change.items():
        setattr(model, name, value)
    with pytest.raises(error, match=words):
        model.fit(X[:300], y[:300])


@pytest.mark.usefixtures("ray_session")
def test_a_saved_pool_answers_as_the_model_does(digits, tmp_path):
    columns = [f"pixel{column}" for column in range(64)]
    X, y, X_test = pd.DataFrame(digits[0], columns=columns), digits[1], pd.DataFrame(digits[2], columns=columns)
    fitted = FrozenEstimator(RandomForestClassifier(20, random_state=0).fit(X[:300], y[:300]))
    pairs = [("small", LogisticRegression(C=1e-4)), ("middle", LinearSVC(C=1e-3)), ("large", fitted)]
    model = CascadeClassifier(pairs, [1, 2, 10], budget=6.0).fit(X[300:], y[300:])
    model.save_pool(tmp_path / "pool.yaml")
    X_test.to_parquet(tmp_path / "new.parquet")
    cauc_ray.run(tmp_path / "pool.yaml", model.policy_, tmp_path / "new.parquet", tmp_path / "out")
    answer_rows = pd.read_parquet(tmp_path / "out" / "predictions")
    answer_rows = answer_rows.iloc[answer_rows.example_id.str.removeprefix("new-").astype(int).argsort()]
    np.testing.assert_array_equal(answer_rows.prediction_label, model.predict(X_test))
    np.testing.assert_allclose(answer_rows.confidence, model.predictions(X_test).confidence, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "labels", "words"),
    [("a/b", [0, 1], "name"), ("small", ["1", "0"], None), ("small", [*"0123456789", "10"], "numbers")],
)
def test_a_pool_is_saved_whole_or_not_at_all(digits, tmp_path, name, labels, words):
    X, y = digits[0], np.array(labels)[np.arange(len(digits[0])) % len(labels)]
    model = CascadeClassifier([(name, GaussianNB())], [1], cv=0.5).fit(X, y)
    if words is None:
        model.save_pool(tmp_path / "pool.yaml")
        assert {path.name for path in tmp_path.iterdir()} == {"pool.yaml", "small.joblib"}
        return
    with pytest.raises(ConfigError, match=words):
        model.save_pool(tmp_path / "pool.yaml")
    assert not any(tmp_path.iterdir())
