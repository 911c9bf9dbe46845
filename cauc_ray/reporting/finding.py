"""What a report is of: a policy and its logit table, and a run and a comparison where there are any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa

from cauc_ray.api.sources import option_names
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import AnyPath, path_of, visible
from cauc_ray.policies.policy import Policy

# Of a run's summary, and of each of its stages, what is shown.
_OF_RUN = {"run_id", "policy_id", "n", "n_failed", "cost_unit", "run_s", "elapsed_s", "stages"}
_OF_STAGE = {
    *("name", "reached", "answered", "failed", "calls", "batch_fill"),
    *("compute_s", "busy_share", "queue_s", "cost", "cost_share"),
}

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a report must have.

    Attributes:
        policy: The policy.
        policy_file: Its file, None for a policy that is not from a file.
        logits: The table that it was fitted on.
    """

    policy: Policy
    policy_file: AnyPath | None
    logits: AnyPath

    @property
    def policy_name(self) -> str:
        """Return the policy's file, for messages and commands; policy.json for a policy that is not from a file."""
        return str(self.policy_file or "policy.json")


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the policy.

    Attributes:
        path: Its folder.
        summary: Its summary.json.
        used: By stage, how many replicas and nodes answered.
    """

    path: AnyPath
    summary: dict[str, Any]
    used: dict[str, tuple[int, int]]


def find(folder: AnyPath, policy: str | AnyPath | Policy | None, logits: str | AnyPath | None) -> Inputs:
    """Find a policy and its table: what is named, else FOLDER/policy.json and FOLDER/logits or LOGITS.

    Without FOLDER/policy.json the only policy in FOLDER/policies counts, or of several the one that FOLDER/run is of.
    Raises DataError where the folder, a policy or a table is missing, ConfigError where a policy must be named.
    """
    if not folder.is_dir():
        raise DataError(f"folder {folder} does not exist")
    file = None if isinstance(policy, Policy) else path_of(policy) if policy is not None else _policy_file(folder)
    if logits is None:
        logits = next((folder / name for name in ("logits", "LOGITS") if (folder / name).is_dir()), None)
    chosen = policy if isinstance(policy, Policy) else Policy.load(file or "")
    if logits is None:
        raise DataError(f"{folder} has no logit table in logits or LOGITS; name the policy's with --logits")
    return Inputs(chosen, file, path_of(logits))


def _policy_file(folder: AnyPath) -> AnyPath:
    if (folder / "policy.json").is_file():
        return folder / "policy.json"
    policies = folder / "policies"
    files = [file for file in visible(policies) if file.suffix == ".json"] if policies.is_dir() else []
    if not files:
        raise DataError(f"{folder} has no policy.json; make one with cauc fit, or name the policy with --policy")
    if len(files) > 1 and (folder / "run").is_dir():
        of_run = _read_summary(folder / "run")["policy_id"]
        files = [file for file in files if Policy.load(file).id == of_run] or files
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise ConfigError(f"{folder} holds {len(files)} policies ({names}); name one with --policy")
    return files[0]


def read_part(
    named: str | AnyPath | None, usual: AnyPath, read: Callable[[AnyPath], _Read], left_out: list[str]
) -> _Read | None:
    """Read a part that a report may lack.

    Args:
        named: The path that the caller gave; an error is raised where it cannot be used.
        usual: Its path otherwise; where it cannot be used, a line is added to left_out.
        read: Reads it.
        left_out: Lines on parts that are left out.

    Returns:
        The part, None without one.
    """
    if named is not None:
        return read(path_of(named))
    try:
        return read(usual) if usual.exists() else None
    except CaucError as error:
        left_out.append(str(error))
        return None


def read_run(path: AnyPath, policy: Policy) -> Run:
    """Read a run's summary and ledger. Raises DataError where they are malformed, or of another policy."""
    summary, ledger = _read_summary(path), path / "ledger"
    models = [stage["name"] for stage in summary["stages"]]
    if summary["policy_id"] != policy.id or models != list(policy.models):
        of = f"{summary['policy_id']} of {' → '.join(map(str, models))}"
        raise DataError(f"{path} is a run of another policy, {of}, not of {policy.id} of {' → '.join(policy.models)}")
    keys = ["stage", "replica", "node"]
    calls = [read_parquet(file, keys) for file in (parquet_below(ledger) if ledger.is_dir() else ())]
    if any(table.num_columns < len(keys) for table in calls):
        raise DataError(f"{ledger} is not a run's ledger: it lacks one of the columns {', '.join(keys)}")
    empty = pa.table({key: pa.array([], pa.string()) for key in keys})
    distinct = pa.concat_tables([table.group_by(keys).aggregate([]) for table in calls] or [empty])
    counts = distinct.group_by("stage").aggregate([(key, "count_distinct") for key in keys[1:]]).to_pylist()
    used = {row["stage"]: (row["replica_count_distinct"], row["node_count_distinct"]) for row in counts}
    return Run(path, summary, used)


def _read_summary(run: AnyPath) -> dict[str, Any]:
    summary = read_json(run / "summary.json")
    if not isinstance(summary, dict) or not summary.keys() >= _OF_RUN:
        raise DataError(f"{run / 'summary.json'} is not the summary of a run")
    for stage in summary["stages"]:
        if not isinstance(stage, dict) or not stage.keys() >= _OF_STAGE:
            raise DataError(f"{run / 'summary.json'} lacks some of {', '.join(sorted(_OF_STAGE))} of a stage")
    return summary


def class_names(table: AnyPath, run: Run | None) -> dict[int, str]:
    """Return the names of classes by index: of the table's pool.json, else those that the run's pool had."""
    if names := option_names(table):
        return dict(enumerate(names))
    keys = ["prediction", "prediction_label"]
    answers = run.path / "predictions" if run is not None else None
    for file in parquet_below(answers)[:1] if answers is not None and answers.is_dir() else ():
        named = read_parquet(file, keys)
        if named.num_columns == len(keys):
            pairs = named.group_by(keys).aggregate([]).to_pylist()
            return {row["prediction"]: row["prediction_label"] for row in pairs if row["prediction_label"] is not None}
    return {}
