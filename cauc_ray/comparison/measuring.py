"""What one method of a comparison is measured by, and the paper's own numbers to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from json import loads
from typing import Any

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError, unknown_name
from cauc_ray.numbers.calibrators import UNCALIBRATED
from cauc_ray.numbers.intervals import holm, paired_difference, share
from cauc_ray.numbers.logits import log_softmax, top_option
from cauc_ray.numbers.metrics import CONVENTIONS as AREA_CONVENTIONS
from cauc_ray.numbers.metrics import (
    CalibrationSums,
    aiq,
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
from cauc_ray.numbers.sweep import Objective, OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies import by_method
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.cauc import BasePolicy
from cauc_ray.policies.family import Curve, Family
from cauc_ray.policies.fitting import Fitting, fit_base
from cauc_ray.policies.method import METHODS, Method
from cauc_ray.policies.recalibrated import fit_recalibrated
from cauc_ray.policies.search import MOST_MODELS
from cauc_ray.policies.trace import Answers, Examples, measure_replay

# Single models and other methods on recalibrated logits: recalibrated:<model>, recalibrated+<method>.
RECALIBRATED = "recalibrated"
# CPT is given for these shares of the gap between the two models.
GAP_SHARES = (0.5, 0.8)
# A method whose first fit takes less than a second is fitted so often; the shortest counts.
FITS, SHORT_FIT_S = 3, 1.0

# What the reference has in place of a difference.
NO_DIFFERENCE: Mapping[str, None] = dict.fromkeys(("difference", "difference_interval", "difference_p"))

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
    "setting": "The method's threshold (for a router minus the price of a unit of cost; of several policies the number "
    "of a point), chosen on validation as the best by the objective within the budget, or as the cheapest where none "
    "is within it; "
    "controls that choose at random spend the budget, and Base without a given one has its own threshold, as has "
    "rf-shared, which is CAUC-RF at Base's.",
    "matched": "At the setting whose cost on validation is nearest to the budget, above or below.",
    "default": "At the method's own setting without a budget: Base's reference accuracy, a router's quality first, "
    "else the best accuracy on validation.",
    "difference": "Accuracy less that of the reference method on the same examples, with its percentile bootstrap "
    "interval over 10,000 resamples of the examples; p-value of the sign test. Over all methods that are compared, "
    "both are adjusted as Holm has it: 95 % of such tables have no interval that misses its true difference.",
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


def recalibrates(method: Method) -> bool:
    """Return whether a method is also measured on recalibrated logits: not controls, nor what recalibrates itself."""
    itself = method.name in ("rf-shared", "stacked", "auto")
    return method.paradigm != "control" and not itself


def require_methods(names: Sequence[str]) -> None:
    """Raise ConfigError for a name that is not of a method, of one on recalibrated logits, or of a group of them."""
    known = ("all", SINGLE, RECALIBRATED, *METHODS)
    forms = [f"{RECALIBRATED}+{method.name}" for method in METHODS.values() if recalibrates(method)]
    for name in names:
        if name not in (*known, *forms):
            raise ConfigError(unknown_name("method", name, known))


def choose_methods(
    names: Sequence[str],
    models: Sequence[str],
    trainable: Collection[str] = (),
    embedding: str | None = None,
    hidden: Collection[str] = (),
) -> tuple[list[str], list[dict[str, str]]]:
    """Return the methods to run in the order of tables, and those of "all" that cannot run here, with the reason.

    trainable: those for which there are texts and a checkpoint.   embedding: what routers look at.
    hidden: models whose hidden states are known.
    Raises ConfigError for an unknown name, and where a method that was named cannot run.
    """
    require_methods(names)
    groups = [group for group in (SINGLE, RECALIBRATED) if {"all", group} & set(names)]
    chosen, cannot = [f"{group}:{model}" for model in models for group in groups], list[dict[str, str]]()
    for name, method in METHODS.items():
        forms = [name] if {"all", name} & set(names) else []
        recalibrated = f"{RECALIBRATED}+{name}"
        if recalibrates(method) and (recalibrated in names or (forms and RECALIBRATED in groups)):
            forms.append(recalibrated)
        why = None
        if method.needs_texts and name not in trainable:
            why = "trains a model on the queries' texts: give texts, and its checkpoint"
        elif method.needs_embedding and embedding is None:
            why = "reads the queries' embeddings: give their encoder"
        elif method.needs_hidden and (unknown := [model for model in models[:-1] if model not in hidden]):
            why = f"reads hidden states: collect those of {', '.join(unknown)} as embeddings"
        elif method.obstacle:
            why = method.obstacle
        elif name == "auto" and len(models) > MOST_MODELS:
            why = f"searches the sub-chains of up to {MOST_MODELS} models"
        if why is None:
            chosen += forms
        elif set(forms) & set(names):
            raise ConfigError(f"method {name!r} {why}")
        elif forms:
            cannot.append({"method": name, "why": why})
    return chosen, cannot


def method_of(name: str, models: Sequence[str]) -> tuple[Method, Callable[[Fitting], Family]]:
    """Return a method by its name, those on recalibrated logits among them, and what fits it."""
    plain = name.replace(f"{RECALIBRATED}:", f"{SINGLE}:").removeprefix(f"{RECALIBRATED}+")
    method = by_method.method_of(plain, models)
    fit = (lambda fitting: method.family(fitting.for_learning())) if method.learns else method.family
    if plain == name:
        return method, fit
    return replace(method, name=name, paradigm="recalibrated"), partial(fit_recalibrated, fit)


def hidden_of(chosen: Sequence[str], models: Sequence[str]) -> Sequence[str]:
    """Return the models of a chain whose hidden states some of the chosen methods read."""
    return models[:-1] if any(method_of(name, models)[0].needs_hidden for name in chosen) else ()


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


def published() -> dict[str, Any]:
    """Return the paper's own numbers, by the name of their table."""
    content: dict[str, Any] = loads(files("cauc_ray.comparison").joinpath("published.json").read_text(encoding="utf-8"))
    return content


class Bench:
    """What all methods of a comparison have in common: the splits, the budget, Base's setup time, the reference."""

    def __init__(
        self,
        fitting: Fitting,
        test: Examples,
        budget: float | None,
        checkpoints: Mapping[str, str],
        objective: Objective = "accuracy",
    ) -> None:
        self._fitting = fitting
        self._checkpoints = checkpoints
        self._test = test
        self._objective = objective
        self._correct = test.correct()
        self._right: dict[str, Bools] = {}
        for of_fit in (fitting, fitting.for_learning()):
            of_fit.diagnose()
        base, self._base_s = set_up_fairly(METHODS["base"].family, fitting)
        self._base = base
        own = base.curve(fitting.validation, np.array([base.default]))
        self._given = budget is not None
        self.budget = float(own.cost[0]) if budget is None else budget
        base.points.index_of_best(self.budget)  # raises where no cascade is so cheap
        self._published_s = published()["setup_s"]

    def measure(
        self, method: Method, fit: Callable[[Fitting], Family]
    ) -> tuple[dict[str, Any], Curve, OperatingPoints]:
        """Fit a method by its function, and measure it at the budget, at its own setting, and at every other."""
        if method.name == "base":
            fitted, setup_s = self._base, self._base_s
        else:
            checkpoint = self._checkpoints.get(method.name.removeprefix(f"{RECALIBRATED}+"))
            fitted, setup_s = set_up_fairly(fit, replace(self._fitting, checkpoint=checkpoint))
        points = self._points(fitted)
        # Base's own threshold is what gives the budget its size, where nobody gave one.
        own_budget = method.name in ("base", "rf-shared") and not self._given
        setting, steered = (fitted.default, True) if own_budget else self._at_budget(fitted, points)
        answers = fitted.answers(self._seen(method), setting)
        own = fitted.answers(self._seen(method), fitted.default)
        nearest = setting
        if steered and not own_budget:
            nearest = float(points.settings[np.lexsort((-points.quality, np.abs(points.cost - self.budget)))[0]])
        matched = answers if nearest == setting else fitted.answers(self._seen(method), nearest)
        row = {
            "method": method.name,
            "paradigm": method.paradigm,
            **self._figures(answers),
            "setting": setting,
            "steered": steered,
            **self._against_others(method.name, answers),
            "matched": {"setting": nearest, **self._figures(matched)},
            "default": {"setting": fitted.default, **self._figures(own)},
            "setup_s": setup_s,
            "setup_ratio": setup_s / self._base_s,
            "paper_setup_ratio": self._paper_ratio(method.name),
            "note": fitted.note,
        }
        curve = fitted.points
        if fitted.is_numbered:  # of all its policies, what validation would choose of
            curve = curve.pareto(len(curve.cost))
        return row, fitted.curve(self._test, curve.settings), curve

    def _points(self, fitted: Family) -> OperatingPoints:
        """Return the points on validation that the budget is spent among, by the objective."""
        if self._objective == "accuracy":
            return fitted.points
        curve = (fitted.chooser or fitted).curve(self._fitting.validation, fitted.points.settings)
        return OperatingPoints(curve.settings, curve.cost, curve.macro_f1, fitted.points.unit)

    def _at_budget(self, fitted: Family, points: OperatingPoints) -> tuple[float, bool]:
        """Return a method's setting for the budget, and whether the budget steers it."""
        try:
            setting = fitted.setting(self.budget, points)
        except BudgetError:  # a model that costs more is called for its embedding, whatever follows
            return float(points.settings[points.cost.argmin()]), False
        return (fitted.default, False) if setting is None else (setting, True)

    def differences(self, reference: str) -> dict[str, dict[str, Any]]:
        """Return each method's difference to a reference method or model, of the methods that have been measured."""
        models = [f"{SINGLE}:{model}" for model in self._test.chain.models]
        right = dict(zip(models, self._correct.T, strict=True)) | self._right
        if reference not in right:
            raise ConfigError(f"reference: {unknown_name('method', reference, right)}")
        others = [name for name in self._right if name != reference]
        compared = partial(paired_difference, correct_b=right[reference], seed=self._fitting.seed)
        p_values, error_rates = holm(np.array([compared(right[name]).p_value for name in others]))
        differences = {}
        for name, p_value, error_rate in zip(others, p_values.tolist(), error_rates.tolist(), strict=True):
            found = compared(right[name], error_rate=error_rate)
            differences[name] = {
                "difference": found.value,
                "difference_interval": [found.low, found.high],
                "difference_p": p_value,
            }
        return differences

    def areas(self, curve: Curve, points: OperatingPoints, largest_cost: float) -> dict[str, float | None]:
        """Return what sums up a curve; what is defined for two models is None for other chains.

        points: on validation, at the curve's settings.
        """
        hull = upper_hull(points.cost, points.quality)
        first, last = float(self._correct[:, 0].mean()), float(self._correct[:, -1].mean())
        names = ["deferral_area", "apgr", *(f"cpt{round(100 * q)}" for q in GAP_SHARES)]
        of_two: dict[str, float | None] = dict.fromkeys(names)
        if self._correct.shape[1] == 2 and len(curve.settings) > 1:
            whole = oracle_deferral_area(self._correct[:, 0], self._correct[:, -1])
            pair = (curve.last_share, curve.accuracy, first, last)
            mixed = (curve.last_share[hull], curve.accuracy[hull], first, last)
            values = [deferral_area(*pair, whole), apgr(*pair), *(cpt(*mixed, q) for q in GAP_SHARES)]
            of_two = dict(zip(names, values, strict=True))
        return {**of_two, "aiq": aiq(curve.cost[hull], curve.accuracy[hull], largest_cost)}

    def _seen(self, method: Method) -> Examples:
        return self._test if method.sees_labels else self._test.without_labels()

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

    def _against_others(self, name: str, answers: Answers) -> dict[str, Any]:
        right = self._right[name] = answers.predictions == self._test.chain.labels
        gain = paired_difference(right, self._correct[:, -1], seed=self._fitting.seed)
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

    def _paper_ratio(self, method: str) -> float | None:
        """Return the paper's setup time over that of Base; RouteLLM's, of which variant it does not say, for each."""
        seconds = self._published_s.get(method.split("-")[0] if method.startswith("routellm") else method)
        return None if seconds is None else seconds / self._published_s["base"]


def calibration_of(fitting: Fitting, test: Examples) -> dict[str, Any]:
    """Measure every model's confidences on labelled examples, before and after its temperature, and Base's stages.

    Returns models: for each its temperature and figures before and after; and base: its threshold, and for each stage
    the rows that reached it, the share accepted, their error with its interval, and what was promised.
    """
    policy = fit_base(fitting.calibration.chain)
    models = []
    for stage, logits in zip(policy.stages, test.chain.logits, strict=True):
        before, after = (_figures(by.scores(logits), test.chain.labels) for by in (UNCALIBRATED, stage.calibrator))
        models.append({"model": stage.name, "temperature": stage.temperature, "before": before, "after": after})
    return {"models": models, "base": {"threshold": policy.threshold, "stages": _stages(policy, test)}}


def _figures(scores: Floats, labels: Ints) -> dict[str, float | None]:
    predictions, confidences = top_option(scores)
    correct, log_probabilities = predictions == labels, log_softmax(scores)
    z = CalibrationSums.of(confidences, correct).test
    return {
        "ece": calibration_error(confidences, correct),
        "ece_equal_mass": calibration_error(confidences, correct, "equal-mass"),
        "nll": nll(log_probabilities, labels),
        "brier": brier(np.exp(log_probabilities), labels),
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


def quoted_table(name: str) -> Mapping[str, Any]:
    """Return what the paper's table of a name holds: its title, caption, figures and columns; empty if it has none."""
    table: Mapping[str, Any] = published().get(name, {})
    return table


def columns_of(name: str) -> Mapping[str, Any]:
    """Return the columns of the paper's table of a name: a data set, or for pairs of models a pair."""
    columns: Mapping[str, Any] = quoted_table(name).get("columns", {})
    return columns


def paper_name(method: str) -> str:
    """Return a method's name as the paper writes it, its own where the paper has none, a single model's as it is.

    >>> paper_name("rf"), paper_name("routellm-mf"), paper_name("oracle"), paper_name("single:small")
    ('CAUC-RF', 'RouteLLM (mf)', 'oracle', 'small')
    >>> paper_name("recalibrated:small"), paper_name("recalibrated+duo")
    ('small, recalibrated', 'Asymmetric Duo, recalibrated')
    """
    group, _, model = method.partition(":")
    if group.partition("+")[0] == RECALIBRATED:
        return f"{model or paper_name(method.partition('+')[2])}, {RECALIBRATED}"
    if model:
        return model
    names: Mapping[str, str] = published()["methods"]
    family, _, variant = method.partition("-")
    return names.get(method) or (f"{names[family]} ({variant})" if family in names and variant else method)


def quoted_figures(
    table: str, column: str | None, method: str, models: Sequence[str]
) -> tuple[float, float, float] | None:
    """Return the paper's quality (a share), cost, and cost over that of its last model, for a method of a comparison.

    models: the chain, whose single models are compared with those of the paper, in order. A variant of a method that
    the paper does not have is compared with the method. None where the paper has none, or column is None.
    """
    if column is None:
        return None
    rows, of_paper = columns_of(table)[column], [f"{SINGLE}:{model}" for model in quoted_table(table)["models"]]
    own = dict(zip((f"{SINGLE}:{model}" for model in models), of_paper, strict=True))
    found = rows.get(own.get(method, method), rows.get(method.partition("-")[0]))
    return None if found is None else (found[0] / 100.0, found[1], found[1] / rows[of_paper[-1]][1])
