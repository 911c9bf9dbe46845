"""Where each stage's answers went wrong, and who would have been right."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.types import Bools
from cauc_ray.reporting.measured import Measured

MOST_PAIRS = 6
MOST_EXAMPLES = 5
# How sure the wrong answers were, in as many bars.
N_BARS = 10


@dataclass(frozen=True, slots=True)
class Pair:
    """A label and what was answered instead, so many times."""

    label: int
    answer: int
    n: int


@dataclass(frozen=True, slots=True)
class WrongAnswer:
    """One example that was answered wrong."""

    example: str
    label: int
    answer: int
    confidence: float


@dataclass(frozen=True, slots=True)
class StageMistakes:
    """What went wrong among the n examples that a stage answered; every count is of these.

    avoidable: wrong here, and the last model by itself is right.   hopeless: wrong, and no model is right by itself.
    elsewhere: wrong, and another model but the last is right.   spoilt: the stage's own model is right by itself,
    the answer (fused with others) wrong.   rescued: the reverse.   confidences: quartiles of the wrong ones', None
    without any.   bars: of the wrong ones, how many in each tenth of [0, 1].   surest: the most confident of them.
    """

    name: str
    n: int
    wrong: int
    accuracy: Share
    avoidable: int
    hopeless: int
    elsewhere: int
    spoilt: int
    rescued: int
    confidences: tuple[float, float, float] | None
    bars: tuple[int, ...]
    pairs: tuple[Pair, ...]
    surest: tuple[WrongAnswer, ...]


def find_mistakes(measured: Measured) -> tuple[StageMistakes, ...]:
    """Find them on test, stage by stage."""
    chain, replay = measured.test, measured.evaluation.replay
    alone: Bools = np.stack([logits.argmax(axis=1) == chain.labels for logits in chain.logits], axis=1)
    return tuple(
        _of_stage(measured, name, np.flatnonzero(replay.stages == place), alone, place)
        for place, name in enumerate(chain.models)
    )


def _of_stage(measured: Measured, name: str, rows: np.ndarray, alone: Bools, place: int) -> StageMistakes:
    chain, replay = measured.test, measured.evaluation.replay
    right = replay.predictions[rows] == chain.labels[rows]
    wrong = rows[~right]
    by_last, by_any = alone[wrong, -1], alone[wrong].any(axis=1)
    confidences = replay.confidences[wrong]
    pairs = Counter(zip(chain.labels[wrong].tolist(), replay.predictions[wrong].tolist(), strict=True))
    in_order = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    # Among equals by id: the order in which the files lay shall not matter.
    surest = sorted(wrong.tolist(), key=lambda row: (-replay.confidences[row], chain.example_ids[row]))
    counts, _ = np.histogram(confidences, bins=N_BARS, range=(0.0, 1.0))
    return StageMistakes(
        name=name,
        n=len(rows),
        wrong=len(wrong),
        accuracy=share(int(right.sum()), len(rows)),
        avoidable=int(by_last.sum()),
        hopeless=int((~by_any).sum()),
        elsewhere=int((by_any & ~by_last).sum()),
        spoilt=int(alone[wrong, place].sum()),
        rescued=int((~alone[rows[right], place]).sum()),
        confidences=tuple(np.quantile(confidences, [0.25, 0.5, 0.75]).tolist()) if len(wrong) else None,
        bars=tuple(counts.tolist()),
        pairs=tuple(Pair(label, answer, n) for (label, answer), n in in_order[:MOST_PAIRS]),
        surest=tuple(
            WrongAnswer(
                chain.example_ids[row],
                int(chain.labels[row]),
                int(replay.predictions[row]),
                float(replay.confidences[row]),
            )
            for row in surest[:MOST_EXAMPLES]
        ),
    )
