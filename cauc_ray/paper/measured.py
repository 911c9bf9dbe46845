"""What each task of a run measures, from the root of all sets and an entry of the config."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from cauc_ray.api.offline import evaluate, fit
from cauc_ray.comparison.comparing import Comparison, compare
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import GuardWarning
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.metrics import Reliability, reliability_bins
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.sweep import Objective
from cauc_ray.paper.config import Chain, ComparedChain, GrowingChain, ReliabilityFigure
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.evidence import Measures
from cauc_ray.policies.fitting import fit_base
from cauc_ray.policies.policy import Policy

# Where a confidence is called high (paper, figure on calibration).
HIGH = 0.85


@contextmanager
def _guards_aside() -> Iterator[None]:
    """Keep guards quiet: tables show the method on every chain, also where a policy of it would disappoint."""
    with warnings.catch_warnings(action="ignore", category=GuardWarning):
        yield


def compare_chain(root: AnyPath, chain: ComparedChain, methods: Sequence[str], seed: int) -> Comparison:
    """Compare methods on a chain."""
    return compare(
        str(root / chain.set),
        models=chain.models,
        methods=methods,
        embedding=chain.embedding,
        texts=None if chain.texts is None else str(root / chain.texts),
        text_column=chain.text_column,
        checkpoints=chain.checkpoints,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class PairMeasures:
    """Base at its own threshold on two models, on the test split, with and without fusing the first; and RF.

    complementarity_rate: on the calibration split.   rf: at the cost that Base has on validation; None where it was
    not asked for.
    """

    models: tuple[str, ...]
    complementarity_rate: float
    direct: Measures
    fused: Measures
    rf: Measures | None
    cost_unit: str


@_guards_aside()
def measure_pair(root: AnyPath, pair: Chain) -> PairMeasures:
    """Measure what fusing does for a pair, and CAUC-RF at the same validation cost."""
    table = root / pair.set
    base = _fit_base(table, pair.models)
    assert base.expected is not None
    rf = fit(str(table), models=pair.models, method="rf", budget=base.expected.cost, objective=pair.objective)
    return _pair(table, base, _measures(table, rf))


@_guards_aside()
def measure_gains(root: AnyPath, set_name: str) -> list[PairMeasures]:
    """Measure what fusing does for every pair of a set whose second model is the dearer and the more accurate.

    Both by the calibration split: whether a cascade of the two is worth while is known before the test.
    """
    table = LogitTable(root / set_name)
    alone = {}
    for model in table.models:
        chain = table.read_chain([model], "calibration")
        correct = chain.logits[0].argmax(axis=1) == chain.labels
        alone[model] = (float(chain.costs.means[0]), float(correct.mean()))
    ordered = sorted(alone, key=lambda model: alone[model])
    pairs = [(a, b) for a, b in combinations(ordered, 2) if alone[a][0] < alone[b][0] and alone[a][1] < alone[b][1]]
    return [_pair(root / set_name, _fit_base(root / set_name, pair), None) for pair in pairs]


def _fit_base(table: AnyPath, models: Sequence[str]) -> BasePolicy:
    policy = fit(str(table), models=models, method="base")
    assert isinstance(policy, BasePolicy)
    return policy


def _pair(table: AnyPath, base: BasePolicy, rf: Measures | None) -> PairMeasures:
    first, last = base.stages
    direct, fused = (
        _measures(table, base.model_copy(update={"stages": (first.model_copy(update={"fused": fused}), last)}))
        for fused in (False, True)
    )
    assert first.complementarity_rate is not None
    return PairMeasures(base.models, first.complementarity_rate, direct, fused, rf, base.cost_unit)


def _measures(table: AnyPath, policy: Policy) -> Measures:
    return evaluate(str(table), policy, split="test").measures


@dataclass(frozen=True, slots=True)
class GrownChain:
    """A chain of a length, on the test split: Base at its own threshold, RF at that and at its best for Base's cost.

    added: the model that the chain before did not have.
    """

    added: str
    models: tuple[str, ...]
    base: Measures
    rf_shared: Measures
    rf_best: Measures
    cost_unit: str


@_guards_aside()
def grow(root: AnyPath, chain: GrowingChain) -> list[GrownChain]:
    """Measure a chain from its last model alone to all of its models."""
    return [_grown(root / chain.set, models, chain.objective) for models in chain.chains]


def _grown(table: AnyPath, models: tuple[str, ...], objective: Objective) -> GrownChain:
    base = _fit_base(table, models)
    # The paper's two policies share a routing schedule: one threshold for both.
    shared = fit(str(table), models=models, method="rf", threshold=base.threshold)
    assert base.expected is not None
    best = fit(str(table), models=models, method="rf", budget=base.expected.cost, objective=objective)
    of_base, of_shared, of_best = (_measures(table, policy) for policy in (base, shared, best))
    added = models[-2] if len(models) > 1 else models[-1]
    return GrownChain(added, models, of_base, of_shared, of_best, base.cost_unit)


@dataclass(frozen=True, slots=True)
class ModelReliability:
    """A model's confidence on the test split, raw and at the temperature fitted on calibration.

    n_high_before, n_high_after: examples of a confidence in [0.85, 1].   cost: of a call, in cost_unit.
    """

    model: str
    temperature: float
    accuracy: float
    before: Reliability
    after: Reliability
    n_high_before: int
    n_high_after: int
    n: int
    cost: float
    cost_unit: str


def measure_reliability(root: AnyPath, figure: ReliabilityFigure) -> dict[str, ModelReliability]:
    """Measure every model of a figure, by its name."""
    table = LogitTable(root / figure.set)
    return {model: _reliability(table, model) for model in figure.wanted}


def _reliability(table: LogitTable, model: str) -> ModelReliability:
    stage = fit_base(table.read_chain([model], "calibration")).stages[0]
    test = table.read_chain([model], "test")
    test.require_labels("a figure of calibration")
    predictions, raw = top_option(test.logits[0].astype(np.float64))
    _, calibrated = top_option(stage.scores(test.logits[0]))
    correct = predictions == test.labels
    return ModelReliability(
        model=model,
        temperature=stage.temperature,
        accuracy=float(correct.mean()),
        before=reliability_bins(raw, correct),
        after=reliability_bins(calibrated, correct),
        n_high_before=int((raw >= HIGH).sum()),
        n_high_after=int((calibrated >= HIGH).sum()),
        n=len(test),
        cost=float(test.costs.means[0]),
        cost_unit=test.costs.unit,
    )
