"""What a report is of: a policy and its logit table, and a run and a comparison where there are any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cauc_ray.api.summaries import RunSummary
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.files.paths import AnyPath, path_of, visible
from cauc_ray.policies.policy import Policy

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
        run_policy = RunSummary.load(folder / "run" / "summary.json")["policy_id"]
        files = [file for file in files if Policy.load(file).id == run_policy] or files
    if len(files) > 1:
        names = ", ".join(map(str, files))
        raise ConfigError(f"{folder} holds {len(files)} policies ({names}); name one with --policy")
    return files[0]


def read_part(
    named: str | AnyPath | None, usual: AnyPath, read: Callable[[AnyPath], _Read], left_out: list[str]
) -> tuple[AnyPath, _Read] | None:
    """Read a part that a report may lack.

    Args:
        named: The path that the caller gave; an error is raised where it cannot be used.
        usual: Its path otherwise; where it cannot be used, a line is added to left_out.
        read: Reads it.
        left_out: Lines on parts that are left out.

    Returns:
        Its path and the part, None without one.
    """
    if named is not None:
        return path_of(named), read(path_of(named))
    try:
        return (usual, read(usual)) if usual.exists() else None
    except CaucError as error:
        left_out.append(str(error))
        return None


def read_run(path: AnyPath, policy: Policy) -> RunSummary:
    """Read a run's summary. Raises DataError where it is malformed, or of another policy."""
    summary = RunSummary.load(path / "summary.json")
    models = [stage["name"] for stage in summary["stages"]]
    if summary["policy_id"] != policy.id or models != list(policy.models):
        of = f"{summary['policy_id']} of {' → '.join(map(str, models))}"
        raise DataError(f"{path} is a run of another policy, {of}, not of {policy.id} of {' → '.join(policy.models)}")
    return summary
