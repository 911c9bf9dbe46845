"""How many replicas sustain a rate of requests, and what they cost: the Python side of `cauc plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeAlias

from pydantic import Field

from cauc_ray.api.options import Common, Flag, InputPath, options_of
from cauc_ray.display import count_text
from cauc_ray.errors import ConfigError, warn
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.pool import Pool, StageSpec, load_pool
from cauc_ray.planning.figures import PlannedChain, plan_figures
from cauc_ray.planning.plan_sheet import Plan
from cauc_ray.planning.sizing import Trials, sized
from cauc_ray.planning.stages import PlannedStage, RouterSeconds
from cauc_ray.planning.timings import declared_timing, read_earlier_run
from cauc_ray.policies.policy import Policy, policy_of

# Seconds of a router on one core, about.
ROUTER = RouterSeconds(per_request=0.001, per_call=0.003)
# Times below the least are equal.
PlannedAmount: TypeAlias = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]


def plan(
    pool: str | AnyPath | Pool,
    policy: str | AnyPath | Policy,
    rate: Common[PlannedAmount],
    *,
    slo_p99_s: Common[Annotated[PlannedAmount, Flag("S", spellings=("--slo-p99",))] | None] = None,
    ledger: Common[InputPath | None] = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> Plan:
    """Plan the replicas of a policy's chain for a rate of requests a second, one row each, that come independently.

    Without a ledger, stages take the seconds that the pool declares: those of a saved stage, or a cost in seconds.

    Args:
        pool: A pool file. In Python also a Pool.
        policy: A policy file that records how often its stages defer, as fits with labelled validation write it. In
            Python also a Policy.
        rate: Requests per second, one row each.
        slo_p99_s: Seconds within which 99 of 100 requests must be answered.
        ledger: Output of an earlier `cauc run`, whose calls say how long batches take.
        on_step: Called with what is being done.

    Returns:
        The stages with their replicas, load and cost, the latency, totals, and what the pool's own replicas can carry.

    Raises:
        CaucError: For the pool, the policy, or the source of the seconds of batches.
    """
    options = options_of(plan).of(locals())
    rate, slo_p99_s = options.rate, options.slo_p99_s
    pool = pool if isinstance(pool, Pool) else load_pool(pool)
    policy = policy_of(policy)
    specs, deferral = pool.chain(policy.models), expected_deferral(policy)
    earlier = None if ledger is None else read_earlier_run(ledger, policy.models)
    timings = [declared_timing(spec) if earlier is None else earlier.timings[spec.name] for spec in specs]
    for spec, timing in zip(specs, timings, strict=True):
        timing.check(spec.name, _served_batch(spec))
    served = [
        PlannedStage(spec.name, _served_batch(spec), spec.serving.batch_wait_s, timing, share)
        for spec, timing, share in zip(specs, timings, deferral, strict=True)
    ]
    trials = Trials(served, rate, ROUTER)
    chain = PlannedChain(specs, policy, trials, pool.serving.router.replicas.max, slo_p99_s)
    on_step("sizing")
    sizing = sized(trials, slo_p99_s)
    needed = {f"stage {spec.name!r}": (n, spec.replicas.max) for spec, n in zip(specs, sizing.counts, strict=True)}
    for name, (n, most) in (needed | {"serving.router": (trials.router.replicas, chain.most_routers)}).items():
        if n > most:
            warn(f"{name} needs {count_text(n, 'replica')}, the pool file allows {most:,}: raise its replicas' max")
    return Plan(pool=pool.name, policy_id=policy.id, **plan_figures(chain, sizing, earlier))


def expected_deferral(policy: Policy) -> list[float]:
    """Return the share of its rows that each stage defers, 0 for the last. Raises ConfigError where it is unknown."""
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


def _served_batch(spec: StageSpec) -> int:
    return spec.serving.batch_size or spec.batch_size
