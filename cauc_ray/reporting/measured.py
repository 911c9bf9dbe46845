"""The splits of a report's table, and that they are those which its policy was fitted on."""

from __future__ import annotations

from dataclasses import dataclass

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.sources import read_policy_chain
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.calibrators import UNCALIBRATED
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.evidence import FittedOn
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.policy_file import Stage
from cauc_ray.policies.trace import Trace, trace_policy
from cauc_ray.reporting.finding import Found


@dataclass(frozen=True, slots=True)
class Measured:
    """A policy on its splits.

    validation: None where the policy had none, or one without all labels.   trace: of test.   split: what test is.
    """

    policy: Policy
    calibration: ChainLogits
    validation: ChainLogits | None
    test: ChainLogits
    trace: Trace
    evaluation: Evaluation
    split: str


def measure_policy(found: Found, split: str) -> Measured:
    """Read the splits of the policy's table, check that it is the policy's, and replay the policy on one of them.

    Raises DataError where the table lacks a split or labels, or is not what the policy was fitted on; ConfigError
    where the split is one that the policy was fitted or chosen on.
    """
    policy = found.policy
    table = LogitTable(found.logits)
    for model in policy.models:
        if model not in table.models:
            raise DataError(f"{found.logits} has no model {model!r}, which the policy {found.policy_name} is for")
    fitted_on = [at for at in (policy.calibration, policy.validation) if at is not None]
    if split in [at.split for at in fitted_on]:
        raise ConfigError(f"split {split!r} is what the policy was fitted or chosen on; measure it on another")
    chains = [_read(found, at) for at in fitted_on]
    for place, stage in enumerate(policy.stages):
        there, here = stage.diagnostics.logits_fingerprint, chains[0].logits_fingerprint(place)
        if there != here:
            raise DataError(
                f"the logits of {stage.name!r} in {found.logits} are not those that {found.policy_name} was fitted "
                f"on (fingerprint {here}, not {there}); name the right table with --logits, or fit again"
            )
    test = read_policy_chain(found.logits, policy, split)
    test.require_labels("a report")
    validation = chains[1] if len(chains) > 1 and chains[1].labelled.all() else None
    evaluation = Evaluation.of(policy, test)
    return Measured(policy, chains[0], validation, test, trace_policy(policy, test), evaluation, split)


def _read(found: Found, at: FittedOn) -> ChainLogits:
    chain = read_policy_chain(found.logits, found.policy, at.split)
    here = chain.examples_fingerprint()
    if here != at.examples_fingerprint:
        raise DataError(
            f"split {at.split!r} of {found.logits} holds other examples than {found.policy_name} was fitted on "
            f"(fingerprint {here}, not {at.examples_fingerprint}); name the right table with --logits, or fit again"
        )
    return chain


def stage_confidences(stage: Stage, logits: Floats, *, calibrated: bool) -> tuple[Ints, Floats]:
    """Return a model's own answers, int32 (N,), and confidences, float64 (N,), before or after its calibration."""
    calibrator = stage.calibrator if calibrated else UNCALIBRATED
    return calibrator.answers(calibrator.scores(logits, stage.name))
