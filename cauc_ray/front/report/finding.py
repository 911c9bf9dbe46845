"""What a folder in which somebody worked holds: the policy to report on, its logit table, and what was made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauc_ray.data.files import read_json
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.front.inspection import inspect_path
from cauc_ray.policies.policy import Policy

# Below the folder.
MOST_LEVELS = 2
_WORTH_A_LOOK = (".json", ".parquet")
# In a message; beyond that it says how many more there are.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class Found:
    """A policy with its file, the table it is to be measured on, and what lies beside them.

    run, sweep: paths; None where there is none of this policy or of its models.   comparison: the folder of one.
    other_runs: folders of runs of other policies.   unreadable: why files and folders that are ours were left out.
    """

    policy: Policy
    policy_file: Path
    logits: Path
    run: Path | None
    comparison: Path | None
    sweep: Path | None
    other_runs: tuple[Path, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Thing:
    """A file or folder that was recognised, and what it tells of itself."""

    path: Path
    about: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.about["kind"])


def find(
    folder: str | Path, policy: str | Path | None = None, logits: str | Path | None = None, *, split: str = "test"
) -> Found:
    """Find what there is to report on in a folder and two levels below it.

    policy, logits: which to take, where there are several. Without a policy the one that a run there was of is taken.
    split: of sweeps and comparisons that count.
    Raises DataError where the folder, a policy or a table is missing, ConfigError where one must be named.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"there is no folder {root}")
    things, refused, unreadable = _look(root)
    runs = [thing for thing in things if thing.kind == "run"]
    file = Path(policy) if policy is not None else _only_policy(root, things, runs, refused)
    chosen = Policy.load(file)
    tables = [thing.path for thing in things if thing.kind == "logit table"]
    table = Path(logits) if logits is not None else _only_table(root, tables)
    own = [thing for thing in runs if thing.about.get("policy_id") == chosen.id]
    newest = max(own, key=lambda thing: str(thing.about["run_id"]), default=None)
    models = list(chosen.models)
    return Found(
        policy=chosen,
        policy_file=file,
        logits=table,
        run=None if newest is None else newest.path,
        comparison=_comparison(things, models, split),
        sweep=_sweep(things, models, split),
        other_runs=tuple(thing.path for thing in runs if thing not in own),
        unreadable=unreadable,
    )


def _look(root: Path) -> tuple[list[_Thing], list[str], tuple[str, ...]]:
    """Return what is recognised, why files that might be policies are none, and why others cannot be read."""
    things: list[_Thing] = []
    refused: list[str] = []
    unreadable: list[str] = []
    for path in _candidates(root, MOST_LEVELS):
        if any(path.glob("model=*")):
            things.append(_Thing(path, {"kind": "logit table"}))  # its rows are read, and counted, later
            continue
        try:
            things.append(_Thing(path, inspect_path(path)))
        except CaucError as error:
            (refused if path.suffix == ".json" else unreadable).append(str(error))
    # Of a file that says which format it has there is more to tell than of one that is of no format of ours.
    refused.sort(key=lambda why: "its format is None" in why)
    return things, refused, tuple(unreadable)


def _candidates(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the folder and all below it that may be ours, by name; what lies inside of tables and runs is theirs."""
    if any(folder.glob("model=*")) or (folder / "summary.json").is_file():
        yield folder
        if levels < MOST_LEVELS:
            return
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        if levels < MOST_LEVELS:  # somebody else's
            return
        raise DataError(f"{folder} cannot be read: {error.strerror}") from error
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            if levels and "=" not in entry.name:
                yield from _candidates(entry, levels - 1)
        elif entry.suffix in _WORTH_A_LOOK and entry.name != "summary.json":
            yield entry


def _only_policy(root: Path, things: Sequence[_Thing], runs: Sequence[_Thing], refused: Sequence[str]) -> Path:
    policies = [thing for thing in things if thing.kind == "policy"]
    if not policies:
        why = f" ({refused[0]})" if refused else ""
        raise DataError(
            f"{root} holds no policy, down to {MOST_LEVELS} levels below it{why}; "
            "make one with cauc fit, or name it with --policy"
        )
    by_id = {thing.about["policy_id"]: thing.path for thing in reversed(policies)}
    if len(by_id) == 1:
        return policies[0].path
    run_of = {thing.about.get("policy_id") for thing in runs} & set(by_id)
    if len(run_of) == 1:
        return by_id[run_of.pop()]
    raise ConfigError(f"{root} holds {len(by_id)} policies ({_named(policies)}); name one with --policy")


def _only_table(root: Path, tables: Sequence[Path]) -> Path:
    if not tables:
        raise DataError(
            f"{root} holds no logit table, down to {MOST_LEVELS} levels below it; name the policy's with --logits"
        )
    if len(tables) > 1:
        names = ", ".join(map(str, tables[:_MOST_NAMED]))
        raise ConfigError(f"{root} holds {len(tables)} logit tables ({names}); name the policy's with --logits")
    return tables[0]


def _named(things: Sequence[_Thing]) -> str:
    named = ", ".join(str(thing.path) for thing in things[:_MOST_NAMED])
    more = len(things) - _MOST_NAMED
    return f"{named} and {more} more" if more > 0 else named


def _comparison(things: Sequence[_Thing], models: list[str], split: str) -> Path | None:
    """Return the folder of the first comparison of these models on that split."""
    for thing in things:
        beside = thing.path.with_name("comparison.json")
        if thing.kind != "curves of a comparison" or not beside.is_file():
            continue
        about = read_json(beside)
        splits = about.get("splits") if isinstance(about, dict) else None
        if isinstance(splits, dict) and (splits.get("final"), about.get("models")) == (split, models):
            return thing.path.parent
    return None


def _sweep(things: Sequence[_Thing], models: list[str], split: str) -> Path | None:
    """Return the first sweep of these models on that split."""
    for thing in things:
        at = thing.about
        if thing.kind == "sweep" and (at.get("split"), at.get("models")) == (split, ",".join(models)):
            return thing.path
    return None
