"""Guards on what a policy gets right: against its models alone, and what fusion does to each stage's answers."""

from __future__ import annotations

from collections.abc import Iterator

from cauc_ray.numbers.signs import Signs, signs, signs_of
from cauc_ray.numbers.types import Bools, Ints
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy


def below_single(
    models: tuple[str, ...], affordable: list[int], correct: Bools, alone: Bools, split: str
) -> Guard | None:
    """Say whether the best of the models that cost no more than the policy is right more often.

    affordable: their places; None without any.   correct: bool (n,), of the policy.   alone: bool (n, M), the models.
    """
    if not affordable:
        return None
    best = max(affordable, key=lambda place: (alone[:, place].sum(), -place))
    found = signs_of(correct, alone[:, best])
    own, single = float(correct.mean()), float(alone[:, best].mean())
    fired = own < single
    says = (
        f"on {split} the policy answers {100 * own:.1f} % right, {models[best]} alone, which costs no more, "
        f"{100 * single:.1f} % ({told(found)})"
    )
    numbers = {"accuracy": own, "single_accuracy": single, **figures(found)}
    return Guard(name="below-single-model", stage=models[best], fired=fired, says=says, figures=numbers)


def fusion_guards(policy: Policy, fused: Bools, alone: Bools, stops: Ints, split: str) -> Iterator[Guard]:
    """Say of every fusion whether its sign is established, and whether it hurts the examples that reach it.

    fused: bool (n, M), whether the answer at each stage is right.   alone: bool (n, M), whether its model's own is.
    stops: int (n,), where each example stops.
    """
    if isinstance(policy, BasePolicy):
        yield from _of_base(policy)
        fusing = [len(policy.stages) - 1] if any(stage.fused for stage in policy.stages[:-1]) else []
    else:
        assert isinstance(policy, RFPolicy)
        fusing = [place for place, stage in enumerate(policy.stages) if place and stage.fused]
        for place in fusing:
            yield _of_rf(policy.stages[place].name, signs_of(fused[:, place], alone[:, place]), split)
    for place in fusing:
        rows = stops >= place
        if not rows.any():
            continue
        found, name = signs_of(fused[rows, place], alone[rows, place]), policy.stages[place].name
        word = "spoils more than it mends of" if found.loses else "is not shown to spoil"
        says = f"{name}: fusion {word} its answers to the examples of {split} that reach it ({told(found)})"
        yield Guard(name="fusion-hurts", stage=name, fired=found.loses, says=says, figures=figures(found))


def _of_base(policy: BasePolicy) -> Iterator[Guard]:
    """Judge the complementarity rates, admitted or refused; a rate made of no row's difference decides nothing."""
    for stage in policy.stages[:-1]:
        if stage.n_gain is None or stage.n_loss is None:
            continue
        found = signs(stage.n_gain, stage.n_loss, policy.calibration.n)
        word = "within" if found.open else "beyond"
        says = (
            f"{stage.name}: fusing it with {policy.stages[-1].name} is {'admitted' if stage.fused else 'refused'} "
            f"{word} the noise of its complementarity rate on {policy.calibration.split} ({told(found)})"
        )
        yield Guard(name="fusion-within-noise", stage=stage.name, fired=found.open, says=says, figures=figures(found))


def _of_rf(name: str, found: Signs, split: str) -> Guard:
    """Judge a recursive fusion, which is always admitted: it must be established to mend more than it spoils."""
    fired = found.n_gain + found.n_loss > 0 and not found.gains
    word = "spoils more than it mends of" if found.loses else "is within its noise on" if fired else "mends"
    says = f"{name}: fusion with the stages before {word} its answers on {split} ({told(found)})"
    return Guard(name="fusion-within-noise", stage=name, fired=fired, says=says, figures=figures(found))


def told(found: Signs) -> str:
    """Return gains and losses in words."""
    return (
        f"{found.n_gain:,} gained, {found.n_loss:,} lost of {found.n:,}: {100 * found.rate:+.2f} points, 90 % interval "
        f"{100 * found.low:+.2f} to {100 * found.high:+.2f}, one-sided p = {min(found.p_gain, found.p_loss):.2g}"
    )


def figures(found: Signs) -> dict[str, float]:
    """Return gains and losses as a guard keeps them."""
    return {
        "n": float(found.n),
        "n_gain": float(found.n_gain),
        "n_loss": float(found.n_loss),
        "rate": found.rate,
        "low": found.low,
        "high": found.high,
        "p_gain": found.p_gain,
        "p_loss": found.p_loss,
    }
