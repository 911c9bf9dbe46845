"""Policies with offsets or isotonic maps, and safe ones: fitted by shards, and run live."""

import json
import re

import pytest
import yaml
from runs import MODELS, by_example, read_all, run, saved_pool, split_input, write_pool
from synthetic import SPLITS, write_table

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.execution.sharded import Sharding, sharded
from cauc_ray.front.sharding import calibrate
from cauc_ray.models.resources import Resources
from cauc_ray.policies.fitting import fit_policy
from cauc_ray.policies.threshold import ThresholdRule

FITS = {
    "base-offsets": (MODELS, {"method": "base", "calibrator": "offsets"}),
    "rf-offsets": (MODELS, {"method": "rf", "calibrator": "offsets", "budget": 8.0}),
    "isotonic": (MODELS[:2], {"method": "base", "calibrator": "isotonic"}),
}
CASES = [
    pytest.param(*fit, id=name, marks=[pytest.mark.slow] if name == "base-offsets" else [])
    for name, fit in FITS.items()
]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logits")
    write_table(folder, n=600)
    return folder


def assert_same(one, other, place=""):
    """Assert that two policies' contents are the same but for 1e-9 of each number."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), place
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{place}[{number}]")
    else:
        assert one == (pytest.approx(other, rel=1e-9, abs=1e-12) if isinstance(one, float) else other), place


@pytest.mark.slow
@pytest.mark.parametrize(("models", "options"), CASES)
def test_a_fit_on_shards_is_that_of_one_process(table, ray_session, models, options):
    expected = cauc_ray.fit(table, models=models, **options)
    heads = [LogitTable(table).read_chain_heads(models, split) for split in SPLITS[:2]]
    rule = ThresholdRule(budget=options.get("budget"))
    with sharded(heads, Sharding(5, Resources(num_cpus=0.25), deadline_s=120)) as (_, chains):
        found = fit_policy(options["method"], *chains, rule, SPLITS[:2], calibrator=options["calibrator"])
    assert_same(json.loads(found.to_json()), json.loads(expected.to_json()))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["base", "rf"])
@pytest.mark.parametrize(
    ("costs", "says"),
    [
        (None, "not fused: no gain is established|threshold chosen anew|nothing had to be changed"),
        ((10.0, 11.0, 12.0), f"^{MODELS[2]} alone, "),
    ],
    ids=["chain", "alone"],
)
def test_a_safe_fit_on_shards_is_that_of_one_process(table, ray_session, method, costs, says):
    options = {"models": MODELS, "method": method, "costs": costs, "safe": True}
    expected = cauc_ray.fit(table, **options)
    assert re.search(says, expected.safe.says)
    found = calibrate(table, **options, shards=3, deadline_s=120)
    assert_same(json.loads(found.policy.to_json()), json.loads(expected.to_json()))


@pytest.mark.slow
def test_shards_refuse_what_one_process_refuses_in_the_same_words(ray_session, tmp_path):
    write_table(tmp_path, n=60, ragged=True)
    told = []
    for fit, sharding in ((cauc_ray.fit, {}), (calibrate, {"shards": 2, "deadline_s": 120})):
        with pytest.raises(DataError) as error:
            fit(tmp_path, models=MODELS, calibrator="offsets", **sharding)
        told.append(str(error.value))
    assert told[0] == told[1]
    with pytest.raises(ConfigError, match="isotonic is for method base with one or two models"):
        calibrate(tmp_path, models=MODELS, calibrator="isotonic", shards=2)
    with pytest.raises(ConfigError, match="leave --safe or --certify out"):
        calibrate(tmp_path, models=MODELS, safe=True, certify="risk<=0.05@0.95", shards=2)


@pytest.mark.slow
@pytest.mark.parametrize(("models", "options"), CASES)
def test_a_live_run_is_the_replay_row_for_row(ray_session, tmp_path, models, options):
    chain = write_table(tmp_path / "LOGITS", n=400)["test"]
    policy = cauc_ray.fit(tmp_path / "LOGITS", models=models, **options)
    stages = yaml.safe_load(saved_pool(tmp_path).read_text())["stages"]
    pool = write_pool(tmp_path, stages[: len(models)])
    run(tmp_path, pool, policy, split_input(tmp_path, chain))
    live = by_example(read_all(tmp_path / "out" / "predictions"))
    assert live == by_example(cauc_ray.evaluate(tmp_path / "LOGITS", policy).to_arrow())
    assert len({row["stage"] for row in live.values()}) > 1
