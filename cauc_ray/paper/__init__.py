"""The paper's tables and figures, from logit tables, in one run on Ray."""

from cauc_ray.paper.config import PaperConfig
from cauc_ray.paper.run import Paper, run_paper

__all__ = ["Paper", "PaperConfig", "run_paper"]
