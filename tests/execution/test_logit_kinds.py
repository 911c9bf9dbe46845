"""Live models' answers are read as a table's are: masks, declared kinds, probabilities that nobody declared."""

import json

import numpy as np
import pytest
from masked import MODELS, splits
from runs import (
    answers_of,
    by_example,
    masked_probabilities,
    numbered_input,
    pool_of,
    python_model,
    run,
    saved_model,
    split_input,
    two_model_policy,
    write_pool,
)
from synthetic import write_chains

import cauc_ray
from cauc_ray.errors import CaucWarning, PolicyError


def pool(folder, *more):
    """Write a pool of saved stages m0 and m1 over the table in folder/LOGITS; more: settings of each one's model."""
    settings = zip(MODELS, more or ({}, {}), strict=True)
    return pool_of(folder, {name: saved_model(name, **model) for name, model in settings})


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_a_live_run_with_masks_and_declared_probabilities_is_the_replay(tmp_path):
    chains, turns = splits(), iter(range(100))

    def written(logits):
        masked = np.where(np.isneginf(logits), np.finfo(np.float32).min, logits)
        return masked if next(turns) % 2 else masked_probabilities(logits)

    table = write_chains(tmp_path / "LOGITS", chains, written)
    kinds = {"m0": "probabilities"}
    with pytest.warns(CaucWarning, match="'m0': probabilities are 0"):
        policy = cauc_ray.fit(table, models=MODELS, method="rf", budget=3.0, logit_kind=kinds)
    assert [stage.floor is None for stage in policy.stages] == [False, True]
    run(tmp_path, pool(tmp_path, {"logit_kind": "probabilities"}, {}), policy, split_input(tmp_path, chains["test"]))
    live = answers_of(tmp_path / "out")
    assert live == by_example(cauc_ray.evaluate(table, policy).to_arrow())
    assert len({row["stage"] for row in live.values()}) == 2


def python_stage(name, cost=None, **model):
    return {"name": name, "model": {**python_model("by_x"), **model}, "cost": cost}


REFUSED = {
    "another kind": ([python_stage("small"), python_stage("large", logit_kind="surrogate")], "surrogate.*raw"),
    "another unit": ([python_stage("small", cost={"usd": 1.0}), python_stage("large")], "USD.*GFLOPs"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_policy_was_not_fitted_for_is_refused_before_anything_starts(tmp_path, case):
    stages, words = REFUSED[case]
    path, policy = write_pool(tmp_path, stages), two_model_policy()
    for start in (
        lambda: cauc_ray.run(path, policy, numbered_input(tmp_path), tmp_path / "out"),
        lambda: cauc_ray.serve(path, policy, port=0),
    ):
        with pytest.raises(PolicyError, match=rf"'(small|large)'.*{words}"):
            start()
    assert not (tmp_path / "out").exists()


def test_calls_that_tell_their_own_costs_must_do_so_in_the_policys_unit(tmp_path):
    """Costs of saved calls are in their table's unit, which counts where the policy counts calls."""
    data = splits(60)
    table = write_chains(tmp_path / "LOGITS", data, lambda logits: logits, logit_kind="raw")
    content = json.loads((table / "pool.json").read_text())
    policy = cauc_ray.fit(table, models=MODELS, threshold=0.7)
    (table / "pool.json").write_text(json.dumps({**content, "cost_unit": "USD"}))
    per_call = policy.model_copy(update={"costs": "per-call"})
    with pytest.raises(PolicyError, match="USD"):
        cauc_ray.run(pool(tmp_path), per_call, split_input(tmp_path, data["test"]), tmp_path / "out")
