"""Fit and replay policies on logits that need not fit in one process: the Python side of the jobs that do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.offline import fit_chains, require_fit
from cauc_ray.api.options import EvaluateOptions, FitOptions, ShardOptions
from cauc_ray.api.sources import Source, option_names, read_policy_heads
from cauc_ray.data.logits import ChainHeads
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.sharded import DEADLINE_S, ShardedChain, Sharding, Shards, ShardsWatched, sharded
from cauc_ray.files.paths import AnyPath, absolute
from cauc_ray.models.resources import Resources
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


def fit_shards(
    logits: str | AnyPath, options: FitOptions, on_pass: Callable[[int], None] = lambda n_passes: None
) -> Calibration:
    """Fit a policy as fit() does, on logits that stay in shards on a Ray cluster.

    A shard holds some 50 bytes a row, and blocks.   options: with a number of shards.   on_pass: called with how often
    all shards have answered. Raises as fit() does; whoever calls warns.
    """
    source = Source(absolute(logits), options)  # shards have working folders of their own
    require_fit(options, len(source.models))
    started = time.perf_counter()
    heads = source.read_heads()
    read_s = time.perf_counter() - started
    with _sharded(heads, options, on_pass) as (held, chains):
        started = time.perf_counter()
        policy = fit_chains(options, *chains)
        fit_s = time.perf_counter() - started
    return Calibration(policy, tuple(map(len, heads)), held.watched, read_s, fit_s)


def evaluate_shards(
    logits: str | AnyPath, policy: Policy, options: EvaluateOptions
) -> tuple[Evaluation, ShardsWatched]:
    """Measure a policy as evaluate() does, on logits that stay in shards on a Ray cluster."""
    heads = read_policy_heads(absolute(logits), policy, options)
    with _sharded([heads], options) as (held, (chain,)):
        evaluation = Evaluation.of(policy, chain, names=option_names(logits))
    return evaluation, held.watched


@contextmanager
def _sharded(
    chains: Sequence[ChainHeads],
    options: ShardOptions,
    on_pass: Callable[[int], None] = lambda n_passes: None,
) -> Iterator[tuple[Shards, list[ShardedChain]]]:
    """Hold chains in shards, on the Ray session that there is or on one for this alone."""
    needs, n = options.resources or Resources(), None if options.shards == "auto" else options.shards
    sharding = Sharding(n, needs, options.deadline_s or DEADLINE_S, on_pass)
    with ray_session(options.address, (n or 1) * needs.num_cpus), sharded(chains, sharding) as held:
        yield held
