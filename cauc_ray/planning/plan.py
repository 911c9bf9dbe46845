"""How many replicas sustain a rate of requests, and what they cost: the Python side of `cauc plan`."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from cauc_ray.api.options import PlanOptions
from cauc_ray.cascade.stage import fed_rows, queue_rows
from cauc_ray.errors import CaucWarning, ConfigError
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.planning.figures import Chain, drifted, plan_figures, range_figures
from cauc_ray.planning.sizing import Trials, sized
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, Timing, read_earlier_run, saved_timing
from cauc_ray.policies.policy import Policy, policy_of

# A plan is looked at again with deferral rates so many times the policy's.
DRIFTS = (1.2, 0.8)
# Seconds are drawn out to batches of so many times the largest that was measured, beyond that with a warning.
FAR = 1.5

# Seconds of a router on one core, about.
ROUTER = RouterSeconds(per_request=0.001, per_call=0.003)
# The least rate and goal: times below it are equal.
LEAST = 1e-6


def plan(
    pool: str | AnyPath | Pool,
    policy: str | AnyPath | Policy,
    rate: float,
    *,
    slo_p99_s: float | None = None,
    ledger: str | AnyPath | None = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Plan the replicas of a policy's chain for a rate of requests a second, one row each, that come independently.

    Without a ledger, stages must be saved ones, which take the seconds that the pool declares.

    Args:
        pool: a pool, or its file.
        policy: a policy, or its file, that records how often its stages defer.
        rate: requests per second.
        slo_p99_s: seconds within which 99 of 100 requests must be answered.
        ledger: the folder of an earlier run, whose calls say how long batches take.
        on_step: called with what is being done.

    Returns:
        The stages with their replicas, load and cost, the latency, totals, what other deferral rates change, and what
        the pool's own replicas can carry.

    Raises:
        CaucError: for the pool, the policy, or what says how long batches take.
    """
    started = time.perf_counter()
    PlanOptions.of(locals())
    _require_positive("rate", rate)
    if slo_p99_s is not None:
        _require_positive("p99 goal", slo_p99_s)
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy_of(policy)
    specs = pool.chain(policy.models)
    deferral = expected_deferral(policy)
    earlier = None if ledger is None else read_earlier_run(ledger, policy.models)
    timings = [saved_timing(spec) if earlier is None else earlier.timings[spec.name] for spec in specs]
    _warn_of_far_batches(specs, timings)
    router = replace(ROUTER, replicas=pool.serving.router.replicas.max)
    trials = Trials(served_stages(specs, timings, deferral), rate, router)
    chain = Chain(specs, policy, timings, trials, router, slo_p99_s)
    on_step("sizing")
    sizing = sized(trials, slo_p99_s)
    _warn_of_range(specs, sizing.counts)
    figures = plan_figures(chain, sizing, earlier)
    if (n := figures["router"]["replicas"]) > router.replicas:
        _warn(f"{n:,} routers are needed, the pool file allows {router.replicas:,}: raise serving.router.replicas' max")
    drift = []
    for factor in DRIFTS:
        on_step(f"deferral × {factor:g}")
        drift.append(drifted(chain, sizing, factor))
    on_step("what the pool can carry")
    return {
        "pool": pool.name,
        "policy_id": policy.id,
        **figures,
        "drift": drift,
        "range": range_figures(chain, run_stages(specs, timings, deferral)),
        "elapsed_s": time.perf_counter() - started,
    }


def expected_deferral(policy: Policy) -> list[float]:
    """Return the share of its rows that each stage defers, 0 for the last. Raises ConfigError where nobody knows."""
    if not policy.in_turn:
        raise ConfigError(
            f"policy {policy.id} is of method {policy.method}, which does not call its models in turn; plans are for "
            "policies that do"
        )
    if policy.expected is None:
        raise ConfigError(
            f"policy {policy.id} does not say how often its stages defer: its threshold was changed, or it was fitted "
            "without a labelled validation split; fit it with one, at this threshold or budget (`cauc fit`)"
        )
    stages = policy.expected.stages
    return [1 - stage.answered / stage.reached if stage.reached else 0.0 for stage in stages[:-1]] + [0.0]


def served_stages(
    specs: Sequence[StageSpec], timings: Sequence[Timing], deferral: Sequence[float]
) -> tuple[PlannedStage, ...]:
    """Return a chain as it is served, one replica each."""
    return tuple(
        PlannedStage(spec.name, _served_batch(spec), spec.serving.batch_wait_s, timing.seconds, share)
        for spec, timing, share in zip(specs, timings, deferral, strict=True)
    )


def run_stages(
    specs: Sequence[StageSpec], timings: Sequence[Timing], deferral: Sequence[float]
) -> tuple[PlannedStage, ...]:
    """Return a chain as a run has it once all the replicas work that the pool allows."""
    stages = [
        PlannedStage(spec.name, spec.batch_size, spec.batch_wait_s, timing.seconds, share, spec.replicas.max)
        for spec, timing, share in zip(specs, timings, deferral, strict=True)
    ]
    for place, (before, at) in enumerate(pairwise(stages), 1):  # the first one's rows are all there
        stages[place] = replace(at, queue_rows=queue_rows(at.batch_size, at.replicas, fed_rows(before.batch_size)))
    return tuple(stages)


def _served_batch(spec: StageSpec) -> int:
    return spec.serving.batch_size or spec.batch_size


def _require_positive(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= LEAST):
        raise ConfigError(f"a {what} is a number above 0 ({LEAST:g} at least), not {value:g}")


def _warn_of_far_batches(specs: Sequence[StageSpec], timings: Sequence[Timing]) -> None:
    for spec, timing in zip(specs, timings, strict=True):
        size = _served_batch(spec)
        if timing.n_calls and size > FAR * timing.most_rows:
            _warn(
                f"stage {spec.name!r} is planned with batches of {size}, none of more than {timing.most_rows} was timed"
            )
        elif timing.n_calls and timing.least_rows == timing.most_rows and size > 1:
            _warn(
                f"stage {spec.name!r}: every call had {timing.most_rows} rows, which does not tell what a smaller "
                "batch takes; its share of their seconds is assumed"
            )


def _warn_of_range(specs: Sequence[StageSpec], counts: Sequence[int]) -> None:
    for spec, n in zip(specs, counts, strict=True):
        if n > spec.replicas.max:
            _warn(
                f"stage {spec.name!r} needs {n:,} replicas, the pool file allows {spec.replicas.max:,}: raise its "
                "replicas' max"
            )


def _warn(message: str) -> None:
    warnings.warn(message, CaucWarning, stacklevel=4)
