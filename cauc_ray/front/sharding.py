"""Fit and replay policies on logits that need not fit in one process: the Python side of the jobs that do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cauc_ray.data.logits import ChainHeads, LogitKinds, LogitTable
from cauc_ray.errors import ConfigError, explain, unknown_name
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.sharded import DEADLINE_S, ShardedChain, Sharding, Shards, ShardsWatched, sharded
from cauc_ray.front.evaluated import Evaluation
from cauc_ray.front.offline import policy_of
from cauc_ray.front.options import FitOptions
from cauc_ray.front.sources import FittingSource
from cauc_ray.models.resources import Resources
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.checks import require_quiet, warn_of
from cauc_ray.policies.methods import fit_policy
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.safe import fit_safe, require_safe_rule


@dataclass(frozen=True, slots=True)
class Calibration:
    """A policy that was fitted by shards, and what that took.

    n_rows: of each split.   read_s: the driver's reading of ids and labels.   fit_s: all after that and the shards' own
    reading.
    """

    policy: Policy
    n_rows: tuple[int, ...]
    shards: ShardsWatched
    read_s: float
    fit_s: float


def calibrate(
    logits: str | Path,
    *,
    shards: int | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
    address: str | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
    **options: Any,
) -> Calibration:
    """Fit a policy as fit() does, on logits that stay in shards on a Ray cluster.

    The table must be readable by its path on every node that holds shards. This process holds every row's id, label,
    and, while a threshold is chosen, 12 bytes for each of its models; a shard holds some 70 bytes a row, and blocks.

    Args:
        logits: a table's path or URI.
        shards: actors that hold it, None for as many as the cluster has room for.
        resources: what each occupies, and the labels of the nodes that may hold it, as in a pool file.
        deadline_s: for one answer of all shards, the reading of their rows included.
        address: as for run.
        on_pass: called with how often all shards have answered.
        options: those of fit(), but search and a validation share, which need all logits in one process.

    Returns:
        The policy, and what it took. Warns as fit() does.

    Raises:
        CaucError: as fit() does; ExecutionError where the shards do not fit on the cluster or give no answer.
    """
    unknown = next((name for name in options if name not in FitOptions.model_fields), None)
    if unknown is not None:
        raise ConfigError(unknown_name("option", unknown, FitOptions.model_fields))
    asked = FitOptions.of(options)
    if asked.search or asked.validation is not None:
        raise ConfigError("a search, and validation as a share, need all logits in one process; take fit()")
    source = FittingSource(logits, None, None, asked)
    require_calibrator(asked.calibrator, asked.method, len(source.models))
    if asked.safe:
        require_safe_rule(asked.rule)
    started = time.perf_counter()
    chains = source.read_heads()
    read_s = time.perf_counter() - started
    with _sharded(chains, _sharding(shards, resources, deadline_s), address, on_pass) as (held, (calibration, *others)):
        started = time.perf_counter()
        fit = fit_safe if asked.safe else fit_policy
        validation = others[0] if others else None
        policy = fit(asked.method, calibration, validation, asked.rule, asked.splits, calibrator=asked.calibrator)
        fit_s = time.perf_counter() - started
    if asked.strict:
        require_quiet(policy.guards)
    warn_of(policy.guards)
    return Calibration(policy, tuple(len(heads) for heads in chains), held.watched, read_s, fit_s)


def evaluate_shards(
    logits: str | Path,
    policy: str | Path | Policy,
    *,
    split: str = "test",
    logit_kind: LogitKinds = None,
    shards: int | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
    address: str | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> tuple[Evaluation, ShardsWatched]:
    """Replay a policy as evaluate() does, on logits that stay in shards on a Ray cluster.

    Arguments, warnings and errors are those of evaluate() and calibrate(). This process holds of every row what that
    one says.
    """
    policy = policy_of(policy)
    per_call = policy.costs == "per-call"
    costs = None if per_call else [stage.cost for stage in policy.stages]
    table = LogitTable(logits, logit_kind, undeclared=policy.kinds_by_model)
    heads = table.read_chain_heads(policy.models, split, costs=costs, per_call_costs=per_call)
    sharding = _sharding(shards, resources, deadline_s)
    with _sharded([heads], sharding, address, on_pass) as (held, (chain,)):
        evaluation = Evaluation.of(policy, chain)
    warn_of(evaluation.guards)
    return evaluation, held.watched


def _sharding(n_shards: int | None, resources: Resources | Mapping[str, Any] | None, deadline_s: float) -> Sharding:
    if n_shards is not None and n_shards < 1:
        raise ConfigError(f"a table is cut into 1 shard or more, got {n_shards}")
    try:
        needs = resources if isinstance(resources, Resources) else Resources.model_validate(resources or {})
    except ValidationError as error:
        raise ConfigError(f"resources: {explain(error)}") from error
    return Sharding(n_shards, needs, deadline_s)


@contextmanager
def _sharded(
    chains: Sequence[ChainHeads],
    sharding: Sharding,
    address: str | None,
    on_pass: Callable[[int], None],
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Hold chains in shards, on the Ray session that there is or on one for this alone."""
    n_cpus = (sharding.n_shards or 1) * sharding.resources.num_cpus
    with ray_session(address, n_cpus), sharded(chains, sharding, on_pass=on_pass) as held:
        yield held
