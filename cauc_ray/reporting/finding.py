"""What a folder in which somebody worked holds: the policy to report on, its logit table, and what was made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cauc_ray.api.contents import contents
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import open_parquet
from cauc_ray.policies.policy import Policy

# Below the folder.
MOST_LEVELS = 2
_WORTH_A_LOOK = (".json", ".parquet")
# In a message; beyond that it says how many more there are.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True)
class CurveFile:
    """Curves of methods in the folder.

    path: of a sweep, or the folder of a comparison.   curves: the file that has them.   fingerprints: of the table that
    they were measured on, as the file has them.
    """

    path: Path
    is_comparison: bool
    fingerprints: object

    @property
    def curves(self) -> Path:
        """Return the file of the curves."""
        return self.path / "curves.parquet" if self.is_comparison else self.path


@dataclass(frozen=True, slots=True)
class Found:
    """A policy, the table it is to be measured on, and what lies next to them.

    policy_file: None for a policy that is not from a file.
    run: the folder of the run of this policy that has the most rows, the newest of these; None where there is none.
    curve_files: comparisons, then sweeps, of these models and that split.   runs_left_out, left_out: which runs, and
    which files with curves, are not shown, and why.   unreadable: why files and folders that are ours were left out.
    """

    policy: Policy
    policy_file: Path | None
    logits: Path
    run: Path | None
    curve_files: tuple[CurveFile, ...]
    runs_left_out: tuple[str, ...]
    left_out: tuple[str, ...]
    unreadable: tuple[str, ...]

    @property
    def policy_name(self) -> str:
        """Return the policy's file, for messages and commands; policy.json for a policy that is not from a file."""
        return str(self.policy_file or "policy.json")

    @property
    def comparison(self) -> Path | None:
        """Return the folder of the first comparison."""
        return next((file.path for file in self.curve_files if file.is_comparison), None)

    @property
    def sweep(self) -> Path | None:
        """Return the first sweep."""
        return next((file.path for file in self.curve_files if not file.is_comparison), None)


@dataclass(frozen=True, slots=True)
class _Thing:
    """A file or folder that was recognised, and what it tells of itself."""

    path: Path
    about: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.about["kind"])


def find(
    folder: str | Path,
    policy: str | Path | Policy | None = None,
    logits: str | Path | None = None,
    *,
    split: str = "test",
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
    if isinstance(policy, Policy):
        file, chosen = None, policy
    else:
        file = Path(policy) if policy is not None else _only_policy(root, things, runs, refused)
        chosen = Policy.load(file)
    tables = [thing.path for thing in things if thing.kind == "logit table"]
    table = Path(logits) if logits is not None else _only_table(root, tables)
    run, runs_left_out = _own_run(runs, chosen)
    curve_files, left_out = _curve_files(things, list(chosen.models), split)
    return Found(
        policy=chosen,
        policy_file=file,
        logits=table,
        run=run,
        curve_files=curve_files,
        runs_left_out=runs_left_out,
        left_out=left_out,
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
            things.append(_Thing(path, contents(path)))
        except CaucError as error:
            (refused if path.suffix == ".json" else unreadable).append(str(error))
    # Of a file that says which format it has there is more to tell than of one that is of no format of ours.
    refused.sort(key=lambda why: "its format is None" in why or "a JSON object" in why)
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
    # Copies count as one; policies that answer alike, and have one id, may still differ in costs or budget.
    distinct = list({json.dumps({**thing.about, "path": None}): thing for thing in reversed(policies)}.values())
    if len(distinct) == 1:
        return policies[0].path
    run_ids = {thing.about.get("policy_id") for thing in runs}
    of_runs = [thing for thing in distinct if thing.about["policy_id"] in run_ids]
    if len(of_runs) == 1:
        return of_runs[0].path
    raise ConfigError(f"{root} holds {len(distinct)} policies ({_named(policies)}); name one with --policy")


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


def _own_run(runs: Sequence[_Thing], policy: Policy) -> tuple[Path | None, tuple[str, ...]]:
    """Return the run of a policy that has the most rows, the newest of these, and why each other one is left out."""
    own, left_out = [], []
    for run in runs:
        stages, models = run.about.get("stages"), None
        with suppress(TypeError, KeyError):  # what is malformed is refused when it is read
            models = [str(stage["name"]) for stage in stages or ()]
        if run.about.get("policy_id") != policy.id:
            left_out.append(f"{run.path} is of another policy, {run.about.get('policy_id')}")
        elif models and models != list(policy.models):
            left_out.append(f"{run.path} is of other models, {' → '.join(models)}")
        else:
            own.append(run)
    own.sort(key=lambda run: (_n_rows(run), str(run.about["run_id"])), reverse=True)
    for run in own[1:]:
        why = "has fewer rows than" if _n_rows(run) < _n_rows(own[0]) else "is older than"
        of = f"{_n_rows(run):,} rows, pool {run.about.get('pool')!r}, run {run.about['run_id']}"
        left_out.append(f"{run.path} ({of}) {why} {own[0].path} ({_n_rows(own[0]):,} rows)")
    return own[0].path if own else None, tuple(left_out)


def _n_rows(run: _Thing) -> int:
    n = run.about.get("n")
    return n if isinstance(n, int) else 0


def _curve_files(
    things: Sequence[_Thing], models: list[str], split: str
) -> tuple[tuple[CurveFile, ...], tuple[str, ...]]:
    """Return the comparisons and sweeps of these models on that split, and why others are left out."""
    found, left_out = [], []
    for thing in things:
        if thing.kind == "sweep":
            metadata = _metadata(thing.path)
            of: tuple[object, object] = (metadata.get("models", "").split(","), metadata.get("split"))
            file = CurveFile(thing.path, False, _json(metadata.get("fingerprints", "")))
        elif thing.kind == "curves of a comparison":
            about = _about_comparison(thing.path.parent)
            of = (about.get("models"), about["splits"].get("final"))
            file = CurveFile(thing.path.parent, True, about.get("fingerprints"))
        else:
            continue
        if of == (models, split):
            found.append(file)
        else:
            left_out.append(f"{file.path} is not of {', '.join(models)} on {split}")
    return tuple(sorted(found, key=lambda file: not file.is_comparison)), tuple(left_out)


def _about_comparison(folder: Path) -> dict[str, Any]:
    """Return what a comparison says of itself, with splits at least."""
    about: Any = None
    with suppress(DataError):
        about = read_json(folder / "comparison.json")
    usable = isinstance(about, dict) and isinstance(about.get("splits"), dict)
    return about if usable else {"splits": {}}


def _metadata(path: Path) -> dict[str, str]:
    with open_parquet(path) as file:
        metadata = file.schema_arrow.metadata or {}
    return {key.decode(errors="replace"): value.decode(errors="replace") for key, value in metadata.items()}


def _json(text: str) -> object:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return None
