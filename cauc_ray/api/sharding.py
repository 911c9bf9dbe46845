"""Fit and replay policies on logits that need not fit in one process: the Python side of the jobs that do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.offline import fit_chains, policy_of, require_fit
from cauc_ray.api.options import EvaluateOptions, FitOptions
from cauc_ray.api.sources import Source, read_policy_heads
from cauc_ray.data.logits import ChainHeads, LogitKinds
from cauc_ray.errors import ConfigError, explain
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.sharded import DEADLINE_S, ShardedChain, Sharding, Shards, ShardsWatched, sharded
from cauc_ray.models.resources import Resources
from cauc_ray.policies.checks import warn_of
from cauc_ray.policies.policy import Policy


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
    and, while a threshold is chosen, 12 bytes for each of its models; a shard holds some 50 bytes a row, and blocks.

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
    asked = FitOptions.of_all(options)
    if asked.search or asked.validation is not None:
        raise ConfigError("a search, and validation as a share, need all logits in one process; take fit()")
    source = Source(logits, asked)
    require_fit(asked, len(source.models))
    started = time.perf_counter()
    heads = source.read_heads()
    read_s = time.perf_counter() - started
    with _sharded(heads, shards, resources, deadline_s, address, on_pass) as (held, chains):
        started = time.perf_counter()
        policy = fit_chains(asked, *chains)
        fit_s = time.perf_counter() - started
    warn_of(policy.guards)
    return Calibration(policy, tuple(map(len, heads)), held.watched, read_s, fit_s)


def evaluate_shards(
    logits: str | Path,
    policy: str | Path | Policy,
    *,
    split: str = "test",
    logit_kind: LogitKinds = None,
    **sharding: Any,
) -> tuple[Evaluation, ShardsWatched]:
    """Replay a policy as evaluate() does, on logits that stay in shards on a Ray cluster.

    Arguments, warnings and errors are those of evaluate() and, of the shards, calibrate(). This process holds of every
    row what that one says.
    """
    asked, policy = EvaluateOptions.of(locals()), policy_of(policy)
    heads = read_policy_heads(logits, policy, asked)
    with _sharded([heads], **sharding) as (held, (chain,)):
        evaluation = Evaluation.of(policy, chain)
    warn_of(evaluation.guards)
    return evaluation, held.watched


@contextmanager
def _sharded(
    chains: Sequence[ChainHeads],
    shards: int | None = None,
    resources: Resources | Mapping[str, Any] | None = None,
    deadline_s: float = DEADLINE_S,
    address: str | None = None,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Hold chains in shards, on the Ray session that there is or on one for this alone."""
    if shards is not None and shards < 1:
        raise ConfigError(f"a table is cut into 1 shard or more, got {shards}")
    try:
        needs = resources if isinstance(resources, Resources) else Resources.model_validate(resources or {})
    except ValidationError as error:
        raise ConfigError(f"resources: {explain(error)}") from error
    sharding = Sharding(shards, needs, deadline_s, on_pass)
    with ray_session(address, (shards or 1) * needs.num_cpus), sharded(chains, sharding) as held:
        yield held
