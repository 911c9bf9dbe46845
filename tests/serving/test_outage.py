"""A later stage that is down: degraded answers at once, and whole ones soon after it is back. In virtual time."""

import asyncio

import pytest
from fake_stages import Stage, a_pool, cascade_of, timed_answer
from synthetic import chain
from virtual_time import run_virtually

from cauc_ray.errors import ExecutionError
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay
from cauc_ray.serving.request_state import StageError

DATA = chain(3, n=240, strengths=(1.0, 2.4))
POLICY = fit_rf(DATA, DATA, ThresholdRule(threshold=0.9))
EXPECTED = replay(POLICY, DATA)
TIMEOUT_S, OUTAGE_S, AFTER_S, PER_S = 2.0, 30.0, 8.0, 5
# A request that waits for no stage that is down takes less.
AT_ONCE_S = 0.2
REFUSED = "ConnectionRefusedError: [Errno 111] Connection refused"
# What answers say of each fault.
REASONS = {"hangs": "has not answered within 2 s", "has no server": "large does not answer"}
REASONS |= {"refuses": REFUSED, "fails late": REFUSED}


async def answers_around_outage(fault, from_s, to_s, n_replicas):
    """Ask steadily before, during and after an outage of the second stage, which is some milliseconds away.

    Returns the answers, the stage, when it was called, and what is counted.
    """
    clock, calls = asyncio.get_running_loop().time, []

    async def reached(call, batch):
        calls.append(clock())
        is_out = from_s <= clock() < to_s
        if is_out and fault == "hangs":
            await asyncio.sleep(1e6)
        await asyncio.sleep(0.7 * TIMEOUT_S if is_out and fault == "fails late" else 0.02)
        if is_out:
            raise ExecutionError(REASONS[fault]) if fault == "has no server" else StageError("failed", REFUSED)

    cloud = Stage("logits1", before=reached, n_replicas=n_replicas)
    cascade, counts = cascade_of(a_pool(DATA.models, "degrade", timeout_s=TIMEOUT_S), [Stage("logits0"), cloud])
    n = int((to_s + AFTER_S) * PER_S)
    requests = (timed_answer(cascade, POLICY, DATA.logits, [at % 240], at / PER_S) for at in range(n))
    return await asyncio.gather(*requests), cloud, calls, counts


@pytest.mark.parametrize("fault", REASONS)
@pytest.mark.parametrize(("from_s", "n_replicas"), [(0.0, 1), (5.0, 1), (5.0, 3)])
def test_answers_are_degraded_at_once_during_an_outage_and_whole_after_it(fault, from_s, n_replicas):
    """from_s: 0 where the stage has never answered."""
    to_s = from_s + OUTAGE_S
    answers, cloud, calls, counts = run_virtually(answers_around_outage(fault, from_s, to_s, n_replicas))
    assert len(answers) == (to_s + AFTER_S) * PER_S
    noticed_s, back_s = from_s + TIMEOUT_S + 0.5, to_s + TIMEOUT_S + 2.0
    for number, (answer, took_s) in enumerate(answers):
        row, at = number % 240, number / PER_S
        deferred = EXPECTED.stages[row] > 0
        assert took_s < TIMEOUT_S + AT_ONCE_S
        if noticed_s <= at < to_s - AT_ONCE_S:
            assert took_s < AT_ONCE_S
            assert bool(answer.degraded[0]) == deferred
            assert not deferred or ("is down" in answer.reason and REASONS[fault] in answer.reason)
        elif at < from_s - AT_ONCE_S or at > back_s:
            assert not answer.degraded.any()
            assert answer.predictions[0] == EXPECTED.predictions[row]
        if answer.degraded.any():
            assert (answer.stages[0], answer.predictions[0]) == (0, POLICY.start(DATA.logits[0][[row]]).predictions[0])
    n_degraded = counts.of("degraded")
    assert sum(n_degraded.values()) == sum(answer.degraded.sum() for answer, _ in answers)
    assert fault != "hangs" or n_degraded["m1", "timeout"] > 0
    probes = [at for at in calls if noticed_s <= at < to_s]
    assert 5 < len(probes) < 2 * n_replicas * OUTAGE_S
    assert cloud.n_started == n_replicas  # another one would find the same
