"""Fit and replay policies on logits that need not fit in one process: the Python side of the jobs that do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cauc_ray.data.heads import file_facts
from cauc_ray.data.logits import ChainHeads, LogitTable
from cauc_ray.errors import ConfigError, explain
from cauc_ray.execution.fit_record import FitRecord
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.sharded import DEADLINE_S, ShardedChain, Sharding, Shards, ShardsWatched, sharded
from cauc_ray.front.offline import Evaluation
from cauc_ray.models.resources import Resources
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.guards import require_quiet
from cauc_ray.policies.methods import fit_policy
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.safe import fit_safe, require_safe_rule
from cauc_ray.policies.threshold import ThresholdRule


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
    models: Sequence[str],
    method: str = "base",
    costs: Sequence[float] | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    budget: float | None = None,
    threshold: float | None = None,
    objective: Objective = "accuracy",
    certify: str | None = None,
    strict: bool = False,
    safe: bool = False,
    calibrator: CalibratorKind = "temperature",
    shards: int | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
    record: str | Path | None = None,
    address: str | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Calibration:
    """Fit a policy as fit() does, on logits that stay in shards on a Ray cluster.

    shards: actors that hold them, None for as many as the cluster has room for.   resources: what each occupies, and
    the labels of the nodes that it may stand on, as in a pool file.   deadline_s: for one answer of all shards, the
    reading of their rows included.   record: a file to keep fits in, from which a calibration that was ended goes on.
    address: as for run.   on_pass: told how often all shards have answered. The other arguments are fit()'s.
    The table must be readable by its path on every node that shards stand on. This process holds every row's id, label,
    and, while a threshold is chosen, 12 bytes for each of its models; a shard holds some 70 bytes a row, and blocks.
    Raises CaucError as fit() does, ExecutionError where the shards do not fit on the cluster or give no answer.
    """
    require_calibrator(calibrator, method, len(models))
    limit = None if certify is None else RiskLimit.parse(certify)
    table, rule = LogitTable(logits), ThresholdRule(threshold, budget, objective, limit)
    names = (calibration_split, validation_split)
    if safe:
        require_safe_rule(rule)
    if calibration_split == validation_split:
        raise ConfigError(f"calibration and validation must be two splits, both are {calibration_split!r}")
    table.require_chain(models, costs)
    started = time.perf_counter()
    splits = [split for split in names if split == calibration_split or split in table.splits(models[0])]
    chains = [table.read_chain_heads(models, split, costs=costs) for split in splits]
    read_s = time.perf_counter() - started
    of = {"models": list(models), "split": calibration_split, "files": file_facts(chains[0].heads)}
    kept = None if record is None else FitRecord(Path(record), of)
    sharding = _sharding(shards, resources, deadline_s)
    with _sharded(chains, sharding, kept, address, on_pass) as (held, (calibration, *validation)):
        started = time.perf_counter()
        held_out = validation[0] if validation else None
        fit = fit_safe if safe else fit_policy
        policy = fit(method, calibration, held_out, rule, names, calibrator=calibrator)
        fit_s = time.perf_counter() - started
    if strict:
        require_quiet(policy.guards)
    return Calibration(policy, tuple(len(heads) for heads in chains), held.watched, read_s, fit_s)


def evaluate_shards(
    logits: str | Path,
    policy: Policy,
    *,
    split: str = "test",
    shards: int | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
    address: str | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> tuple[Evaluation, ShardsWatched]:
    """Replay a policy as evaluate() does, on logits that stay in shards on a Ray cluster.

    Arguments and errors are those of evaluate() and calibrate(). This process holds of every row what that one says.
    """
    per_call = policy.costs == "per-call"
    costs = None if per_call else [stage.cost for stage in policy.stages]
    heads = LogitTable(logits).read_chain_heads(policy.models, split, costs=costs, per_call_costs=per_call)
    sharding = _sharding(shards, resources, deadline_s)
    with _sharded([heads], sharding, None, address, on_pass) as (held, (chain,)):
        return Evaluation.of(policy, chain), held.watched


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
    record: FitRecord | None,
    address: str | None,
    on_pass: Callable[[int], None],
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Hold chains in shards, on the Ray session that there is or on one for this alone."""
    n_cpus = (sharding.n_shards or 1) * sharding.resources.num_cpus
    with ray_session(address, n_cpus), sharded(chains, sharding, record=record, on_pass=on_pass) as held:
        yield held
