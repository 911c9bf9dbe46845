"""Claims from few labels are counted as a slow loop counts them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from synthetic import chain, write_chains

import cauc_ray
from jobs.paper import claims

N_DRAWS = 2
SET = next(iter(claims.SETS))


def test_a_row_counts_draws_as_a_slow_loop_does_and_the_page_shows_it(tmp_path):
    models = claims.SETS[SET]
    sizes = {"calibration": 900, "validation": 900, "test": 1800}
    by_split = {
        split: replace(chain(3, n, shift=place, strengths=(1.0, 1.3, 1.6, 2.4)), models=models)
        for place, (split, n) in enumerate(sizes.items())
    }
    write_chains(tmp_path / "sets" / SET, by_split, logit_kind="raw")
    (tmp_path / "sets" / "other").mkdir()
    made, chains = claims.claims(tmp_path / "sets", N_DRAWS), by_split.values()
    rows = {row["name"]: row for row in made["rows"]}
    assert set(rows) == {f"{SET}, {of}{search}" for of in claims.METHODS for search in ("", " after a search")}
    logits = {m: np.concatenate([of.logits[at] for of in chains]) for at, m in enumerate(models)}
    labels = np.concatenate([of.labels for of in chains])
    costs = dict(zip(models, next(iter(chains)).costs.means.tolist(), strict=True))
    budget = 0.6 * min(costs.values()) + 0.4 * max(costs.values())
    means, covered = [], []
    for seed in range(N_DRAWS):
        order = np.random.default_rng(seed).permutation(len(labels))
        few, chosen, new = order[:500], order[500:1000], order[1000:3000]
        parts = [({m: z[rows_] for m, z in logits.items()}, labels[rows_]) for rows_ in (few, chosen, new)]
        policy = cauc_ray.fit(*parts[0], validation=parts[1], costs=costs, method="rf", budget=budget)
        means.append(cauc_ray.evaluate(logits, policy, labels=labels).measures.cost)
        measured = cauc_ray.evaluate(parts[2][0], policy, labels=parts[2][1])
        low, high = measured.as_json()["expected_interval"]
        covered.append(low <= measured.measures.accuracy.value <= high)
    assert rows[f"{SET}, rf"]["covered"] == pytest.approx(np.mean(covered), rel=1e-5)
    assert rows[f"{SET}, rf"]["cost"] == pytest.approx(np.mean(means) / budget, rel=1e-5)
    assert rows[f"{SET}, rf"]["exceeded"] == pytest.approx(np.mean(np.array(means) > budget), rel=1e-5)
    assert rows[f"{SET}, rf"]["cost_at_confidence"] < rows[f"{SET}, rf"]["cost"]
    (grid,) = claims.grids(json.loads(json.dumps(made)))
    assert [row[0] for row in grid.rows] == list(rows)
