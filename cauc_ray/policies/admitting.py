"""Whether validation, which has no part in a fusion's fit, supports it: its answers against the stage's own."""

from __future__ import annotations

from functools import partial

from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.intervals import Signs, signs, signs_of
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import RFStage
from cauc_ray.policies.trace import answers_alone, trace_policy


def admit_in_base(policy: BasePolicy, validation: Chain | None) -> BasePolicy:
    """Return a policy that fuses what is supported.

    A model stays where its gains over its losses on calibration are established; all of them, where what they make of
    the last stage's answers is established to be a gain on validation, if that is given, with all of its labels.
    """
    stages = [stage.model_copy(update={"fused": _gains(stage, policy.calibration.n)}) for stage in policy.stages[:-1]]
    admitted = policy.model_copy(update={"stages": (*stages, policy.stages[-1])})
    if validation is None or not any(stage.fused for stage in stages):
        return admitted
    fused = trace_policy(admitted, validation).predictions[:, -1] == validation.labels
    if signs_of(fused, answers_alone(admitted, validation)[:, -1] == validation.labels).gains:
        return admitted
    refused = (stage.model_copy(update={"fused": False}) for stage in stages)
    return policy.model_copy(update={"stages": (*refused, policy.stages[-1])})


def _gains(stage: BaseStage, n: int) -> bool:
    assert stage.n_gain is not None
    assert stage.n_loss is not None
    return signs(stage.n_gain, stage.n_loss, n).gains


def signs_of_fusion(chain: Chain, stages: tuple[RFStage, ...]) -> Signs:
    """Return the gains and losses of a recursive fusion's answers against those of its last stage by itself.

    stages: up to the one in question.   chain: of these and maybe more models, all rows labelled.
    """
    parts = chain.each(partial(_count_part, stages))
    return signs(sum(gains for gains, _ in parts), sum(losses for _, losses in parts), len(chain))


def _count_part(stages: tuple[RFStage, ...], part: ChainPart) -> tuple[int, int]:
    n_gain = n_loss = 0
    for rows in part.blocks():
        labels = part.labels[rows]
        r: Floats | None = None
        for logits, stage in zip(part.logits, stages, strict=False):
            own = stage.calibrator.scores(logits[rows])
            r = stage.fold(own, r)
        assert r is not None
        found = signs_of(r.argmax(axis=1) == labels, own.argmax(axis=1) == labels)
        n_gain, n_loss = n_gain + found.n_gain, n_loss + found.n_loss
    return n_gain, n_loss
