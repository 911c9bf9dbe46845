"""All methods side by side, from Python and from the command line."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.special import softmax
from sklearn.metrics import log_loss
from synthetic import SPLITS, chain_of, write_chains, write_table
from synthetic import chain as synthetic_chain

import cauc_ray
from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.selection import choose_methods
from cauc_ray.errors import ConfigError
from cauc_ray.policies.method import METHODS

MODELS = ["m0", "m1", "m2"]
QUICK = ["single", "base", "rf", "duo", "margin", "random", "shuffled", "max-probability", "oracle"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    write_table(folder)
    return folder


@pytest.fixture(scope="module")
def compared(table):
    return compare(table, models=MODELS, methods=QUICK)


def test_every_row_is_what_the_method_alone_gives(table, compared):
    assert [row["method"] for row in compared.rows][:3] == ["single:m0", "single:m1", "single:m2"]
    assert {row["method"] for row in compared.rows[3:]} == set(QUICK) - {"single"}
    default = compared.row("base")["default"]
    assert {key: compared.row("base")[key] for key in default} == default  # its default threshold gives the budget
    macro = {"objective": "macro-f1", "budget": 6.0}
    for method, options in (("base", {}), ("base", macro), ("rf", macro)):
        row = compare(table, models=MODELS, methods=[method], **options).row(method)
        policy = cauc_ray.fit(table, models=MODELS, method=method, **options)
        alone = cauc_ray.evaluate(table, policy).measures
        assert (row["accuracy"], row["cost"]) == (alone.accuracy.value, pytest.approx(alone.cost))
        assert row["macro_f1"] == pytest.approx(alone.macro_f1)
        assert row["avoided"] == pytest.approx(1 - alone.stages[-1].reached / alone.n)


def test_gains_are_over_the_last_model_on_the_same_examples(compared):
    last = compared.row("single:m2")
    assert last["gain"] == 0
    assert last["gain_interval"] == [0, 0]
    for row in compared.rows:
        assert row["gain"] == pytest.approx(row["accuracy"] - last["accuracy"])
        assert row["gain_interval"][0] <= row["gain"] <= row["gain_interval"][1]
    assert compared.row("single:m0")["random_mix"] == compared.row("single:m0")["accuracy"]
    assert compared.row("random")["accuracy"] == pytest.approx(compared.row("random")["random_mix"], abs=0.08)


def test_areas_of_two_models_tell_chance_from_the_oracle(table, compared):
    comparison = compare(table, models=["m0", "m2"], methods=QUICK)
    assert comparison.row("oracle")["deferral_area"] == pytest.approx(1.0)
    assert abs(comparison.row("random")["deferral_area"]) < 0.25
    assert comparison.row("rf")["deferral_area"] > comparison.row("random")["deferral_area"]
    for row in comparison.rows:
        assert 0 <= row["aiq"] <= 1
    assert comparison.row("single:m0")["deferral_area"] is None
    assert compared.row("rf")["deferral_area"] is None  # of three models
    assert compared.row("rf")["aiq"] > 0


def test_deferral_at_random_has_no_more_area_than_the_line_between_its_ends(tmp_path):
    """The best of hundreds of points on the measured examples would lie above it."""
    gains = []
    for seed in range(8):
        write_table(tmp_path / str(seed), seed=seed, k=2, strengths=(0.6, 1.2))
        comparison = compare(tmp_path / str(seed), methods=["shuffled"])
        curve = comparison.curves.sort_by("cost").to_pydict()
        ends = [(curve["cost"][end], curve["accuracy"][end]) for end in (0, -1)]
        line = (ends[0][1] + ends[1][1]) / 2 * (ends[1][0] - ends[0][0]) / ends[1][0]
        gains.append(comparison.row("shuffled")["aiq"] - line)
    assert np.mean(gains) < 0.005


@pytest.mark.parametrize("reference", [None, "base", "single:m2"])
def test_differences_to_a_reference_are_paired_and_adjusted_for_their_number(table, compared, reference):
    comparison = compared if reference is None else compare(table, models=MODELS, methods=QUICK, reference=reference)
    reference = comparison.about["reference"]
    against, rivals = comparison.row(reference), [row for row in comparison.rows if row["method"] != reference]
    assert against["difference"] is against["difference_interval"] is against["difference_p"] is None
    for row in rivals:
        low, high = row["difference_interval"]
        assert row["difference"] == pytest.approx(row["accuracy"] - against["accuracy"])
        assert low <= row["difference"] <= high
    assert any(row["difference_p"] < 0.05 for row in rivals)
    if reference == "single:m2":  # then they are the gains before the adjustment
        assert all(row["difference_p"] >= row["gain_p"] for row in rivals)
    by_p = sorted(rivals, key=lambda row: row["difference_p"])
    for row in by_p:
        low, high = row["difference_interval"]
        assert (low > 0 or high < 0) <= (row["difference_p"] < 0.1)


def test_calibration_is_told_before_and_after_with_what_bases_threshold_promised(table):
    calibration = compare(table, models=MODELS, methods=["base"]).about["calibration"]
    policy = cauc_ray.fit(table, models=MODELS)
    measures = cauc_ray.evaluate(table, policy).measures
    assert [model["temperature"] for model in calibration["models"]] == [stage.temperature for stage in policy.stages]
    for model in calibration["models"]:
        assert model["after"]["aurc"] > 0
        assert abs(model["after"]["nll"]) <= model["before"]["nll"] + 0.05  # fitted on other examples
    assert calibration["base"]["threshold"] == policy.threshold
    for stage, measured in zip(calibration["base"]["stages"], measures.stages, strict=False):
        assert stage["risk"] == pytest.approx(1 - measured.accepted_accuracy.value)
        assert stage["promised"] == 1 - policy.threshold
    assert len(calibration["base"]["stages"]) == len(MODELS) - 1


def test_many_options_take_little_more_memory_than_their_logits_and_have_the_same_calibration():
    rng, (n, k) = np.random.default_rng(0), (8000, 500)
    labels = rng.integers(0, k, n)
    logits = {name: rng.standard_normal((n, k), dtype=np.float32) for name in ("small", "large")}
    for gain, of_model in zip((2, 3), logits.values(), strict=True):
        of_model[np.arange(n), labels] += gain

    def compared(n_rows):
        parts = [slice(0, n_rows // 4), slice(n_rows // 4, n_rows // 2), slice(n_rows // 2, n_rows)]
        calibration, validation, test = (({m: z[rows] for m, z in logits.items()}, labels[rows]) for rows in parts)
        costs = {"small": 1, "large": 4}
        return compare(*calibration, validation=validation, test=test, methods=["base"], costs=costs), *test

    compared(400)  # imports
    tracemalloc.start()
    comparison, of_test, of_label = compared(n)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * sum(of_model.nbytes for of_model in logits.values())
    for model in comparison.about["calibration"]["models"]:
        for state, temperature in (("before", 1.0), ("after", model["temperature"])):
            right = np.zeros((n // 2, k))
            right[np.arange(n // 2), of_label] = 1
            probabilities = softmax(of_test[model["model"]].astype(float) / temperature, axis=1)
            assert model[state]["nll"] == pytest.approx(log_loss(of_label, probabilities, labels=range(k)))
            assert model[state]["brier"] == pytest.approx(np.square(probabilities - right).sum(axis=1).mean())


@pytest.mark.soak("full")
def test_recalibrated_methods_undo_what_a_model_prefers_and_takes_for_another(tmp_path):
    chains = {}
    for place, split in enumerate(SPLITS):
        rng, n = np.random.default_rng([3, place]), 600
        labels = rng.integers(0, 4, n)
        seen = np.where(rng.random(n) < 0.8, np.array([0, 2, 1, 3])[labels], labels)
        logits = [rng.standard_normal((n, 4)) + 2.0 * (target[:, None] == np.arange(4)) for target in (seen, labels)]
        logits[0][:, 0] += 1.5
        chains[split] = chain_of(labels, logits, map(str, range(n)), np.array([1.0, 3.0]))
    write_chains(tmp_path, chains)
    comparison = compare(tmp_path, methods=["single", "base", "rf", "recalibrated"])
    assert comparison.row("recalibrated:m0")["accuracy"] > comparison.row("single:m0")["accuracy"] + 0.2
    for method in ("base", "rf"):
        assert comparison.row(f"recalibrated+{method}")["accuracy"] > comparison.row(method)["accuracy"]


def test_learned_methods_are_trained_on_a_split_of_their_own(tmp_path):
    seeds = {"calibration": 1, "validation": 2, "test": 3, "routers": 4}
    write_chains(tmp_path / "L", {split: synthetic_chain(seed, n=300) for split, seed in seeds.items()})
    asked = {
        "models": MODELS,
        "methods": ["rf", "margin", "routellm-sw"],
        "costs": [1, 4, 16],
        "budget": 9.0,
    }
    before = compare(tmp_path / "L", **asked)
    separate = compare(tmp_path / "L", training_split="routers", **asked)
    shared = compare(tmp_path / "L", calibration_split="routers", **asked)
    for method in asked["methods"]:
        like, unlike = (shared, before) if method == "routellm-sw" else (before, shared)
        figures = {name: separate.row(method)[name] for name in ("accuracy", "cost", "setting")}
        assert figures == {name: like.row(method)[name] for name in figures}
        assert method == "margin" or figures != {name: unlike.row(method)[name] for name in figures}
    assert separate.about["n_fitted"] == 900


def write_embedding(folder, name, split, ids, vectors):
    into = folder / f"embedding={name}" / f"split={split}"
    into.mkdir(parents=True)
    table = pa.table({"example_id": ids, "embedding": pa.array(vectors.tolist(), pa.list_(pa.float32()))})
    pq.write_table(table, into / "part-0.parquet")


LOOKING = ["benchmark-routing", "routellm-sw"]
COST = {"m0": 1.0, "m1": 4.0, "m2": 15.0}


@pytest.fixture(scope="module", params=[False, True], ids=["per-model", "per-call"])
def embedded(request, tmp_path_factory):
    """Return a table with the same embeddings by an encoder and by each model, and its chains."""
    folder = tmp_path_factory.mktemp("embedded")
    chains = write_table(folder, n=150, per_call=request.param)
    for split, data in chains.items():
        ids = [f"{split}-{example}" for example in data.example_ids]
        vectors = np.random.default_rng(len(split)).normal(size=(len(data), 6)) + data.labels[:, None]  # tell little
        for name in ("enc", *MODELS):
            write_embedding(folder, name, split, ids, vectors)
    return folder, chains


@pytest.mark.parametrize(("models", "stage"), [(MODELS, "m2"), (["m0", "m2"], "m1")])
def test_who_looks_at_a_models_embedding_pays_its_call_on_every_input(embedded, models, stage):
    table, chains = embedded
    free = compare(table, models=models, methods=["base", *LOOKING], embedding="enc")
    paid = compare(table, models=models, methods=["base", *LOOKING], embedding=stage)
    costs = {split: chain.costs.of_models([MODELS.index(stage)]).means[0] for split, chain in chains.items()}
    same = ("accuracy", "cost", "relative_cost", "setting", "note")
    assert [paid.row("base")[key] for key in same] == [free.row("base")[key] for key in same]  # it does not look
    assert paid.about["budget"] == free.about["budget"]
    for method in LOOKING:
        row, before = paid.row(method), free.row(method)
        assert f"the embedding by '{stage}', its call paid" in row["note"]
        assert "its call paid" not in before["note"]
        points = paid.curves.filter(pa.compute.equal(paid.curves["method"], method)).to_pydict()
        assert min(points["validation_cost"]) >= costs["validation"] * (1 - 1e-6)
        assert min(points["cost"]) >= costs["test"] * (1 - 1e-6)
        for costed, unpaid in ((row, before), (row["default"], before["default"])):
            assert costed["relative_cost"] == pytest.approx(costed["cost"] / chains["test"].costs.means[2], rel=1e-5)
            if stage in models:
                assert costed["calls"][stage] == 1
            elif costed["setting"] == unpaid["setting"]:
                assert costed["calls"] == unpaid["calls"]
                assert costed["cost"] == pytest.approx(unpaid["cost"] + costs["test"], rel=1e-5)
            if stage == models[-1]:
                assert costed["avoided"] == 0
            if not chains["test"].per_call_costs:
                of_calls = sum(share * COST[model] for model, share in costed["calls"].items())
                assert costed["cost"] == pytest.approx(of_calls + (0 if stage in models else COST[stage]))
        # What a budget is compared with is all of it: within it where that can be, else as cheap as can be.
        at = points["validation_cost"][int(np.argmin(np.abs(np.array(points["setting"]) - row["setting"])))]
        within = min(points["validation_cost"]) <= paid.about["budget"]
        assert row["steered"] == within
        assert at <= (paid.about["budget"] if within else min(points["validation_cost"])) * (1 + 1e-6)


BOTH_FORMS = ["post-hoc-embed", "post-hoc-embed-hidden"]


@pytest.fixture(scope="module")
def telling(tmp_path_factory):
    """Return a table whose outputs do not tell what the last model gains over a stage: its own hidden states do."""
    folder, rng, chains = tmp_path_factory.mktemp("telling"), np.random.default_rng(5), {}
    for split in SPLITS:
        labels, ids = rng.integers(0, 4, 200), [str(row) for row in range(200)]
        right = {name: rng.random(200) < share for name, share in zip(MODELS, (0.6, 0.7, 0.85), strict=True)}
        for width, name in enumerate(MODELS[:-1], 3):
            gain = right["m2"].astype(int) - right[name]
            states = rng.normal(0, 0.3, (200, width)) + gain[:, None]
            write_embedding(folder, name, split, [f"{split}-{example}" for example in ids], states)
        logits = [2.0 * np.eye(4)[(labels + ~right[name]) % 4] for name in MODELS]
        chains[split] = chain_of(labels, logits, ids, np.array([*COST.values()]))
    return write_chains(folder, chains, logit_kind="raw")


def test_post_hoc_embed_reads_the_hidden_state_of_each_model_once_that_has_answered(telling):
    comparison = compare(telling, models=MODELS, methods=BOTH_FORMS, budget=6.0)
    assert [row["method"] for row in comparison.rows] == BOTH_FORMS
    reduced, full = comparison.rows
    assert full["accuracy"] > reduced["accuracy"] + 0.1
    assert "in place of hidden states" in reduced["note"]
    assert full["note"] == "with each model's own hidden state"
    called = list(full["calls"].values())
    assert called == sorted(called, reverse=True)
    assert called[0] == 1 > called[1] > called[2] > 0
    assert full["cost"] == pytest.approx(sum(share * cost for share, cost in zip(called, COST.values(), strict=True)))


def test_hidden_states_that_are_not_there_are_named(telling):
    comparison = compare(telling, models=["m0", "m2"], methods=BOTH_FORMS)
    assert not comparison.not_run  # those of the last model are not needed
    (absent,) = compare(telling, models=["m0", "m2", "m1"], costs=[1, 2, 3], methods=BOTH_FORMS).not_run
    assert absent["method"] == "post-hoc-embed-hidden"
    assert "reads hidden states: collect those of m2 as emb" in absent["why"]
    with pytest.raises(ConfigError, match="collect those of m0, m1 as embeddings"):
        compare({name: np.eye(4) for name in MODELS}, np.arange(4), costs=[1, 2, 3], methods=BOTH_FORMS[1:])


def test_auto_answers_as_the_policy_that_fit_chooses_at_the_budget(table):
    chosen = {"models": MODELS, "budget": 3.0}
    row = compare(table, methods=["auto"], **chosen).row("auto")
    policy = cauc_ray.fit(table, method="auto", **chosen)
    measured = cauc_ray.evaluate(table, policy).measures
    assert (row["accuracy"], row["cost"]) == (measured.accuracy.value, pytest.approx(measured.cost))
    chosen = policy.search.chosen
    assert policy.method == chosen.method == "stacked"
    expected = (policy.expected.accuracy.value, policy.expected.cost)
    assert expected == pytest.approx((chosen.quality, chosen.cost))
    assert chosen.holdout_quality > 0


def test_the_label_expert_reads_embeddings_and_calls_no_model(embedded):
    table, chains = embedded
    free, paid = (compare(table, models=MODELS, methods=["embedding"], embedding=encoder) for encoder in ("enc", "m1"))
    (row,), (same) = free.rows, paid.row("embedding")
    assert row["cost"] == 0
    assert not any(row["calls"].values())
    assert same["accuracy"] == row["accuracy"] > 0.3  # the planted embeddings tell the label's number
    assert same["cost"] == pytest.approx(chains["test"].costs.of_models([1]).means[0], rel=1e-5)
    assert "embedding" in {choice["method"] for choice in choose_methods(["all"], MODELS)[1]}


def test_redrawn_splits_count_the_call_of_an_embedding_too(embedded):
    table, chains = embedded
    asked = {"models": ["m0", "m2"], "methods": ["benchmark-routing"], "budget": 99.0, "seed": 3, "redrawn": SPLITS}
    (row,), (unpaid,) = (compare(table, **asked, embedding=name).rows for name in ("m1", "enc"))
    assert row["cost"] - unpaid["cost"] == pytest.approx(np.mean([c.costs.means[1] for c in chains.values()]), rel=0.1)


def test_methods_whose_packages_are_missing_are_named_and_not_replaced(table, monkeypatch):
    absent = {"torch": None}
    monkeypatch.setattr("cauc_ray.policies.method.find_spec", lambda name: absent.get(name, name))
    assert "12 models" in str(choose_methods(["rf", "auto"], [f"m{at}" for at in range(13)])[1])
    chosen, not_run = choose_methods(["all"], MODELS)
    missing = {method["method"]: method["why"] for method in not_run}
    of_torch = {name for name, method in METHODS.items() if "torch" in method.packages}
    assert missing.keys() >= of_torch | {name for name, method in METHODS.items() if method.needs == "embedding"}
    assert missing.keys().isdisjoint(chosen)
    assert "m0, m1" in missing["post-hoc-embed-hidden"]  # whose hidden states it reads
    assert missing["embedllm"] == "needs torch: pip install 'cauc-ray[baselines]'"
    with pytest.raises(ConfigError, match=r"method 'embedllm' needs torch: pip install 'cauc-ray\[baselines\]'"):
        compare(table, models=MODELS, methods=["embedllm"])
