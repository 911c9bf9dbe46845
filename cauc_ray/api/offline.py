"""Fit, evaluate and check policies on logits: the Python side of `cauc fit`, `cauc evaluate` and `cauc check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from cauc_ray.api.checked import Check
from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.options import (
    Budget,
    Common,
    Costs,
    Cut,
    Kinds,
    Names,
    OfChain,
    OnRay,
    Options,
    Seconds,
    Seed,
    ShardCount,
    ShardResources,
    options_of,
    takes,
)
from cauc_ray.api.segmented import check_segments, segment_results, watched_chain
from cauc_ray.api.sources import (
    ChainOptions,
    Logits,
    Source,
    examples_of,
    labelled_examples,
    option_names,
    positions_of_rows,
    read_policy_chain,
    read_policy_heads,
    segments_of,
    validation_arrays,
)
from cauc_ray.data.answer_table import holds_answers
from cauc_ray.data.logits import ChainHeads, LogitKinds
from cauc_ray.data.writing import read_info
from cauc_ray.errors import ConfigError, OptionError, PolicyError, unknown_name, warn
from cauc_ray.files.documents import require_writable
from cauc_ray.files.paths import AnyPath, absolute, path_of
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.guarantees import RiskLimit, require_certifiable
from cauc_ray.numbers.segments import Segments
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.by_method import SINGLE, fit_method, fit_policy, refit
from cauc_ray.policies.checks import require_quiet, warn_of
from cauc_ray.policies.evidence import Noise
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import LACKING, METHODS, OURS, method_named
from cauc_ray.policies.monitor import require_reference
from cauc_ray.policies.policy import Policy, policy_of
from cauc_ray.policies.pools import check_pool
from cauc_ray.policies.safe import require_safe_rule
from cauc_ray.policies.search import of_sub_chains, search_chains, with_search
from cauc_ray.policies.threshold import Compared, ThresholdRule
from cauc_ray.policies.trace import Examples, may_flip

if TYPE_CHECKING:
    from cauc_ray.execution.sharded import ShardedChain, Shards, ShardsWatched


class ShardOptions(Options):
    """Options of how logits that need not fit in one process are divided over a Ray cluster."""

    def require_agreement(self) -> None:
        """Raise ConfigError for settings of shards without shards."""
        if self.shards is None and (self.resources is not None or self.deadline_s is not None):
            raise OptionError("{resources} and {deadline_s} are for shards; give {shards} as well")


class FitOptions(ChainOptions, ShardOptions):
    """Options of a fit."""

    @property
    def is_ours(self) -> bool:
        """Return whether the method is one of CAUC's own."""
        return self.method in (None, "auto", *OURS)

    @property
    def searches(self) -> bool:
        """Return whether the chain is chosen among all sub-chains of the models."""
        return bool(self.search or self.method == "auto")

    @property
    def threshold_rule(self) -> ThresholdRule:
        """Return what decides the threshold. Raises ConfigError where options contradict each other."""
        limit = None if self.certify is None else RiskLimit.parse(self.certify)
        compare: Compared = "confidence"
        if self.method == "answers" and self.threshold is None and limit is None:
            compare = self.rule or "gain"
        elif self.method in (None, "rf", "answers"):
            compare = self.rule or "confidence"
        budget, confidence = self.budget, None
        if isinstance(budget, str):
            budget, confidence = map(float, budget.split("@"))
        return ThresholdRule(self.threshold, budget, self.objective, limit, self.price, compare, confidence)

    def require_agreement(self) -> None:
        """Raise ConfigError where a method cannot be fitted by the other options."""
        ChainOptions.require_agreement(self)
        ShardOptions.require_agreement(self)
        _ = self.threshold_rule
        self._require_whole_claims()
        if self.rule == "gain" and (
            self.method not in (None, "rf", "answers", "stacked", "auto") or self.safe or self.shards is not None
        ):
            raise OptionError(
                "the {rule} gain is for methods rf and answers, without {safe} and {shards}; stacked always follows it"
            )
        if not self.is_ours:
            self._require_plain()
        elif self.embedding is not None and self.method not in (None, "stacked", "auto"):
            raise OptionError(f"method {self.method} looks at no embedding; leave {{embedding}} out")
        if self.searches and self.safe:
            raise OptionError(
                "a search measures chains without the checks of {safe}; leave one of {search} and {safe} out"
            )
        if self.searches and self.price is not None:
            raise OptionError("a search chooses a chain by its best threshold; leave one of {search} and {price} out")
        if self.search and self.rule == "gain" and self.method == "rf":
            raise OptionError(
                "a search compares confidences of rf: search by {method} stacked, or leave {rule} gain out"
            )
        if self.searches and self.certify is not None:
            raise OptionError(
                "a chain that was chosen on validation cannot be certified there; leave one of {search} and {certify} "
                "out"
            )
        if self.shards is not None and (self.searches or self.validation is not None or self.method == "stacked"):
            raise OptionError(
                "a search, stacked, and {validation} as a share need all logits in one process; leave {shards} out"
            )

    def _require_whole_claims(self) -> None:
        """Raise ConfigError where a confidence or segments go with what they do not hold for."""
        is_plain = self.method in (None, *OURS) and not (self.searches or self.safe)
        is_searched = self.method in ("base", "rf") and self.searches and not self.safe
        if self.threshold_rule.confidence is not None and not (is_plain or is_searched):
            raise OptionError(
                "{budget} at a confidence is for methods answers, base, rf and stacked, with {search} for base and rf "
                "alone; not with {safe}"
            )
        if self.by is not None and (self.certify is None or not is_plain or self.shards is not None):
            raise OptionError("{by} is for {certify} with method answers, base, rf or stacked, without {shards}")

    def _require_plain(self) -> None:
        """Raise ConfigError unless a method of the comparison can be fitted by the options."""
        if not self.method.startswith(f"{SINGLE}:") and self.method not in METHODS:
            raise ConfigError(unknown_name("method", self.method, METHODS))
        if self.method in METHODS and (why := METHODS[self.method].unpublished):
            raise ConfigError(f"method {self.method} {why}; `cauc compare` runs it")
        plain = {"search": False, "safe": False, "calibrator": "temperature", "shards": None}
        # A price is one of confidences, which other methods do not compare with their threshold.
        plain |= {"price": None}
        surplus = next((name for name, default in plain.items() if getattr(self, name) != default), None)
        if surplus is not None:
            methods = "base, rf and stacked" if surplus in ("search", "price") else "base and rf"
            raise OptionError(f"{{{surplus}}} is for methods {methods}, not for {self.method}; leave it out")


@takes(FitOptions)
def fit(
    logits: Logits,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Common[Names | None] = None,
    method: Common[str | None] = None,
    budget: Common[Budget | None] = None,
    threshold: Common[float | None] = None,
    validation: Common[Cut] = None,
    price: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None,
    rule: Compared | None = None,
    objective: Objective = "accuracy",
    certify: str | None = None,
    by: str | None = None,
    search: bool = False,
    safe: bool = False,
    strict: bool = False,
    calibrator: CalibratorKind = "temperature",
    embedding: str | None = None,
    costs: OfChain[Costs | None] = None,
    cost_unit: OfChain[str | None] = None,
    calibration_split: OfChain[str] = "calibration",
    validation_split: OfChain[str] = "validation",
    seed: OfChain[Seed] = 0,
    logit_kind: OfChain[Kinds | None] = None,
    shards: ShardCount | None = None,
    resources: ShardResources | None = None,
    deadline_s: OnRay[Seconds | None] = None,
    address: OnRay[str | None] = None,
) -> Policy:
    """Fit a policy on arrays of logits or on a logit table.

    An array's numbers are rounded to float32. A table of the same ids, labels and logits gives the same policy file,
    byte for byte.

    Args:
        logits: A table's path or URI; or by model arrays (N, K) with a column for each option: numpy arrays, lists,
            pandas or polars frames. For answers in words by model columns (N,): answer, confidence_<name>, perhaps
            correct and cost, and the text rule (data frames, or mappings).
        labels: Int (N,), index of the right option, or right answers, if no column is correct; only for arrays, whose
            policy is fitted on them.
        example_ids: (N,), unique ids of the rows of arrays; without them row i is "i", the position as text. The order
            of rows means nothing, except for shares that are cut off where ids are positions.
        models: The chain, cheapest first (default: all models, by cost).
        method: base, rf, stacked (RF with biases that recalibrate each model), auto (the best stacked sub-chain at a
            budget), answers, single:MODEL, or a method of `cauc compare` (default: base; for a table of answers in
            words, answers).
        budget: Mean cost per example to choose the threshold for, on validation; as 6@0.95 on new inputs, with that
            confidence.
        threshold: A threshold to use as it is.
        validation: Share of the calibration examples to choose the threshold on, drawn at random (default: the
            validation split). In Python, for arrays, also (logits, labels) or (logits, labels, example_ids).
        price: Price of a unit of cost, in errors. The threshold is 1 - r - price x c, with the last stage's error r on
            calibration and the cost c of all calls after the first. For gains and stacked, the least gain per unit of
            cost that is worth a call.
        rule: What rf and answers compare: their confidence with one threshold, or their expected gain per cost with a
            price (default: confidence, but gain for answers without a threshold and a certificate). Stacked always
            compares gains.
        objective: What a chosen threshold maximises.
        certify: Limit of the risk of early answers and its confidence, as risk<=0.05@0.95.
        by: Column that the table keeps, or name of an array (N,) next to those of the models, in each of whose
            segments the risk is certified.
        search: Fit the best sub-chain of the models, at most 12, in any order.
        safe: Fuse only where supported, and fall back on a single model that is at least as good.
        strict: Treat a guard that fires as an error, with exit code 3.
        calibrator: Calibrator of each model: a temperature; with an offset for each option; or an isotonic map of
            confidences, for base with one or two models.
        embedding: Encoder of the table, whose embeddings the method reads. Its calls are free unless costs name it.
        costs: Cost of a call of each model, by name or in the order of models (default: the table's).
        cost_unit: Unit of the costs (default: the table's, else 'cost units').
        calibration_split: Split to fit on.
        validation_split: Split to choose the threshold on.
        seed: Random seed.
        logit_kind: Kind of the logits, of all models or by model: raw, log-probabilities, probabilities or surrogate
            (default: as declared in the table, else raw).
        shards: Number of Ray actors that keep a table's logits, or auto for as many as the cluster has room for
            (default: this process keeps them). Every node must be able to read the table.
        resources: Resources of a shard and labels of its node, as in a pool file.
        deadline_s: Seconds for one answer of all shards (default: an hour).
        address: Address of a Ray cluster (default: RAY_ADDRESS, else a session of this machine).

    Returns:
        The policy. Warns, with CaucWarning, of each guard that fires.

    Raises:
        CaucError: DataError for the logits, ConfigError for the arguments, BudgetError for the budget, RiskError where
            no threshold is certified, GuardError where a guard fires that must not, ExecutionError where shards do not
            fit on the cluster or give no answer.

    Examples:
        >>> import cauc_ray
        >>> policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
        >>> policy.models, policy.cost_unit
        (('small', 'large'), 'k multiply-adds')
    """
    method = method or ("answers" if holds_answers(logits) else "base")
    options: FitOptions = options_of(fit).of(locals())
    if options.shards is not None:
        policy, _ = fit_shards(_table(logits), options)
        warn_of(policy.guards)
        return policy
    source = Source(logits, options, labels, example_ids, by=options.by)
    if method in METHODS and METHODS[method].reads not in (source.gives, "neither"):
        remedy = "; fit its answers in words with method answers" if source.has_answers else ""
        raise ConfigError(f"{source.path}: method {method} {LACKING[METHODS[method].reads]}{remedy}")
    if source.has_answers and objective != "accuracy":
        raise OptionError(f"{source.path}: answers in words have no classes: leave {{objective}} out")
    if options.is_ours:
        require_fit(options, len(source.models))
    if options.searches:
        check_pool(source.models)
    chain_search, choice = None, options.threshold_rule
    if options.searches:
        chain_search = search_chains(
            options.method, *_pool(options, source), choice, validation_split, calibrator=calibrator
        )
        choice = of_sub_chains(choice, len(source.models))
        # Read again: an example that only other models failed on counts here.
        source = source.of_models(chain_search.chosen.models)
        options = options.model_copy(update={"method": chain_search.chosen.method})
    if options.is_ours and options.embedding is None:
        splits = source.read(source.models, source.costs)
        segments = source.segments(options.by)
        policy = _with_prompts(fit_chains(options, choice, *splits, segments), logits, source)
        policy = _with_noise(policy, logits, splits[-1] or splits[0])
    else:
        policy = _fit_method(options, source, logits)
    warn_of(policy.guards)
    return policy if chain_search is None else with_search(policy, chain_search)


def _pool(options: FitOptions, source: Source) -> tuple[Examples, Examples | None]:
    """Read the splits of a pool whose sub-chains are searched."""
    if options.embedding is not None:
        calibration, validation = _examples(options, source)
        return calibration, validation
    chain, chosen_on = source.read(source.models, source.costs)
    return Examples(chain), None if chosen_on is None else Examples(chosen_on)


def _examples(options: FitOptions, source: Source) -> list[Examples]:
    """Read both splits, with embeddings if options name an encoder. Raises ConfigError for a layer of a model."""
    if options.embedding is not None and source.table is not None and options.embedding in source.table.models:
        raise ConfigError(
            f"embedding: {options.embedding!r} is a layer of a model, which no stage of a pool gives by itself; a "
            "policy needs a sentence or vision encoder (`cauc compare` takes both)"
        )
    return examples_of(source, ("calibration", "choosing a threshold"), options.embedding)


def _fit_method(options: FitOptions, source: Source, logits: Logits) -> Policy:
    """Fit a policy by a method of the comparison."""
    calibration, validation = _examples(options, source)
    fitting = Fitting(calibration, validation, options.seed, names=options.splits)
    policy = _with_prompts(fit_method(options.method, fitting, options.threshold_rule), logits, source)
    if options.embedding is not None and policy.encoder is None and not options.is_ours:
        raise OptionError(f"method {options.method} looks at no embedding; leave {{embedding}} out")
    names = [stage.name for stage in policy.answering]
    policy = _with_noise(policy, logits, validation.own_chain(names, encoded=policy.encoder is not None))
    if options.strict:
        require_quiet(policy.guards)
    return policy


def _with_prompts(policy: Policy, logits: Logits, source: Source, before: Policy | None = None) -> Policy:
    """Return a policy with the prompts of its models, as a table has them, else of before, and their answers."""
    info = None if isinstance(logits, Mapping) else read_info(logits)
    prompts = {stage.name: stage.prompt for stage in before.stages} if before else {}
    prompts |= {model.name: model.prompt for model in info.models if model.prompt} if info else {}
    asked = {
        name: {"rule": answers.rule, "confidences": answers.confidences}
        for name, answers in source.answer_formats.items()
    }
    stages = [
        stage.model_copy(update={"prompt": prompts.get(stage.name), **asked.get(stage.name, {})})
        for stage in policy.stages
    ]
    return policy.model_copy(update={"stages": tuple(stages)})


def _with_noise(policy: Policy, logits: Logits, chain: ChainLogits) -> Policy:
    """Return a policy with what the noise that a logit table records of its models may change on a chain."""
    info = None if isinstance(logits, Mapping) else read_info(logits)
    noise_by_model = {model.name: model.noise for model in info.models if model.noise is not None} if info else {}
    noise_by_model = {name: noise_by_model[name] for name in policy.models if name in noise_by_model}
    if not noise_by_model:
        return policy
    n = may_flip(policy, chain, [noise_by_model.get(name, 0.0) for name in policy.models])
    split = (policy.validation or policy.calibration).split
    return policy.model_copy(update={"noise": Noise(logits=noise_by_model, may_flip=n, n=len(chain), split=split)})


def _table(logits: Logits) -> str | AnyPath:
    if isinstance(logits, Mapping):
        raise OptionError("shards read a logit table; arrays are in this process already: leave {shards} out")
    return logits


def require_fit(options: FitOptions, n_models: int) -> None:
    """Raise ConfigError, before any reading, where so many models cannot be fitted by options."""
    method_named(options.method).require_calibrator(options.calibrator, n_models)
    if options.safe:
        require_safe_rule(options.threshold_rule)


def fit_chains(
    options: FitOptions,
    rule: ThresholdRule,
    calibration: Chain,
    validation: Chain | None = None,
    segments: Sequence[Segments] = (),
) -> Policy:
    """Fit a policy on chains, here or in shards, without a search. Raises as fit() does.

    Args:
        options: Options of the fit.
        rule: How to choose the threshold.
        calibration: Examples to fit on.
        validation: Examples to choose the threshold on.
        segments: Of both splits, in each of which the risk is certified.
    """
    rule = replace(rule, segments=tuple(segments))
    if rule.certify is not None and validation is not None:
        require_certifiable(len(validation), rule.certify)
        for name, rows in segments[1].rows(validation.example_ids).items() if segments else ():
            require_certifiable(len(rows), rule.certify, name)
    policy = fit_policy(
        options.method,
        calibration,
        validation,
        rule,
        options.splits,
        calibrator=options.calibrator,
        safe=options.safe,
    )
    if options.strict:
        require_quiet(policy.guards)
    return policy


def replace_model(
    policy: str | AnyPath | Policy,
    logits: Logits,
    replacements: Mapping[str, str],
    labels: Any = None,
    *,
    example_ids: Any = None,
    costs: Mapping[str, float] | None = None,
    validation: Cut = None,
    seed: int = 0,
    logit_kind: LogitKinds = None,
) -> Policy:
    """Replace some of a policy's models, and fit it again by its own rule.

    Numbers that do not depend on a replaced model stay equal to the bit: the other models' calibrators; for Base,
    unless the last model was replaced, their complementarity; for RF, all stages before the first replaced one.

    Args:
        policy: a policy, or its file.
        logits: a table or arrays, with the remaining and the new models on the examples that the policy was fitted on.
        replacements: the new model by the one that it replaces.
        labels: as for fit(), like example_ids.
        example_ids: of arrays.
        costs: of the new models, by name; without them the table's. The remaining models keep theirs.
        validation: as fit() had it, like seed.
        seed: of the share that validation is.
        logit_kind: as for fit(); without it the policy's models keep their kinds.

    Returns:
        The new policy. Warns as fit() does.

    Raises:
        CaucError: as fit() does.
    """
    policy = policy_of(policy)
    for name in replacements:
        if name not in policy.models:
            raise ConfigError(unknown_name("model", name, policy.models))
    models = [replacements.get(name, name) for name in policy.models]
    options: FitOptions = options_of(fit).of(
        {
            "models": models,
            "costs": None if costs is None else dict(costs),
            "method": policy.method,
            "cost_unit": policy.cost_unit if isinstance(logits, Mapping) else None,
            "calibration_split": policy.calibration.split,
            "validation_split": policy.validation.split if policy.validation else "validation",
            "validation": validation,
            "seed": seed,
            "logit_kind": logit_kind,
        }
    )
    source = Source(logits, options, labels, example_ids, policy.kinds_by_model)
    if policy.costs == "per-call":
        splits = source.read(models, "per-call")
    else:
        costs_by_model = {stage.name: stage.cost for stage in policy.stages if stage.name in models}
        splits = source.read(models, {**source.declared, **costs_by_model})
    certificate = policy.threshold_choice.certificate
    by = None if certificate is None else certificate.by
    replaced = _with_prompts(refit(policy, *splits, source.segments(by)), logits, source, policy)
    warn_of(replaced.guards)
    return replaced


@takes(ShardOptions)
def evaluate(
    logits: Logits,
    policy: str | AnyPath | Policy,
    *,
    labels: Any = None,
    example_ids: Any = None,
    split: Common[str] = "test",
    by: str | None = None,
    logit_kind: Kinds | None = None,
    shards: ShardCount | None = None,
    resources: ShardResources | None = None,
    deadline_s: OnRay[Seconds | None] = None,
    address: OnRay[str | None] = None,
) -> Evaluation:
    """Replay a policy on a split of a logit table, or on arrays.

    Args:
        logits: A table or arrays, as for fit().
        policy: A policy file. In Python also a Policy.
        labels: Labels of arrays, as for fit(); without them no accuracy is measured.
        example_ids: Ids of the rows of arrays, as for fit().
        split: Split to replay.
        by: Column that the table keeps, or name of an array (N,) next to those of the models, by whose values results
            are shown, too.
        logit_kind: Kind of the logits, of all models or by model (default: as declared in the table, else the kind that
            the policy was fitted on).
        shards: Number of Ray actors that keep a table's logits, or auto for as many as the cluster has room for
            (default: this process keeps them).
        resources: Resources of a shard and labels of its node, as in a pool file.
        deadline_s: Seconds for one answer of all shards (default: an hour).
        address: Address of a Ray cluster (default: RAY_ADDRESS, else a session of this machine).

    Returns:
        The answers and their measures. Warns, with CaucWarning, where examples cost other than the policy expects.

    Raises:
        CaucError: DataError for the logits, PolicyError for the policy's file.

    Examples:
        >>> import cauc_ray
        >>> policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
        >>> measures = cauc_ray.evaluate(cauc_ray.sample_logits(), policy).measures
        >>> measures.accuracy.value > 0.9, measures.cost < 5.0
        (True, True)
    """
    options: ShardOptions = options_of(evaluate).of(locals())
    policy = policy_of(policy)
    segments = None if options.by is None else segments_of(logits, options.by, options.split, example_ids)
    if options.shards is not None:
        evaluation, _ = evaluate_shards(_table(logits), policy, options)
    else:
        chain = read_policy_chain(logits, policy, options.split, options.logit_kind, labels, example_ids)
        order = positions_of_rows(chain, example_ids) if isinstance(logits, Mapping) else None
        evaluation = Evaluation.of(policy, chain, order, option_names(logits, policy, options.split))
    if segments is not None:
        evaluation = replace(evaluation, segments=segment_results(evaluation.replay, evaluation.chain, segments))
    warn_of(evaluation.guards)
    _warn_of_own_rows(policy, evaluation.chain)
    return evaluation


def _warn_of_own_rows(policy: Policy, chain: Chain) -> None:
    """Warn where a policy is measured on the rows that it was fitted or chosen on."""
    fingerprint = chain.examples_fingerprint()
    for split, purpose in ((policy.calibration, "fitted"), (policy.validation, "chosen")):
        if split is not None and split.examples_fingerprint == fingerprint:
            warn(
                f"{chain.source}: the policy was {purpose} on these very examples, which flatter it; evaluate it on a "
                "split that it has not seen",
            )
            return


def require_apart(output: str | AnyPath, *inputs: str | AnyPath) -> None:
    """Raise ConfigError where an output would replace one of the inputs, or a file within it."""
    target = Path(str(output)).resolve()
    for source in inputs:
        if target.is_relative_to(Path(str(source)).resolve()):
            raise ConfigError(f"output {output} is, or lies in, the input {source}; write it elsewhere")


def require_output_file(output: str | AnyPath, *inputs: str | AnyPath) -> None:
    """Raise ConfigError, before any work, where a file cannot be written or would replace one of the inputs."""
    require_apart(output, *inputs)
    require_writable(path_of(output))


def fit_shards(
    logits: str | AnyPath, options: FitOptions, on_pass: Callable[[int], None] = lambda n_passes: None
) -> tuple[Policy, ShardsWatched]:
    """Fit a policy as fit() does, on logits that stay in shards on a Ray cluster. Whoever calls warns.

    A shard holds some 50 bytes a row, and blocks.

    Args:
        logits: A table.
        options: Options with a number of shards.
        on_pass: Called with how often all shards have answered.
    """
    source = Source(absolute(logits), options)  # shards have working folders of their own
    require_fit(options, len(source.models))
    with _sharded(source.read_heads(), options, on_pass) as (held, chains):
        validation = chains[1] if len(chains) > 1 else None
        policy = fit_chains(options, options.threshold_rule, chains[0], validation)
    return _with_prompts(policy, logits, source), held.watched


def evaluate_shards(logits: str | AnyPath, policy: Policy, options: ShardOptions) -> tuple[Evaluation, ShardsWatched]:
    """Measure a policy as evaluate() does, on logits that stay in shards on a Ray cluster."""
    heads = read_policy_heads(absolute(logits), policy, options.split, options.logit_kind)
    with _sharded([heads], options) as (held, (chain,)):
        evaluation = Evaluation.of(policy, chain, names=option_names(logits, policy, options.split))
    return evaluation, held.watched


@contextmanager
def _sharded(
    chains: Sequence[ChainHeads],
    options: ShardOptions,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Hold chains in shards, on the current Ray session or on one for this alone."""
    from cauc_ray.execution import sharded  # Ray takes seconds to import
    from cauc_ray.execution.session import ray_session

    needs, n = options.resources or Resources(), None if options.shards == "auto" else options.shards
    sharding = sharded.Sharding(n, needs, options.deadline_s or sharded.DEADLINE_S, on_pass)
    with ray_session(options.address, (n or 1) * needs.num_cpus), sharded.sharded(chains, sharding) as held:
        yield held


def check(
    logits: Logits,
    policy: str | AnyPath | Policy,
    *,
    labels: Any = None,
    example_ids: Any = None,
    validation: Any = None,
    split: Common[str] = "test",
    by: str | None = None,
    logit_kind: Kinds | None = None,
) -> Check:
    """Check whether a policy is still valid on a split of a logit table, or on arrays.

    All models have answered all examples, so each early answer is compared with the whole cascade's. Examples without a
    label count where no label is needed.

    Args:
        logits: A table or arrays, as for fit().
        policy: A policy file, fitted with labelled validation. In Python also a Policy.
        labels: Labels of arrays, as for evaluate().
        example_ids: Ids of the rows of arrays.
        validation: Only for arrays with segments: (logits, labels) or (logits, labels, example_ids) of the examples
            that the threshold was chosen on, as fit() had them.
        split: Split to check.
        by: Column that the table keeps, or name of an array (N,) next to those of the models: each of its values is
            checked, too, against the same segment of validation, which is read as well.
        logit_kind: Kind of the logits, of all models or by model (default: as declared in the table, else the kind that
            the policy was fitted on).

    Returns:
        The counts, and the verdict.

    Raises:
        CaucError: PolicyError where the policy has no reference or its file cannot be read, DataError for the logits,
            ConfigError for the arguments.
    """
    options, policy = options_of(check).of(locals()), policy_of(policy)
    require_reference(policy)
    segments = None if options.by is None else segments_of(logits, options.by, options.split, example_ids)
    chain = read_policy_chain(logits, policy, options.split, options.logit_kind, labels, example_ids)
    if segments is None:
        if validation is not None:
            raise OptionError("{validation} is what segments are compared with: give {by} as well, or leave it out")
        return Check(policy, chain.source, watched_chain(policy, chain))
    chosen_on, rows = policy.validation, validation_arrays(logits, validation)
    assert chosen_on is not None
    validation_segments = segments_of(rows[0], segments.column, chosen_on.split, rows[2])
    reference = labelled_examples(read_policy_chain(rows[0], policy, chosen_on.split, options.logit_kind, *rows[1:]))
    if reference.examples_fingerprint() != chosen_on.examples_fingerprint:
        raise PolicyError(
            f"{reference.source} has other examples than the policy was chosen on, which its segments are compared "
            "with: check without segments, or with those examples"
        )
    checks = check_segments(policy, chain, reference, (segments, validation_segments))
    watched = watched_chain(policy, chain, len(checks) + 1)
    return Check(policy, chain.source, watched, checks)
