"""Budget sweeps: sets of logits × chains × methods × seeds × budgets, as tasks on Ray."""

from cauc_ray.comparison.sweeping.config import SweepConfig
from cauc_ray.comparison.sweeping.run import Sweep, run_sweep

__all__ = ["Sweep", "SweepConfig", "run_sweep"]
