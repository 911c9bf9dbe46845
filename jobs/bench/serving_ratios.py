"""What turns of the serving part come to: medians, and ratios of turns that were next to each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

from cauc_ray.errors import ExecutionError
from jobs.bench.serving_cases import (
    BATCHED,
    CASES,
    FEW,
    LARGEST,
    MANY,
    MODELS,
    ONE,
    OURS,
    OURS_LARGEST,
    PER_SAMPLE,
    SOME,
)

Turn: TypeAlias = dict[str, Any]
# By case and load, then by side; as a session printed them.
Turns: TypeAlias = dict[tuple[str, str], dict[str, list[Turn]]]

FIGURES = ("per_s", "p50_s", "p99_s")


def compare(turns: Turns) -> dict[str, Any]:
    """Return each case's medians and ratios. Raises ExecutionError where any answer was wrong."""
    found: dict[str, Any] = {}
    for (case, load), by_side in turns.items():
        found.setdefault(case, {})[load] = {side: summary(own, side) for side, own in by_side.items()}
    if "sleeping" in found:
        few, many = (turns["sleeping", load] for load in (FEW, MANY))
        found["sleeping"] |= {
            "p50_to_batched": ratio(few[OURS], few[BATCHED], "p50_s"),
            "p99_to_batched": ratio(few[OURS], few[BATCHED], "p99_s"),
            "throughput_to_batched": ratio(many[OURS], many[BATCHED], "per_s"),
            "throughput_to_per_sample": ratio(many[OURS], many[PER_SAMPLE], "per_s"),
        }
    if "instant" in found:
        one = turns["instant", ONE]
        added = [(own["p50_s"] - theirs["p50_s"]) * 1e3 for own, theirs in zip(one[OURS], one[BATCHED], strict=True)]
        found["instant"] |= {"p50_to_batched": ratio(one[OURS], one[BATCHED], "p50_s"), "p50_added_ms": spread(added)}
    if "slow" in found:
        found["slow"] |= speedups(turns["slow", SOME])
    return found


def speedups(turns: Mapping[str, list[Turn]]) -> dict[str, Any]:
    """Return how much more the cascade answered than the largest model, and than its deferral rate predicts."""
    counts = total_counts(turns[OURS])
    deferral = counts[MODELS[1]] / counts.total()
    predicted = CASES["slow"].predicted_speedup(deferral)
    found: dict[str, Any] = {"deferral": deferral, "predicted_speedup": predicted}
    for name, side in {"largest": LARGEST, "own_largest": OURS_LARGEST}.items():
        speedup = ratio(turns[OURS], turns[side], "per_s")
        found[f"speedup_over_{name}"] = speedup
        found[f"speedup_over_{name}_to_predicted"] = {what: value / predicted for what, value in speedup.items()}
    return found


def summary(turns: Sequence[Turn], side: str) -> dict[str, Any]:
    """Return a side's figures under one load."""
    counts = total_counts(turns)
    if counts["wrong"]:
        raise ExecutionError(f"{side}: {counts['wrong']} of {counts.total()} answers were wrong")
    return {name: spread([turn[name] for turn in turns]) for name in FIGURES} | {"counts": dict(counts)}


def total_counts(turns: Sequence[Turn]) -> Counter[str]:
    """Return how many requests ended in what way, in all turns."""
    return sum((Counter(turn["counts"]) for turn in turns), Counter())


def ratio(ours: Sequence[Turn], theirs: Sequence[Turn], figure: str) -> dict[str, float]:
    """Return a figure of ours over theirs, each turn with the one next to it."""
    return spread([own[figure] / other[figure] for own, other in zip(ours, theirs, strict=True)])


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def tell_turn(turn: Turn, clients: Mapping[str, int]) -> None:
    """Print a turn as it ends."""
    n, counts = clients[turn["load"]], ", ".join(f"{n} {kind}" for kind, n in sorted(turn["counts"].items()))
    print(
        f"{turn['case']:>8}, {n:>3} clients, {turn['side']:>16}: {turn['per_s']:6.1f} requests/s, "
        f"p50 {turn['p50_s'] * 1e3:6.1f} ms, p99 {turn['p99_s'] * 1e3:6.1f} ms ({counts})",
        flush=True,
    )


def tell(found: Mapping[str, Any], clients: Mapping[str, int]) -> None:
    """Print the ratios behind one ingress."""
    few, many = clients[FEW], clients[MANY]
    if sleeping := found.get("sleeping"):
        print(f"latency against batching by hand, {few} clients: p50 {said(sleeping['p50_to_batched'])}, ", end="")
        print(f"p99 {said(sleeping['p99_to_batched'])}")
        print(
            f"throughput, {many} clients: {said(sleeping['throughput_to_batched'])} against batching by hand, ", end=""
        )
        print(f"{said(sleeping['throughput_to_per_sample'])} against a call of each stage per request")
    if instant := found.get("instant"):
        added = instant["p50_added_ms"]
        print(
            f"models of no time, 1 client: p50 {said(instant['p50_to_batched'])}, {added['median']:+.2f} ms a request"
        )
    if slow := found.get("slow"):
        print(
            f"the large model answers {slow['deferral']:.3f} of the requests, so {slow['predicted_speedup']:.2f} ",
            end="",
        )
        print("times its throughput alone is to be expected:")
        for name, whose in {"largest": "by hand", "own_largest": "with cauc-ray"}.items():
            print(f"  {said(slow[f'speedup_over_{name}'])} of it alone {whose}, that is ", end="")
            print(f"{said(slow[f'speedup_over_{name}_to_predicted'])} the prediction")


def said(value: Mapping[str, float]) -> str:
    """Say a ratio and its range."""
    return f"{value['median']:.2f} times ({value['least']:.2f}–{value['most']:.2f})"
