"""Fits and evaluations from Python: arrays and tables give the same, and options are checked in one place."""

import re
import warnings

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import planted

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import CaucError, CaucWarning, DataError

COSTS = {"small": 1.0, "large": 10.0}


def arrays(seed, n, k=4, ragged=False, dtype=np.float32):
    """Return logits by model, and labels."""
    labels, (small, large) = planted(np.random.default_rng(seed), n, k, (1.0, 2.2), ragged=ragged, dtype=dtype)
    return {"small": small, "large": large}, labels


def probabilities(z):
    odds = np.exp(z - z.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def write(folder, **splits):
    """Write splits as a table whose ids are positions."""
    for split, (logits, labels) in splits.items():
        for model, z in logits.items():
            ids = [str(row) for row in range(len(z))]
            write_logits(folder, model, split, example_ids=ids, labels=labels, logits=z)
    return folder


@pytest.fixture(scope="module")
def data():
    return {split: arrays(place, 150) for place, split in enumerate(("calibration", "validation", "test"))}


@given(
    seed=st.integers(0, 999),
    n=st.integers(40, 120),
    k=st.integers(2, 5),
    ragged=st.booleans(),
    kind=st.sampled_from(["raw", "probabilities"]),
    dtype=st.sampled_from([np.float32, np.float64]),
    options=st.sampled_from(
        [{}, {"method": "rf"}, {"method": "rf", "budget": 6.0}, {"threshold": 0.8}, {"safe": True}]
    ),
)
def test_the_file_of_a_policy_is_the_same_through_both_doors(
    tmp_path_factory, seed, n, k, ragged, kind, dtype, options
):
    folder, pairs = tmp_path_factory.mktemp("doors"), []
    for split_seed, rows in ((seed, n), (seed + 1000, n + 7)):
        logits, labels = arrays(split_seed, rows, k, ragged and kind == "raw", dtype)
        pairs.append(({m: probabilities(z) if kind == "probabilities" else z for m, z in logits.items()}, labels))
    write(folder, calibration=pairs[0], validation=pairs[1])
    settings = {**options, "costs": COSTS, "logit_kind": kind}
    from_arrays = cauc_ray.fit(*pairs[0], validation=pairs[1], **settings)
    from_table = cauc_ray.fit(folder, **settings)
    assert from_arrays.to_json() == from_table.to_json()
    assert cauc_ray.fit(folder, models=["small", "large"], **{**settings, "costs": [1, 10]}) == from_table


@given(seed=st.integers(0, 999), share=st.sampled_from([0.2, 0.5, 0.75]))
def test_a_share_is_drawn_alike_from_arrays_and_from_a_table_and_is_disjoint(tmp_path_factory, seed, share):
    logits, labels = arrays(seed, 120)
    settings = {"costs": COSTS, "validation": share, "seed": seed, "method": "rf"}
    policy = cauc_ray.fit(logits, labels, **settings)
    folder = write(tmp_path_factory.mktemp("share"), calibration=(logits, labels))
    assert cauc_ray.fit(folder, **settings).to_json() == policy.to_json()
    assert (policy.calibration.n, policy.validation.n) == (120 - round(share * 120), round(share * 120))
    assert policy.calibration.examples_fingerprint != policy.validation.examples_fingerprint
    assert cauc_ray.fit(logits, labels, **{**settings, "seed": seed + 1}).validation != policy.validation


@pytest.mark.parametrize("split", ["calibration", "validation"])
def test_a_fit_leaves_out_rows_without_a_label_with_a_warning(data, tmp_path, split):
    logits, labels = data[split]
    has_label = np.arange(len(labels)) % 7 > 0
    gappy = {**data, split: (logits, np.where(has_label, labels, -1))}
    complete = {**data, split: ({model: z[has_label] for model, z in logits.items()}, labels[has_label])}
    settings = {"method": "rf", "budget": 5.0, "costs": COSTS}
    with pytest.warns(CaucWarning, match=rf"'{split}': {(~has_label).sum()} of {len(labels)} examples have no label"):
        policy = cauc_ray.fit(*gappy["calibration"], validation=gappy["validation"], **settings)
    expected = cauc_ray.fit(*complete["calibration"], validation=complete["validation"], **settings)
    assert policy.id == expected.id
    assert policy.on_selection == expected.on_selection
    assert len(policy.curve) > 1
    folder = write(tmp_path, **gappy)
    with pytest.warns(CaucWarning, match="have no label"):
        assert cauc_ray.fit(folder, **settings).id == policy.id


@pytest.mark.parametrize(("split", "purpose"), [("calibration", "fitted"), ("validation", "chosen"), ("test", None)])
def test_a_policy_that_is_measured_on_the_rows_of_its_fit_is_warned_of(data, tmp_path, split, purpose):
    folder = write(tmp_path, **data)
    policy = cauc_ray.fit(folder, costs=COSTS, budget=6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cauc_ray.evaluate(folder, policy, split=split)
    flattering = [warning for warning in caught if "these very examples" in str(warning.message)]
    assert [(f"{purpose} on" in str(warning.message), warning.filename) for warning in flattering] == (
        [(True, __file__)] if purpose else []
    )


def test_an_evaluation_is_the_same_through_both_doors(data, tmp_path):
    policy = cauc_ray.fit(*data["calibration"], costs=COSTS, validation=data["validation"], method="rf", budget=5.0)
    logits, labels = data["test"]
    folder = write(tmp_path, test=data["test"])
    policy.save(tmp_path / "policy.json")
    from_arrays = cauc_ray.evaluate(logits, policy, labels=labels)
    from_table = cauc_ray.evaluate(folder, tmp_path / "policy.json")
    of_arrays, of_table = from_arrays.as_json(), from_table.as_json()
    of_place = {"source": None, "guards": None}  # which say where the logits are from
    assert of_arrays | of_place == of_table | of_place
    assert from_arrays.to_arrow().sort_by("example_id").equals(from_table.to_arrow())
    assert from_arrays.to_pandas().label.tolist() == labels.tolist()
    predicted = policy.predict(logits)
    np.testing.assert_array_equal(predicted.prediction, from_arrays.predictions.prediction)
    np.testing.assert_array_equal(predicted.confidence, from_arrays.predictions.confidence)
    assert cauc_ray.check(logits, policy, labels=labels).valid == cauc_ray.check(folder, policy).valid
    assert cauc_ray.evaluate(logits, policy).measures.accuracy is None


SETUP = ("setup_s", "setup_ratio", "paper_setup_ratio", "set")  # clocks, and where logits are from


def figures(comparison):
    return [{key: value for key, value in row.items() if key not in SETUP} for row in comparison.rows]


def test_comparisons_are_the_same_through_both_doors_and_need_no_chain(data, tmp_path):
    folder = write(tmp_path, **data)
    logits, labels = data["calibration"]
    pairs = {"validation": data["validation"], "test": data["test"]}
    settings = {"costs": {"large": 10, "small": 1}, "methods": ["single", "base", "rf", "random"]}
    compared = cauc_ray.compare(logits, labels, **settings, **pairs)
    assert figures(compared) == figures(cauc_ray.compare(folder, **settings))
    assert compared.about["models"] == ["small", "large"]
    shares = {**settings, "validation": 0.25, "test": 0.5, "seed": 1, "points": 3}
    cut = cauc_ray.compare(logits, labels, **{**shares, "validation": None})  # half of what test leaves
    assert figures(cut) == figures(cauc_ray.compare(folder, **shares))
    assert cut.about["n"] == 75
    fingerprints = [of["examples"] for of in cut.about["fingerprints"].values() if isinstance(of, dict)]
    assert len(set(fingerprints)) == 3


@given(
    seed=st.integers(0, 999),
    options=st.sampled_from([{"validation": 0.4, "method": "rf"}, {"validation": 0.3}]),
    given_ids=st.sampled_from(
        [np.array([f"image {row}" for row in range(90)]), 7 * np.arange(90), 10**8 - np.arange(90)]
    ),
)
def test_with_ids_nothing_depends_on_the_order_of_rows_nor_on_whether_ids_are_numbers(seed, options, given_ids):
    logits, labels = arrays(seed, 90)
    ids = list(map(str, given_ids))
    order = np.random.default_rng(seed).permutation(90)
    turned = {model: z[order] for model, z in logits.items()}
    settings = {**options, "costs": COSTS}
    policy = cauc_ray.fit(logits, labels, example_ids=ids, **settings)
    turned_ids = given_ids[order]
    assert cauc_ray.fit(turned, labels[order], example_ids=turned_ids, **settings).to_json() == policy.to_json()
    evaluated = cauc_ray.evaluate(turned, policy, labels=labels[order], example_ids=turned_ids)
    assert evaluated.predictions.example_ids == tuple(map(str, turned_ids))
    assert evaluated.to_arrow().column("label").to_pylist() == labels[order].tolist()
    predicted = policy.predict(turned, example_ids=turned_ids).to_arrow()
    assert predicted.equals(evaluated.to_arrow().drop_columns("label"))
    checked = cauc_ray.check(turned, policy, labels=labels[order], example_ids=turned_ids)
    assert checked.as_json() == cauc_ray.check(logits, policy, labels=labels, example_ids=ids).as_json()


def test_a_replaced_model_needs_no_table(data):
    (logits, labels), (held_out, held_out_labels) = data["calibration"], data["validation"]
    policy = cauc_ray.fit(logits, labels, costs=COSTS, cost_unit="USD", validation=data["validation"], method="rf")
    newer = {"other": logits["small"] * 2, "large": logits["large"]}
    pair = ({"other": held_out["small"] * 2, "large": held_out["large"]}, held_out_labels)
    replaced = cauc_ray.replace_model(policy, newer, {"small": "other"}, labels, costs={"other": 2.0}, validation=pair)
    refitted = cauc_ray.fit(
        newer, labels, costs={"other": 2.0, "large": 10.0}, cost_unit="USD", validation=pair, method="rf"
    )
    assert replaced.to_json() == refitted.to_json()


def test_costs_decide_the_order_where_no_chain_is_given(data):
    logits, labels = data["calibration"]
    turned = dict(reversed(logits.items()))
    for costs in (COSTS, [10.0, 1.0], np.array([10.0, 1.0])):
        assert cauc_ray.fit(turned, labels, costs=costs).models == ("small", "large")
    assert cauc_ray.fit(logits, labels, models=["large"], costs=COSTS).models == ("large",)


Z = 3 * np.eye(4, dtype=np.float32)[np.arange(150) % 4]
LABELS = np.arange(150) % 4

# What only arrays can be asked for wrongly; test_refusals has the options that the command has too.
REFUSED = [
    ("fit", {"models": "small,large"}, "models: "),
    ("fit", {"costs": {"small": 1.0}}, "no cost of model 'large'"),
    ("fit", {"costs": None}, "give costs"),
    ("fit", {"validation": 0.001}, "empty"),
    ("fit", {"validation": (1, 2, 3, 4)}, "validation: "),
    ("fit", {"validation": (np.eye(4), [0, 1, 2, 3])}, "validation: a pair is"),
    ("fit", {"example_ids": ["a"] * 150}, "example 'a' is a duplicate"),
    ("fit", {"example_ids": ["a", "b"]}, "2 example ids for 150 examples"),
    *(("fit", {"example_ids": single}, f"got {single!r}") for single in (5, "a" * 150)),
    ("compare", {"validation": 0.5, "test": 0.5}, "must be below 1"),
    ("compare", {"address": "local"}, "leave address out"),
    ("compare", {"validation": 0.5, "test": 0.2, "embedding": "small"}, "arrays have no embeddings"),
    ("fit", {"labels": None}, "needs labels"),
    ("fit", {"labels": np.full(150, 9)}, "label 9 is outside"),
    *(("fit", {"labels": LABELS + bad}, "label") for bad in (2**32, -(2**33), 0.5, np.nan)),
    ("fit", {"labels": [*LABELS[1:], None]}, "(-1 where unknown), got None"),
    ("fit", {"labels": ["2"] * 150}, "(-1 where unknown), got '2'"),
    *(("fit", {"logits": unnamed}, "logits") for unnamed in (Z, [Z, Z], None)),
    *(("fit", {"logits": unnamed}, "models") for unnamed in ({}, {0: Z, 1: Z})),
    ("fit", {"logits": cauc_ray.sample_logits()}, "go with arrays"),
]


@pytest.mark.parametrize(("verb", "change", "words"), REFUSED)
def test_arrays_and_their_options_are_refused_in_one_line(verb, change, words):
    arguments = {"logits": {"small": Z, "large": Z}, "labels": LABELS, "costs": [1, 10], **change}
    with pytest.raises(CaucError, match=re.escape(words)) as refused:
        getattr(cauc_ray, verb)(**arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", [None, "3@0.9", [0.5]])
def test_what_is_none_is_refused_by_a_policy_in_one_line(data, value):
    logits, labels = data["calibration"]
    policy = cauc_ray.fit(logits, labels, validation=data["validation"], costs=COSTS, budget=6.0)
    for call, words in (
        (lambda: policy.with_threshold(value), "threshold"),
        (lambda: policy.with_budget(value), "budget"),
        (lambda: policy.predict(value), "arrays by model"),
        (lambda: cauc_ray.replace_model(policy, logits, {"small": "large"}), "'large' is a duplicate"),
    ):
        with pytest.raises(CaucError, match=words) as refused:
            call()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2, 150])
def test_splits_of_arrays_that_share_rows_are_refused(n, given_ids):
    (logits, labels), ids = arrays(0, n), [f"row {row}" for row in range(n)] if given_ids else None
    later, later_labels = arrays(1, n)
    part = {model: np.concatenate([z[:1], later[model]]) for model, z in logits.items()}
    of_part = np.append(labels[:1], later_labels)
    part_ids = ["row 0", *(f"later {row}" for row in range(n))]
    settings = {"example_ids": ids, "costs": COSTS}
    for pair in [(logits, labels, ids), *([(part, of_part, part_ids)] if given_ids else [])]:
        with pytest.raises(DataError, match=r"'calibration' and 'validation' have .* rows in common"):
            cauc_ray.fit(logits, labels, validation=pair, **settings)
        with pytest.raises(CaucError, match=r"'validation' and 'test' have .* rows in common"):
            cauc_ray.compare(logits, labels, validation=(later, later_labels), test=(later, later_labels), **settings)


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # models are always right
def test_rows_that_are_alike_by_chance_are_no_shared_rows():
    labels = (np.random.default_rng(0).random((2, 200)) < 0.1).astype(int)
    votes, later = ({"small": np.eye(2)[of] * 5, "large": np.eye(2)[of] * 4} for of in labels)
    policy = cauc_ray.fit(votes, labels[0], validation=(later, labels[1]), costs=COSTS, threshold=0.5)
    assert policy.validation.n == 200
    constant = {model: z * 0 for model, z in votes.items()}
    assert cauc_ray.fit(constant, labels[0] * 0, validation=(constant, labels[0] * 0), costs=COSTS).validation.n == 200


BAD_LOGITS = [
    (np.ma.masked_array(Z, mask=Z > 0), "masked"),
    (Z.astype(complex), "not numbers"),
    (Z[:0], "at least one row"),
    (Z[:-1], "shape"),
    ([*Z[:-1].tolist(), ["a"] * 4], "not numbers"),
]


@pytest.mark.parametrize(("large", "words"), BAD_LOGITS)
def test_arrays_that_are_no_logits_are_refused_by_their_model(large, words):
    with pytest.raises(CaucError, match=f"^.*('large'.*{words}|{words}.*'large').*$"):
        cauc_ray.fit({"small": Z, "large": large}, LABELS, costs=[1, 10])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_logits_come_in_whatever_holds_numbers(data, library):
    frames = pytest.importorskip(library)
    logits, labels = data["calibration"]
    settings = {"costs": COSTS, "validation": 0.5}
    expected = cauc_ray.fit(logits, labels, **settings).to_json()
    for held, same in (
        (lambda z: frames.DataFrame(z), frames.Series(labels)),
        (lambda z: frames.Series(z.tolist()), frames.Series(labels)),  # a column of vectors
        (lambda z: pa.array(z.tolist()), pa.array(labels)),
        (lambda z: pa.table({str(k): z[:, k] for k in range(z.shape[1])}), pa.chunked_array([labels])),
        (lambda z: z.tolist(), labels.tolist()),
        (lambda z: np.asfortranarray(z, dtype=np.float64), labels.astype(np.float64)),
    ):
        held_logits = {model: held(z) for model, z in logits.items()}
        policy = cauc_ray.fit(held_logits, same, **settings)
        assert policy.to_json() == expected
        assert policy.predict(held_logits).to_arrow().equals(policy.predict(logits).to_arrow())
    named = [frames.DataFrame({name: z[:, k] for k, name in enumerate("abcd")}) for z in logits.values()]
    with pytest.raises(DataError, match="columns"):
        policy.predict({"small": named[0], "large": named[1][list("dcba")]})


def test_results_are_drawn_and_shown_in_few_lines(data, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    logits, labels = data["test"]
    named = {"$mall": logits["small"], "<large>": logits["large"]}
    policy = cauc_ray.fit(named, labels, costs=[1, 10], validation=0.5, budget=4.0)
    evaluation = cauc_ray.evaluate(named, policy, labels=labels)
    axes = evaluation.plot()
    assert (axes.get_xlabel(), axes.get_xscale()) == ("mean cost per example (cost units)", "linear")
    axes.figure.savefig(tmp_path / "curve.png")
    with pytest.raises(DataError, match="label"):
        cauc_ray.evaluate(named, policy).plot()
    comparison = cauc_ray.compare(cauc_ray.sample_logits(), methods=["single", "base", "margin", "oracle"])
    axes = comparison.plot()
    assert axes.get_xscale() == "log"  # the costs of its models differ by much
    texts = {text.get_text() for text in [*axes.get_legend().get_texts(), *axes.texts]}
    assert texts == {"base", "margin", "oracle", "budget", "small", "large"}
    drawn = {(x, y) for line in axes.lines for x, y in zip(*line.get_data(), strict=True)}
    assert {(row["cost"], 100 * row["accuracy"]) for row in comparison.rows} <= drawn
    assert [row["method"] for row in comparison.rows] == comparison.to_pandas().method.tolist()
    assert comparison.to_arrow()["accuracy"].to_pylist() == [row["accuracy"] for row in comparison.rows]
    checked = cauc_ray.check(named, policy, labels=labels)
    for result in (comparison, policy, evaluation, evaluation.predictions, checked):
        assert str(result) == repr(result)
        assert "<large>" not in result._repr_html_()
        assert "&lt;large&gt;" in result._repr_html_() or result is comparison
