"""Search the best sub-chain of a pool, and measure it on a split that no choice has seen."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.table_info import PoolModel, TableInfo, write_info
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.evidence import ChosenChain
from cauc_ray.policies.search import MOST_MODELS


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what is searched."""
    parser.add_argument("--logits", help="a logit table (default: one of planted logits)")
    parser.add_argument("--models", type=int, default=MOST_MODELS, help="the first so many of the table's pool.json")
    parser.add_argument("--rows", type=int, default=2_500, help="of a planted table's splits")
    parser.add_argument("--options", type=int, default=10, help="of a planted row")
    parser.add_argument("--budget", type=float, help="mean cost per example (default: none)")
    parser.add_argument("--split", default="test", help="where the chains that are found are measured")


def missing(options: argparse.Namespace) -> str | None:
    """Need a table that is there."""
    return None if options.logits is None or Path(options.logits).is_dir() else f"{options.logits} is not here"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Search with both methods."""
    with _table(options) as table:
        info = LogitTable(table).info
        assert info is not None
        models = [model.name for model in info.models][: options.models]
        found = {method: _search(table, models, method, options) for method in ("base", "rf")}
    return {"models": len(models), "budget": options.budget, **found}


def _search(table: str | Path, models: list[str], method: str, options: argparse.Namespace) -> dict[str, Any]:
    begun = time.perf_counter()
    policy = cauc_ray.fit(table, models=models, method=method, budget=options.budget, search=True)
    search_s = time.perf_counter() - begun
    begun = time.perf_counter()
    cauc_ray.fit(table, models=policy.search.full.models if policy.search else models, method=method)
    full_fit_s = time.perf_counter() - begun
    search = policy.search
    assert search is not None
    each_fitted = full_fit_s * search.n_chains / search_s
    print(
        f"{method}: {search.n_measured:,} of {search.n_chains:,} chains measured in {search_s:.1f} s; one fit "
        f"of all models takes {full_fit_s:.2f} s, so many of them {each_fitted:.1f} times as long as the search"
    )
    rows = {}
    for name in ("chosen", "pair", "full", "single"):
        chain = getattr(search, name)
        if chain is not None and chain.quality is not None:
            rows[name] = _measured(table, chain, method, options)
            print(
                f"  {name:>6}: validation {chain.quality:.4f}, held out {chain.holdout_quality:.4f}, "
                f"{options.split} {rows[name]['accuracy']:.4f} at {rows[name]['cost']:.4g}: {' > '.join(chain.models)}"
            )
    return {
        "search_s": search_s,
        "fits_over_search": each_fitted,
        "n_chains": search.n_chains,
        "n_measured": search.n_measured,
        **rows,
    }


def _measured(table: str | Path, chain: ChosenChain, method: str, options: argparse.Namespace) -> dict[str, Any]:
    policy = cauc_ray.fit(table, models=chain.models, method=method, budget=options.budget)
    measures = cauc_ray.evaluate(table, policy, split=options.split).measures
    assert measures.accuracy is not None
    return {**chain.model_dump(), "accuracy": measures.accuracy.value, "cost": measures.cost}


@contextmanager
def _table(options: argparse.Namespace) -> Iterator[str | Path]:
    """Yield the table, or one of models of which each is a little better and dearer than the one before."""
    if options.logits is not None:
        yield options.logits
        return
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(0)
        names = [f"model-{place}" for place in range(options.models)]
        for split in ("calibration", "validation", "test"):
            labels = rng.integers(0, options.options, options.rows)
            shared = rng.standard_normal((options.rows, options.options))
            for place, name in enumerate(names):
                logits = rng.standard_normal(shared.shape) + shared
                logits[np.arange(len(labels)), labels] += rng.normal(2.5 + 0.3 * place, 2.0, len(labels))
                ids = (f"{split}-{row}" for row in range(options.rows))
                write_logits(folder, name, split, example_ids=ids, labels=labels, logits=logits)
        pool = [PoolModel(name=name, cost=1.6**place) for place, name in enumerate(names)]
        write_info(folder, TableInfo(cost_unit="GFLOPs", logit_kind="raw", note="planted", models=pool))
        yield folder
