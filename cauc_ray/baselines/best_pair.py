"""The best cascade of two models at each budget: the "envelope of pairs" (Bouchard, arXiv 2605.06350).

It finds that longer fixed chains are below this envelope, and that searched ones are hardly above it on new rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from cauc_ray.numbers.calibration import fit_pair
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.rf import RFPolicy

_FIRST = dict.fromkeys(("alpha", "beta", "pair_diagnostics"))


def fit(fitting: Fitting) -> Sequence[RFPolicy]:
    """Fit CAUC-RF to each model alone and to each pair of models, the cheaper one first."""
    chain = fitting.calibration.chain
    order = np.argsort(chain.costs.means, kind="stable").tolist()
    alone = {model: fitting.policy(RFPolicy, [model], of_stages=[_FIRST]) for model in order}
    scores = {model: policy.stages[0].scores(chain.logits[model]) for model, policy in alone.items()}
    pairs = list[RFPolicy]()
    for cheap, expensive in combinations(order, 2):
        pair = fit_pair(scores[cheap], scores[expensive], chain.labels)
        alpha, beta = pair.temperatures
        stage = {"alpha": alpha, "beta": beta, "pair_diagnostics": pair.diagnostics("alpha_", "beta_")}
        pairs.append(fitting.policy(RFPolicy, [cheap, expensive], of_stages=[_FIRST, stage]))
    return [*alone.values(), *pairs]


METHOD = Method("best-pair", "cascade", fit, note="pairs are CAUC-RF; single models are among them")
