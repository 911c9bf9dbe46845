"""What each verb of the cauc command does: call the library, show a table, return what --json prints."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cauc_ray.front import live, offline, show
from cauc_ray.front.inspection import inspect_path
from cauc_ray.numbers.metrics import Share
from cauc_ray.policies.policy import Policy


def collect(options: Namespace) -> dict[str, Any]:
    """Collect a pool's logits on a dataset."""
    from cauc_ray.front import collecting

    with live.collect_progress() as on_progress, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        summary = collecting.collect(
            options.pool,
            options.dataset,
            options.output,
            split=options.split,
            models=options.models,
            columns=options.columns,
            embedding=options.embedding,
            seed=options.seed,
            address=options.address,
            on_progress=on_progress,
        )
    if not options.json:
        show.collected(summary)
        show.line(f"written to {options.output}")
    return summary


def fit(options: Namespace) -> dict[str, Any]:
    """Fit a policy and write its file."""
    offline.require_apart(options.output, options.logits)
    with live.busy("fitting"):
        policy = offline.fit(
            options.logits,
            models=options.models,
            method=options.method,
            costs=options.costs,
            calibration_split=options.calibration_split,
            validation_split=options.validation_split,
            budget=options.budget,
            threshold=options.threshold,
            objective=options.objective,
        )
        offline.save_policy(policy, options.output)
    if not options.json:
        show.policy(policy)
        show.line(f"written to {options.output}")
    return {"policy": options.output, "policy_id": policy.id, **policy.model_dump(mode="json")}


def evaluate(options: Namespace) -> dict[str, Any]:
    """Replay a policy on saved logits."""
    if options.predictions is not None:
        offline.require_apart(options.predictions, options.logits, options.policy)
    policy = Policy.load(options.policy)
    with live.busy("replaying"):
        evaluation = offline.evaluate(options.logits, policy, split=options.split)
        if options.predictions is not None:
            offline.save_table(evaluation.predictions(), options.predictions)
    result = evaluation_summary(evaluation)
    if not options.json:
        show.evaluation(result)
    return result


def evaluation_summary(evaluation: offline.Evaluation) -> dict[str, Any]:
    """Return an evaluation as `cauc evaluate --json` prints it."""
    policy, measures = evaluation.policy, evaluation.measures
    return {
        "method": policy.method,
        "policy_id": policy.id,
        "source": evaluation.chain.source,
        "n": measures.n,
        "n_labelled": measures.n_labelled,
        "accuracy": measures.accuracy.value if measures.accuracy else None,
        "accuracy_interval": _interval(measures.accuracy),
        "macro_f1": measures.macro_f1,
        "cost": measures.cost,
        "cost_unit": policy.cost_unit,
        "relative_cost": measures.relative_cost,
        "threshold": policy.threshold,
        "last_stage_avoided": 1 - measures.stages[-1].reached / measures.n,
        "stages": [
            {
                "name": stage.name,
                "reached": stage.reached,
                "answered": stage.answered,
                "accepted_accuracy": stage.accepted_accuracy.value if stage.accepted_accuracy.n else None,
                "accepted_accuracy_interval": _interval(stage.accepted_accuracy),
            }
            for stage in measures.stages
        ],
    }


def _interval(share: Share | None) -> list[float] | None:
    return [share.low, share.high] if share is not None and share.n else None


def sweep(options: Namespace) -> dict[str, Any]:
    """Trace accuracy over cost and write the table."""
    offline.require_apart(options.output, options.logits)
    with live.busy("sweeping"):
        table = offline.sweep(
            options.logits,
            models=options.models,
            methods=options.methods,
            costs=options.costs,
            calibration_split=options.calibration_split,
            validation_split=options.validation_split,
            split=options.split,
            points=options.points,
            embedding=options.embedding,
        )
        offline.save_table(table, options.output)
    rows = offline.sweep_highlights(table)
    unit = table.schema.metadata[b"cost_unit"].decode()
    if not options.json:
        show.sweep(rows, unit, options.split)
        show.line(f"{table.num_rows:,} operating points written to {options.output}")
    return {"sweep": options.output, "points": table.num_rows, "cost_unit": unit, "highlights": rows}


def compare(options: Namespace) -> dict[str, Any]:
    """Fit all methods on one chain and measure them side by side."""
    from cauc_ray.execution.ledger import require_new
    from cauc_ray.front import comparing

    if options.output is not None:
        offline.require_apart(options.output, options.logits)
        require_new(Path(options.output))
    with live.methods_progress() as on_method:
        comparison = comparing.compare(
            options.logits,
            models=options.models,
            methods=options.methods,
            embedding=options.embedding,
            texts=options.texts,
            text_column=options.text_column,
            checkpoints=options.checkpoints,
            costs=options.costs,
            calibration_split=options.calibration_split,
            validation_split=options.validation_split,
            split=options.split,
            budget=options.budget,
            seed=options.seed,
            on_method=on_method,
        )
    if options.output is not None:
        comparing.save_comparison(comparison, options.output)
    result = comparison.as_json()
    if not options.json:
        show.comparison(result)
        if options.output is not None:
            show.line(f"rows.parquet, curves.parquet and comparison.json are in {options.output}")
    return result


def run(options: Namespace) -> dict[str, Any]:
    """Run a cascade on Ray."""
    from cauc_ray.front import online

    policy = Policy.load(options.policy)
    # Ray itself writes to standard output when a process dies; that is for the answer alone.
    with (
        live.run_progress(policy.cost_unit) as on_progress,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):
        summary = online.run(
            options.pool,
            policy,
            options.input,
            options.output,
            resume=options.resume,
            address=options.address,
            controllers=options.controllers,
            on_progress=on_progress,
        )
    if not options.json:
        show.run_summary(summary)
        show.line(f"written to {options.output}")
    return summary


def serve(options: Namespace) -> None:
    """Serve a cascade until interrupted; what it is called and where is said as soon as it answers."""
    import json
    import signal
    import threading

    from cauc_ray.front import serving

    out = sys.stdout
    with ExitStack() as stack:
        # Ray writes there, when it starts and when it ends, what nobody has asked.
        stack.enter_context(redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        with live.waiting("starting") as on_wait:
            service = stack.enter_context(
                serving.serve(
                    options.pool,
                    options.policy,
                    host=options.host,
                    port=options.port,
                    name=options.name,
                    address=options.address,
                    on_wait=on_wait,
                )
            )
        with redirect_stdout(out):
            if options.json:
                print(json.dumps(asdict(service)), flush=True)
            else:
                show.service(service)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has taken SIGTERM for itself meanwhile
            signal.signal(number, lambda *_: stopped.set())
        stopped.wait()


def policy(options: Namespace) -> dict[str, Any]:
    """Change the policy of a running service."""
    from cauc_ray.front import serving

    changed = serving.set_policy(
        options.policy, url=options.url, name=options.name, threshold=options.threshold, budget=options.budget
    )
    if not options.json:
        show.line(f"policy {changed['policy_id']} is in force after {changed['previous']}")
    return changed


def inspect(options: Namespace) -> dict[str, Any]:
    """Say what a file holds."""
    found = inspect_path(options.file)
    if not options.json:
        show.inspection(found)
    return found


def demo(options: Namespace) -> dict[str, Any]:
    """Run the demo."""
    from cauc_ray.front.demo import run_demo

    result = run_demo(options.output)
    if not options.json:
        show.demo(result)
    return result


VERBS: Mapping[str, Callable[[Namespace], dict[str, Any] | None]] = {
    "collect": collect,
    "compare": compare,
    "demo": demo,
    "evaluate": evaluate,
    "fit": fit,
    "inspect": inspect,
    "policy": policy,
    "run": run,
    "serve": serve,
    "sweep": sweep,
}
