"""What one method of a comparison is measured by: one fit, all budgets, and its curve."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from cauc_ray.api.sources import Logits, Source, examples_of, fingerprints_of
from cauc_ray.comparison.design import CompareOptions
from cauc_ray.comparison.differences import packed
from cauc_ray.comparison.published import published
from cauc_ray.comparison.redrawing import redraw
from cauc_ray.comparison.selection import RECALIBRATED, hidden_of, method_of
from cauc_ray.comparison.tasks import MethodError, Written
from cauc_ray.data.logits import Texts
from cauc_ray.errors import BudgetError, CaucError, printable
from cauc_ray.numbers.calibrators import UNCALIBRATED, Calibrator
from cauc_ray.numbers.chain import ChainPart
from cauc_ray.numbers.intervals import paired_difference, share
from cauc_ray.numbers.logits import log_softmax, top_option
from cauc_ray.numbers.metrics import CONVENTIONS as AREA_CONVENTIONS
from cauc_ray.numbers.metrics import (
    CalibrationSums,
    apgr,
    aurc,
    brier,
    calibration_error,
    cpt,
    deferral_area,
    macro_f1,
    nll,
    oracle_deferral_area,
    upper_hull,
)
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.family import Curve, Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS, Method, Reads
from cauc_ray.policies.methods.base import BasePolicy, fit_base
from cauc_ray.policies.trace import Answers, Examples, measure_replay

# CPT is given for these shares of the gap between the two models.
GAP_SHARES = (0.5, 0.8)
# A method whose first fit takes less than a second is fitted so often; the shortest counts.
FITS, SHORT_FIT_S = 3, 1.0

CONVENTIONS: Mapping[str, str] = {
    "accuracy": "Share of the final split's examples answered right, with its 95 % Wilson interval.",
    "macro_f1": "Unweighted mean of the classes' F1, over the classes among labels, as WILDS has it.",
    "cost": "Mean per example of all calls made: a cascade pays for every stage that it ran, a router for the model "
    "that it chose; who looks at a pool model's embedding pays that model's call on every example; other encoders and "
    "routers themselves are not counted.",
    "relative_cost": "Cost over the mean cost of a call of the last model.",
    "avoided": "Share of the examples that never called the last model.",
    "gain": "Accuracy less the last model's on the same examples, with its 95 % percentile bootstrap interval over "
    "10,000 resamples of the examples.",
    "random_mix": "Accuracy of choosing among single models at random, at the same cost: linear between those on the "
    "upper hull of validation cost and accuracy.",
    "budget": "Mean cost per example on validation that a method may spend: a cost, a share of the most expensive "
    "model's (relative), or what Base costs there at its own threshold (base).",
    "status": "ok; unmet where no operating point is within the budget: figures are the cheapest point's; failed, "
    "without figures, for a reason.",
    "setting": "The method's threshold (for a router minus the price of a unit of cost; of several policies the number "
    "of a point), chosen on validation as the best by the objective within the budget, or as the cheapest where none "
    "is within it; "
    "controls that choose at random spend the budget, and Base without a given one has its own threshold, as has "
    "rf-shared, which is CAUC-RF at Base's.",
    "matched": "At the setting whose cost on validation is nearest to the budget, above or below.",
    "default": "At the method's own setting without a budget: Base's reference accuracy, a router's quality first, "
    "else the best accuracy on validation.",
    "difference": "Accuracy less that of the reference method on the same examples, all seeds pooled, with its "
    "percentile bootstrap interval over 10,000 resamples of the examples, each with its answers to all seeds; p-value "
    "of the sign test, with several seeds of 10,000 random signs of examples. Over all methods that are compared at a "
    "budget, both are adjusted as Holm has it: 95 % of such tables have no interval that misses its true difference.",
    "area": "Mean accuracy over the budgets that every method with several operating points meets with all seeds; its "
    "difference is pooled over these budgets, too. Methods with one operating point have none.",
    "recalibrated": "Methods named recalibrated read logits that are recalibrated model by model, by the terms that a "
    "stacked cascade fits to each model alone; each has the seconds of that in its setup_s.",
    "setup_s": "Seconds to fit the method and choose its threshold, the least of three fits where the first takes less "
    "than a second; models' and encoders' outputs are given, and imports and diagnostics are not counted.",
    "ece": "Sum over 15 bins of equal width of their share of rows times |accuracy - mean confidence|.",
    "ece_equal_mass": "The same over 15 bins of as many rows each.",
    "nll": "Mean negative log probability of the label, in nats.",
    "brier": "Mean over rows of the squared distance of the probabilities to the label's, summed over options.",
    "aurc": "Mean error among the k most confident rows, over all k; rows of equal confidence count alike.",
    "z": "Spiegelhalter's statistic of the confidences, standard normal where they are calibrated; with its p-value.",
    "selective_risk": "Error among the rows that a stage of Base accepted, next to 1 less the threshold, which it does "
    "not exceed where confidences are calibrated.",
} | dict(AREA_CONVENTIONS)


def set_up(fit: Callable[[Fitting], Family], fitting: Fitting) -> tuple[Family, float]:
    """Fit a method and find its operating points on validation. Returns it and the seconds that took."""
    started = time.perf_counter()
    fitted = fit(replace(fitting, shared=dict(fitting.shared)))  # what other fits leave there would save it time
    _ = fitted.points
    return fitted, time.perf_counter() - started


def set_up_fairly(fit: Callable[[Fitting], Family], fitting: Fitting) -> tuple[Family, float]:
    """Fit a method as set_up does, a short fit several times; return the seconds of the shortest."""
    fitted, seconds = set_up(fit, fitting)
    repeats = FITS - 1 if seconds < SHORT_FIT_S else 0
    return fitted, min([seconds, *(set_up(fit, fitting)[1] for _ in range(repeats))])


@dataclass(eq=False)
class Bench:
    """A chain of a set, on which methods are fitted and measured.

    Attributes:
        set_name: The set.
        logits: Its logit table or arrays.
        models: The chain.
        methods: The methods that are measured.
        embedding: What routers look at.
        options: Splits, budgets and seeds.
        labels: Of arrays.
        example_ids: Of arrays.
        cache: The splits and the trial that were used last, by any of the benches that share it.
        gives: What there is of models; without logits nothing is said of calibration, nor of classes.
    """

    set_name: str
    logits: Logits
    models: tuple[str, ...]
    methods: tuple[str, ...]
    embedding: str | None
    options: CompareOptions
    labels: Any = None
    example_ids: Any = None
    cache: dict[str, Any] = field(default_factory=dict)
    gives: Reads = "logits"

    @property
    def keys(self) -> dict[str, str]:
        """Return how rows name the chain."""
        return {"set": self.set_name, "chain": ",".join(self.models)}

    def splits(self) -> dict[str, Examples]:
        """Return the splits that methods are fitted, chosen, measured and trained on, by name, as they are stored."""
        if self.cache.get("bench") is not self:
            self.cache.clear()
            options = self.options
            source = Source(self.logits, options, self.labels, self.example_ids)
            texts = None if options.texts is None else Texts(options.texts, options.text_column)
            hidden = hidden_of(self.methods, self.models)
            purposes = ("calibration", "choosing thresholds", "a comparison", "training")
            read = examples_of(source, purposes, self.embedding, texts, hidden)
            self.cache |= {"bench": self, "splits": dict(zip(options.cuts, read, strict=True))}
        splits: dict[str, Examples] = self.cache["splits"]
        return splits

    def trial(self, seed: int) -> Trial:
        """Return the splits as a seed draws them."""
        splits = self.splits()
        if self.cache.get("seed") != seed:
            self.cache |= {"trial": Trial(splits, self.options, seed), "seed": seed}
        trial: Trial = self.cache["trial"]
        return trial

    def facts(self) -> Written:
        """Return what holds for all methods: rows, units, fingerprints, and each model's calibration."""
        options, splits = self.options, self.splits()
        chains = {split: examples.chain for split, examples in splits.items()}
        test = chains[options.split]
        content = {
            **self.keys,
            "models": list(self.models),
            "n": len(test),
            "n_rows": {split: len(chain) for split, chain in chains.items()},
            "n_fitted": sum(len(chain) for split, chain in chains.items() if split != options.split),
            "cost_unit": test.costs.unit,
            "logit_kinds": {} if self.gives == "neither" else dict(zip(test.models, test.logit_kinds, strict=True)),
            "embedding": self.embedding,
            "calibration": None,
        }
        if self.gives == "logits":
            content["calibration"] = calibration_of(splits[options.calibration_split], splits[options.split])
        if not options.pooled:
            content["fingerprints"] = fingerprints_of(*chains.values())
        return Written(content)

    def measure(self, name: str, seed: int) -> Written:
        """Fit a method with a seed and measure it at all budgets, and its curve.

        Raises:
            MethodError: The method fails.
            CaucError: The splits cannot be read.
        """
        trial = self.trial(seed)
        try:
            rows, curve = trial.measure(*method_of(name, self.models))
        except Exception as error:
            text = str(error) if isinstance(error, CaucError) else f"{type(error).__name__}: {error}"
            raise MethodError(printable(" ".join(text.split()))) from error
        keys = {**self.keys, "method": name, "seed": seed}
        columns = {key: pa.array([value] * len(curve), pa.scalar(value).type) for key, value in keys.items()}
        table = pa.table({**columns, **{column: curve[column] for column in curve.column_names}})
        if self.gives != "logits":
            index = table.column_names.index("macro_f1")
            table = table.set_column(index, "macro_f1", pa.nulls(len(table), pa.float64()))
            for figures in (of for row in rows for of in (row, row["default"], row["matched"])):
                figures["macro_f1"] = None
        return Written([{**keys, **row} for row in rows], table)


class Trial:
    """The splits of one seed, with what methods have in common on them: Base, the budgets, single models."""

    def __init__(self, splits: Mapping[str, Examples], options: CompareOptions, seed: int) -> None:
        self.seed = seed
        self._options = options
        # Budgets are the same for all seeds.
        self._model_costs = splits[options.validation_split].chain.costs.means
        calibration, validation, self._test, *training = redraw(splits, options.pooled, seed).values()
        self._fitting = Fitting(
            calibration,
            validation,
            seed,
            training=training[0] if training else None,
            objective=options.objective,
        )
        for of_fit in (self._fitting, self._fitting.for_learning()):
            of_fit.diagnose()
        self._correct = self._test.correct()
        self.budgets = list(self._budgets())

    @cached_property
    def _base(self) -> tuple[Family, float]:
        return set_up_fairly(METHODS["base"].family, self._fitting)

    def _budgets(self) -> Iterator[dict[str, Any]]:
        """Yield each budget: its kind, its number, and its cost."""
        options, most_expensive = self._options, float(self._model_costs.max())
        evenly = options.points or 0
        budgets = [*options.all_budgets, *np.linspace(self._model_costs.min(), most_expensive, evenly).tolist()]
        for part in options.relative_budgets:
            yield {"budget_kind": "relative", "budget": part, "budget_cost": part * most_expensive}
        for budget in budgets:
            yield {"budget_kind": "cost", "budget": budget, "budget_cost": budget}
        if not (budgets or options.relative_budgets):
            base = self._base[0]
            cost = float(base.curve(self._fitting.validation, np.array([base.default])).cost[0])
            yield {"budget_kind": "base", "budget": None, "budget_cost": cost}

    def measure(self, method: Method, fit: Callable[[Fitting], Family]) -> tuple[list[dict[str, Any]], pa.Table]:
        """Fit a method by its function; return its figures at each budget, and its curve."""
        plain_name = method.name.removeprefix(f"{RECALIBRATED}+")
        if method.name == "base":
            fitted, setup_s = self._base
        else:
            checkpoint = (self._options.checkpoints or {}).get(plain_name)
            fitted, setup_s = set_up_fairly(fit, replace(self._fitting, checkpoint=checkpoint))
        points, curve_points = self._points(fitted), fitted.points
        if fitted.is_numbered:  # of all its policies, what validation would choose of
            curve_points = curve_points.pareto(len(curve_points.cost))
        curve = fitted.curve(self._test, curve_points.settings)
        seen = self._test if fitted.sees_labels else self._test.without_labels()
        answers_at = cache(lambda setting: fitted.answers(seen, setting))
        common = {
            "paradigm": method.paradigm,
            "n": len(self._test),
            "cost_unit": self._test.chain.costs.unit,
            "n_settings": 1 if fitted.sees_labels else len(points.settings),
            "default": {"setting": fitted.default, **self._figures(answers_at(fitted.default))},
            "setup_s": setup_s,
            "paper_setup_ratio": _paper_ratio(method.name),
            "note": fitted.note,
            **self._areas(curve, curve_points),
        }
        rows = []
        for budget in self.budgets:
            setting, is_steered, why = self._choice(fitted, points, budget)
            nearest = setting
            if is_steered and not (budget["budget_kind"] == "base" and setting == fitted.default):
                off = np.abs(points.cost - budget["budget_cost"])
                nearest = float(points.settings[np.lexsort((-points.quality, off))[0]])
            answers, matched = answers_at(setting), answers_at(nearest)
            rows.append(
                budget
                | {"status": "ok" if why is None else "unmet", "reason": why}
                | self._figures(answers)
                | self._gain(answers)
                | {"setting": setting, "steered": is_steered}
                | {"matched": {"setting": nearest, **self._figures(matched)}, **common}
                | {"right": packed(answers.predictions == self._test.chain.labels)}
            )
        return rows, _curve_table(curve, curve_points)

    def _points(self, fitted: Family) -> OperatingPoints:
        """Return the points on validation that a budget is spent among, by the objective."""
        if self._options.objective == "accuracy":
            return fitted.points
        curve = (fitted.chooser or fitted).curve(self._fitting.validation, fitted.points.settings)
        return OperatingPoints(curve.settings, curve.cost, curve.macro_f1, fitted.points.unit)

    def _choice(
        self, fitted: Family, points: OperatingPoints, budget: Mapping[str, Any]
    ) -> tuple[float, bool, str | None]:
        """Return a method's setting for a budget, whether the budget decides it, and why the budget is not met."""
        # Base's own threshold is what gives this budget its size.
        if budget["budget_kind"] == "base" and fitted.has_reference:
            return fitted.default, True, None
        try:
            if not fitted.sees_labels:
                points.index_of_best(budget["budget_cost"])  # raises where one setting costs more, too
            setting = fitted.setting(budget["budget_cost"], points)
        except BudgetError as error:
            cheapest = float(points.settings[points.cost.argmin()])
            return (fitted.default if len(points.settings) == 1 else cheapest), False, str(error)
        return (fitted.default, False, None) if setting is None else (setting, True, None)

    def _areas(self, curve: Curve, points: OperatingPoints) -> dict[str, float | None]:
        """Return what sums up a curve of two models; None for other chains.   points: on validation, as the curve's."""
        names = ["deferral_area", "apgr", *(f"cpt{round(100 * part)}" for part in GAP_SHARES)]
        if self._correct.shape[1] != 2 or len(curve.settings) < 2:
            return dict.fromkeys(names)
        hull, ends = upper_hull(points.cost, points.quality), self._correct.mean(axis=0)
        oracle = oracle_deferral_area(self._correct[:, 0], self._correct[:, -1])
        pair = (curve.last_share, curve.accuracy, float(ends[0]), float(ends[1]))
        mixed = (curve.last_share[hull], curve.accuracy[hull], *pair[2:])
        values = [deferral_area(*pair, oracle), apgr(*pair), *(cpt(*mixed, part) for part in GAP_SHARES)]
        return dict(zip(names, values, strict=True))

    def _figures(self, answers: Answers) -> dict[str, Any]:
        chain = self._test.chain
        right = answers.predictions == chain.labels
        accuracy = share(int(right.sum()), len(right))
        cost, of_last = float(answers.costs(chain).mean()), float(chain.costs.means[-1])
        return {
            "accuracy": accuracy.value,
            "accuracy_interval": [accuracy.low, accuracy.high],
            "macro_f1": macro_f1(answers.predictions, chain.labels),
            "cost": cost,
            "relative_cost": cost / of_last if of_last > 0 else None,
            "avoided": 1.0 - float(answers.calls[:, -1].mean()),
            "calls": dict(zip(chain.models, answers.calls.mean(axis=0).tolist(), strict=True)),
        }

    def _gain(self, answers: Answers) -> dict[str, Any]:
        """Return the difference to the last model, and the accuracy of single models mixed at random at the cost."""
        right = answers.predictions == self._test.chain.labels
        gain = paired_difference(right, self._correct[:, -1], seed=self.seed)
        return {
            "gain": gain.value,
            "gain_interval": [gain.low, gain.high],
            "gain_p": gain.p_value,
            "random_mix": self._random_mix(float(answers.costs(self._test.chain).mean())),
        }

    def _random_mix(self, cost: float) -> float:
        """Return the accuracy of a random mix of single models at a cost; beyond the most expensive one, that one's."""
        validation = self._fitting.validation
        mixed = upper_hull(validation.chain.costs.means, validation.correct().mean(axis=0), falling=True)
        costs = self._test.chain.costs.means[mixed]
        return float(np.interp(cost, costs, self._correct.mean(axis=0)[mixed]))


def _paper_ratio(method: str) -> float | None:
    """Return the paper's setup time over that of Base; RouteLLM's, of which variant it does not say, for each."""
    seconds_of = published()["setup_s"]
    seconds = seconds_of.get(method.split("-")[0] if method.startswith("routellm") else method)
    return None if seconds is None else seconds / seconds_of["base"]


def _curve_table(curve: Curve, points: OperatingPoints) -> pa.Table:
    return pa.table(
        {
            "setting": curve.settings,
            "validation_accuracy": points.quality,
            "validation_cost": points.cost,
            "accuracy": curve.accuracy,
            "macro_f1": curve.macro_f1,
            "cost": curve.cost,
            "avoided": 1.0 - curve.last_share,
        }
    )


def calibration_of(calibration: Examples, test: Examples) -> dict[str, Any]:
    """Measure every model's confidences on labelled examples, before and after its temperature, and Base's stages.

    Returns models: for each its temperature and figures before and after; and base: its threshold, and for each stage
    the rows that reached it, the share accepted, their error with its interval, and what was promised.
    """
    policy = fit_base(calibration.chain)
    models = []
    for stage, logits in zip(policy.stages, test.chain.logits, strict=True):
        before, after = (_figures(by, logits, test.chain.part) for by in (UNCALIBRATED, stage.calibrator))
        models.append({"model": stage.name, "temperature": stage.temperature, "before": before, "after": after})
    return {"models": models, "base": {"threshold": policy.threshold, "stages": _stages(policy, test)}}


def _figures(calibrator: Calibrator, logits: Floats, part: ChainPart) -> dict[str, float | None]:
    """Return the figures of a model's confidences, from blocks of rows: log probabilities of all would be large."""

    def of_block(rows: slice) -> tuple[Ints, Floats, float, float]:
        scores, labels = calibrator.scores(logits[rows]), part.labels[rows]
        log_probabilities, n = log_softmax(scores), len(labels)
        return *top_option(scores), n * nll(log_probabilities, labels), n * brier(np.exp(log_probabilities), labels)

    predicted, confident, nlls, briers = zip(*in_threads(of_block, list(part.blocks())), strict=True)
    confidences, correct = np.concatenate(confident), np.concatenate(predicted) == part.labels
    z = CalibrationSums.of(confidences, correct).test
    return {
        "ece": calibration_error(confidences, correct),
        "ece_equal_mass": calibration_error(confidences, correct, "equal-mass"),
        "nll": sum(nlls) / len(part),
        "brier": sum(briers) / len(part),
        "aurc": aurc(confidences, correct),
        "z": None if z is None else z.z,
        "z_p": None if z is None else z.p_value,
    }


def _stages(policy: BasePolicy, test: Examples) -> list[dict[str, Any]]:
    """Return what Base's stages but the last accepted, and how often that was wrong."""
    _, measures = measure_replay(policy, test.chain)
    return [
        {
            "stage": stage.name,
            "reached": stage.reached,
            "coverage": stage.coverage.value if stage.coverage else None,
            "risk": 1 - right.value if (right := stage.accepted_accuracy) else None,
            "risk_interval": [1 - right.high, 1 - right.low] if right else None,
            "promised": 1 - policy.threshold,
        }
        for stage in measures.stages[:-1]
    ]
