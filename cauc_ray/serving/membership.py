"""Which replicas of stages Serve runs and stops, as the handles of this process have learnt.

It is a module of its own because Serve gives each handle a copy of the class of its request router, and of all values
of that class's module.
"""

from __future__ import annotations

# By deployment and name: whether Serve runs the replica, or stops it.
_runs: dict[tuple[str, str], bool] = {}


def note(deployment: str, replica: str, *, runs: bool) -> None:
    """Note that Serve runs or stops a replica."""
    _runs[deployment, replica] = runs


def forget(deployment: str, replica: str) -> None:
    """Note that a replica has ended."""
    _runs.pop((deployment, replica), None)


def replicas_of(deployment: str) -> dict[str, bool]:
    """Return the replicas of a deployment that have not ended, by name: whether Serve runs or stops each."""
    return {replica: runs for (name, replica), runs in _runs.copy().items() if name == deployment}
