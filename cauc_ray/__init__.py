"""Calibrated model cascades on Ray: pay for the expensive model only where it helps.

>>> import cauc_ray
>>> policy = cauc_ray.fit(cauc_ray.sample_logits(), method="rf", budget=4.0)
>>> cauc_ray.evaluate(cauc_ray.sample_logits(), policy, split="test").measures.accuracy.value > 0.9
True
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cauc_ray.api.collecting import collect
    from cauc_ray.api.estimator import CascadeClassifier
    from cauc_ray.api.offline import check, evaluate, fit, replace_model
    from cauc_ray.api.online import run
    from cauc_ray.api.samples import sample_logits
    from cauc_ray.api.serving import serve, set_policy
    from cauc_ray.comparison.comparing import compare
    from cauc_ray.data.writing import write_logits
    from cauc_ray.errors import CaucError, CaucWarning
    from cauc_ray.models.answers import Answers
    from cauc_ray.planning.plan import plan
    from cauc_ray.policies.policy import Policy
    from cauc_ray.reporting.writing import report

# Loaded at first use, so that importing the package costs nothing.
_PUBLIC = {
    "Answers": "cauc_ray.models.answers",
    "CascadeClassifier": "cauc_ray.api.estimator",
    "CaucError": "cauc_ray.errors",
    "CaucWarning": "cauc_ray.errors",
    "Policy": "cauc_ray.policies.policy",
    "check": "cauc_ray.api.offline",
    "collect": "cauc_ray.api.collecting",
    "compare": "cauc_ray.comparison.comparing",
    "evaluate": "cauc_ray.api.offline",
    "fit": "cauc_ray.api.offline",
    "plan": "cauc_ray.planning.plan",
    "replace_model": "cauc_ray.api.offline",
    "report": "cauc_ray.reporting.writing",
    "run": "cauc_ray.api.online",
    "sample_logits": "cauc_ray.api.samples",
    "serve": "cauc_ray.api.serving",
    "set_policy": "cauc_ray.api.serving",
    "write_logits": "cauc_ray.data.writing",
}

__all__ = [
    "Answers",
    "CascadeClassifier",
    "CaucError",
    "CaucWarning",
    "Policy",
    "check",
    "collect",
    "compare",
    "evaluate",
    "fit",
    "plan",
    "replace_model",
    "report",
    "run",
    "sample_logits",
    "serve",
    "set_policy",
    "write_logits",
]
if find_spec("sklearn") is None:  # the classifier needs it, and a plain install does not bring it
    __all__[:] = [name for name in __all__ if name != "CascadeClassifier"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'cauc_ray' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
