"""YAML files that people write: pools and the configs of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cauc_ray.errors import ConfigError


def read_yaml(path: Path, kind: str) -> Any:
    """Read a YAML file.   kind: what it is, for messages, as "pool file".

    Raises ConfigError in one line where it is missing, no file, or no YAML.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no file")  # a pipe would be waited for, a device read for ever
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {kind} {path}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line} is not YAML: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
