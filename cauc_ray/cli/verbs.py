"""What each verb of the cauc command does: call the library, show a table, return what --json prints."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Any

from cauc_ray.api import live, offline, tables
from cauc_ray.api.evaluated import evaluation_summary
from cauc_ray.api.inspection import inspect_path
from cauc_ray.api.options import CheckOptions, CompareOptions, EvaluateOptions, FitOptions, SweepOptions
from cauc_ray.cli import show
from cauc_ray.cli.show_policy import show_policy
from cauc_ray.policies.policy import Policy

# How often the command looks whether what it serves has ended by itself.
ALIVE_S = 0.5


def collect(options: Namespace) -> dict[str, Any]:
    """Collect a pool's logits on a dataset."""
    from cauc_ray.api import collecting

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
        tables.line(f"written to {options.output}")
    return summary


def fit(options: Namespace) -> dict[str, Any]:
    """Fit a policy and write its file."""
    offline.require_output_file(options.output, options.logits)
    with live.busy("searching" if options.search else "fitting"):
        policy = offline.fit(options.logits, **FitOptions.chosen(vars(options)))
        policy.save(options.output)
    if not options.json:
        show_policy(policy)
        tables.line(f"written to {options.output}")
    return {"policy": options.output, "policy_id": policy.id, **policy.model_dump(mode="json")}


def evaluate(options: Namespace) -> dict[str, Any]:
    """Replay a policy on saved logits."""
    if options.predictions is not None:
        offline.require_output_file(options.predictions, options.logits, options.policy)
    policy = Policy.load(options.policy)
    with live.busy("replaying"):
        evaluation = offline.evaluate(options.logits, policy, **EvaluateOptions.chosen(vars(options)))
        if options.predictions is not None:
            offline.save_table(evaluation.to_arrow(), options.predictions)
    result = evaluation_summary(evaluation)
    if not options.json:
        show.evaluation(result)
    return result


def check(options: Namespace) -> dict[str, Any]:
    """Say whether a policy still holds on saved logits."""
    from cauc_ray.api import checking

    policy = Policy.load(options.policy)
    with live.busy("checking"):
        found = checking.check(options.logits, policy, **CheckOptions.chosen(vars(options))).as_json()
    if not options.json:
        show.watched(found)
    return found


def sweep(options: Namespace) -> dict[str, Any]:
    """Trace accuracy over cost and write the table."""
    offline.require_output_file(options.output, options.logits)
    with live.busy("sweeping"):
        table = offline.sweep(options.logits, **SweepOptions.chosen(vars(options)))
        offline.save_table(table, options.output)
    rows = offline.sweep_highlights(table)
    unit = table.schema.metadata[b"cost_unit"].decode()
    if not options.json:
        show.sweep(rows, unit, options.split)
        tables.line(f"{table.num_rows:,} operating points written to {options.output}")
    return {"sweep": options.output, "points": table.num_rows, "cost_unit": unit, "highlights": rows}


def compare(options: Namespace) -> dict[str, Any]:
    """Fit all methods on one chain and measure them side by side."""
    from cauc_ray.comparison import comparing
    from cauc_ray.files.atomic import require_new

    if options.output is not None:
        offline.require_apart(options.output, options.logits)
        require_new(Path(options.output))
    with live.methods_progress() as on_method:
        comparison = comparing.compare(options.logits, on_method=on_method, **CompareOptions.chosen(vars(options)))
    if options.output is not None:
        comparing.save_comparison(comparison, options.output)
    result = comparison.as_json()
    if not options.json:
        show.comparison(result)
        if options.output is not None:
            tables.line(f"rows.parquet, curves.parquet and comparison.json are in {options.output}")
    return result


def run(options: Namespace) -> dict[str, Any]:
    """Run a cascade on Ray."""
    from cauc_ray.api import online

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
            retry_failed=options.retry_failed,
            address=options.address,
            on_progress=on_progress,
        )
    if not options.json:
        show.run_summary(summary)
        tables.line(f"written to {options.output}")
    return summary


def serve(options: Namespace) -> None:
    """Serve a cascade until interrupted; what it is called and where is said as soon as it answers."""
    import json
    import logging
    import signal
    import threading

    from cauc_ray.api import serving

    if options.local:  # elsewhere Serve has logs of its own
        log = logging.getLogger("cauc_ray")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
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
                    local=options.local,
                    address=options.address,
                    on_wait=on_wait,
                )
            )
        with redirect_stdout(out):
            if options.json:
                told = {"url": service.url, "model": service.model, "policy_id": service.policy_id}
                print(json.dumps(told), flush=True)
            else:
                show.service(service)
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has taken over SIGTERM
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.wait(ALIVE_S):
            service.require_alive()


def plan(options: Namespace) -> dict[str, Any]:
    """Plan the replicas that sustain a rate."""
    from cauc_ray.planning.plan import plan as planned
    from cauc_ray.planning.tables import show_plan

    with (
        live.waiting("planning") as on_step,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
    ):
        found = planned(
            options.pool,
            options.policy,
            options.rate,
            slo_p99_s=options.slo_p99,
            ledger=options.ledger,
            input=options.input,
            address=options.address,
            on_step=on_step,
        )
    if not options.json:
        show_plan(found)
    return found


def policy(options: Namespace) -> dict[str, Any]:
    """Change the policy of a running service."""
    from cauc_ray.api import serving

    changed = serving.set_policy(
        options.policy, url=options.url, name=options.name, threshold=options.threshold, budget=options.budget
    )
    if not options.json:
        tables.line(f"policy {changed['policy_id']} is in force after {changed['previous']}")
    return changed


def inspect(options: Namespace) -> dict[str, Any]:
    """Say what a file holds."""
    found = inspect_path(options.file)
    if not options.json:
        show.inspection(found)
    return found


def report(options: Namespace) -> dict[str, Any]:
    """Write a policy's page and card."""
    from cauc_ray.reporting import writing

    with live.busy("reporting"):
        written = writing.report(
            options.folder, policy=options.policy, logits=options.logits, split=options.split, output=options.output
        )
    result = written.as_json()
    if not options.json:
        show.report(result)
    return result


def demo(options: Namespace) -> dict[str, Any]:
    """Run the demo."""
    from cauc_ray.demo import run_demo

    result = run_demo(options.output)
    if not options.json:
        show.demo(result)
    return result


VERBS: Mapping[str, Callable[[Namespace], dict[str, Any] | None]] = {
    "check": check,
    "collect": collect,
    "compare": compare,
    "demo": demo,
    "evaluate": evaluate,
    "fit": fit,
    "inspect": inspect,
    "plan": plan,
    "policy": policy,
    "report": report,
    "run": run,
    "serve": serve,
    "sweep": sweep,
}
