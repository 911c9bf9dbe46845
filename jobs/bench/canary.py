"""Candidates of known accuracy in a live service: how often decisions on them are wrong, and how soon they come."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import replay
from cauc_ray.serving.promotion import Rule
from jobs.bench.load import body_of
from jobs.bench.part import by_turns
from jobs.bench.planted import stage, write_pool, write_split
from jobs.bench.processes import scratch

MODELS = {"small": 1.0, "large": 10.0}
N_ROWS, N_OPTIONS, SIZE, SHARE = 20_000, 4, 40, 0.3
# Accuracy alone decides.
RULE = Rule(cost_margin=10.0)
OUTPUTS = ("prediction", "confidence", "stage")


def canary(runs: int = 20, rows: int = 10_000) -> dict[str, Any]:
    """Start candidates in a local service over HTTP, label all answers, and count what is decided.

    runs: of each kind of candidate: better (by 6 points or more), worse (the same), and just as much less accurate than
    the incumbent that its promotion is false.   rows: after which a run ends without a decision.
    """
    with scratch() as folder:
        incumbent, candidates = plant(folder)
        serving = {"canary": {"cost_margin": RULE.cost_margin}}
        stages = [
            stage(name, {"kind": "saved", "logits": "LOGITS", "model": name, "split": "test"}, 64) for name in MODELS
        ]
        pool = write_pool(folder / "pool.yaml", stages, serving=serving)
        chain = LogitTable(folder / "LOGITS").read_chain(list(MODELS), "test")
        with cauc_ray.serve(pool, incumbent, port=0, local=True) as service:
            model = f"{service.url}/v2/models/{service.model}"

            def run(policy: Policy, turn: int) -> tuple[str, int, float]:
                cauc_ray.set_policy(incumbent, url=service.url)
                cauc_ray.set_policy(policy, url=service.url, share=SHARE)
                return decided(model, chain, np.random.default_rng([5, turn]), rows)

            sides: dict[str, Callable[[int], tuple[str, int, float]]] = {
                kind: lambda turn, policy=policy: run(policy, turn)  # type: ignore[misc]
                for kind, policy in candidates.items()
            }
            found = by_turns(sides, runs, lambda one: f"{one[0]} after {one[1]:,} rows, {one[2]:.1f} s")
    return {
        kind: {
            "runs": len(of_kind),
            **Counter(what for what, _, _ in of_kind),
            "median_rows": median(n for _, n, _ in of_kind),
        }
        for kind, of_kind in found.items()
    }


def plant(folder: Path) -> tuple[Policy, dict[str, Policy]]:
    """Write a table; return a policy and candidates by kind, whose accuracies on its rows are known."""
    rng = np.random.default_rng(0)
    for split, n in (("calibration", 4000), ("test", N_ROWS)):
        labels = rng.integers(N_OPTIONS, size=n).astype(np.int32)
        logits = rng.standard_normal((len(MODELS), n, N_OPTIONS))
        logits[:, np.arange(n), labels] += rng.normal([[1.0], [3.5]], 1.0, (len(MODELS), n))
        ids = [f"{split}-{row}" for row in range(n)]
        write_split(folder / "LOGITS", MODELS, split, ids, labels, list(logits.astype(np.float32)))
    incumbent = cauc_ray.fit(folder / "LOGITS", models=list(MODELS), threshold=0.5)
    chain = LogitTable(folder / "LOGITS").read_chain(list(MODELS), "test")

    def gain(policy: Policy) -> float:
        found, own = (replay(one, chain).predictions == chain.labels for one in (policy, incumbent))
        return float(found.mean() - own.mean())

    thresholds = np.linspace(0, 1, 201)
    gains = np.array([gain(incumbent.with_threshold(at)) for at in thresholds])

    def nearest(wanted: float) -> int:
        """Return the position of the gain nearest to a wanted one, of those that are no nearer to 0."""
        fits = np.flatnonzero((gains - wanted) * np.sign(wanted) >= 0)
        return int(fits[np.abs(gains[fits] - wanted).argmin()])

    wanted = {"better": 0.06, "worse": -0.06, "just_worse": -RULE.accuracy_margin}
    kinds = {kind: nearest(by) for kind, by in wanted.items()}
    print(", ".join(f"{kind}: {gains[at]:+.4f}" for kind, at in kinds.items()), flush=True)
    return incumbent, {kind: incumbent.with_threshold(thresholds[at]) for kind, at in kinds.items()}


def decided(model: str, chain: ChainLogits, rng: np.random.Generator, most: int) -> tuple[str, int, float]:
    """Ask and report labels until there is a decision; return it, the rows sent and the seconds that it took."""
    began, n = time.monotonic(), 0
    version = _called(f"{model}/policy")["version"]
    while n < most:
        rows = rng.integers(N_ROWS, size=SIZE)
        answer = _called(f"{model}/infer", body_of({"example_id": [chain.example_ids[row] for row in rows]}, OUTPUTS))
        own = {name: answer["parameters"][name] for name in ("policy_id", "answer_id")}
        said = {output["name"]: output["data"] for output in answer["outputs"]}
        _called(f"{model}/feedback", json.dumps({**own, **said, "label": chain.labels[rows].tolist()}).encode())
        n += SIZE
        # Looked at now and then: a service decides once a second.
        if n % (10 * SIZE) == 0 and (now := _called(f"{model}/policy"))["version"] > version:
            return str(now["receipts"][-1]["decision"]), n, time.monotonic() - began
    return "open", n, time.monotonic() - began


def _called(url: str, body: bytes | None = None) -> dict[str, Any]:
    with urlopen(Request(url, body), timeout=60) as answer:
        content: dict[str, Any] = json.load(answer)
        return content
