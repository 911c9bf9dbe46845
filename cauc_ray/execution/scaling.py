"""How many replicas each stage should have: a plain function of the work that waits, without Ray."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A replica more is started where each one there has so many seconds of work waiting, and one is let go where all
# have had none for so long.
ENOUGH_S = 2.0
IDLE_S = 20.0
# A replica moves to another stage that has so many times as much waiting for each of its own.
MORE = 4.0


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage's replicas and what waits for them.

    live, starting: replicas that work, and that are being placed or are loading their model.   least, most: the
    range of the pool file.   backlog_s: seconds of one replica's work that wait, None while unknown.
    pressed: its queue, whose length is bounded, is half full or more, so that more may wait behind it.
    held_back: it may send nothing on, whatever waits.   idle_s: for how long nothing has waited.
    refused: a replica that could not be placed was lately given up.
    """

    live: int
    starting: int
    least: int
    most: int
    backlog_s: float | None
    idle_s: float
    pressed: bool = False
    held_back: bool = False
    refused: bool = False

    @property
    def n(self) -> int:
        """Return the replicas that there are or will be."""
        return self.live + self.starting

    @property
    def each_s(self) -> float:
        """Return the seconds of work that wait for each replica and could be done."""
        return 0.0 if self.held_back else (self.backlog_s or 0.0) / max(1, self.n)

    @property
    def needy(self) -> bool:
        """Return whether one more replica would help."""
        return self.least <= self.n < self.most and (
            self.each_s > ENOUGH_S or (self.pressed and not self.held_back and self.backlog_s is not None)
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Stages that get a replica more, and stages that let one go."""

    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


def scale(loads: Sequence[StageLoad], *, n_unplaced: int, may_move: bool = True) -> Change:
    """Return which stages get a replica and which let one go.

    n_unplaced: replicas that wait for a place on the cluster. While one beyond the stages' least numbers waits, no
    other is asked for: instead the stage with the least to do, if it has much less to do than the neediest, lets
    one go, whose place the waiting one then takes.   may_move: no replica has moved so just now.
    """
    start = [stage for stage, load in enumerate(loads) for _ in range(load.least - load.n)]
    needy = [stage for stage, load in enumerate(loads) if load.needy]
    neediest = max(needy, key=lambda stage: loads[stage].each_s, default=None)
    if n_unplaced or start:
        waiting = [stage for stage, load in enumerate(loads) if load.starting]
        for_whom = max(waiting, key=lambda stage: loads[stage].each_s, default=neediest)
        donor = _donor(loads, for_whom) if n_unplaced and may_move and for_whom is not None else None
        return Change(tuple(start), () if donor is None else (donor,))
    willing = [stage for stage in needy if not loads[stage].refused]
    if willing:
        return Change(start=(max(willing, key=lambda stage: loads[stage].each_s),))
    idle = [stage for stage, load in enumerate(loads) if load.live > load.least and load.idle_s >= IDLE_S]
    return Change(stop=tuple(idle[:1]))


def _donor(loads: Sequence[StageLoad], needy: int) -> int | None:
    """Return the stage with the least work for each of its spare replicas, if that is little compared with a needy one.

    Its others must be able to take over what it has to do.
    """
    spare = [
        (load.each_s, stage)
        for stage, load in enumerate(loads)
        if stage != needy and load.live > load.least and not load.starting and load.backlog_s is not None
    ]
    if not spare:
        return None
    each_s, stage = min(spare)
    return stage if max(each_s, 0.1) * MORE < max(loads[needy].each_s, ENOUGH_S) else None
