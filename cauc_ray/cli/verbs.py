"""What each verb of the cauc command takes and does: call the library, then show what came of it."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator

from cauc_ray.api import array_files, live
from cauc_ray.api.array_files import LabelsFile, LogitFiles
from cauc_ray.api.options import (
    CheckOptions,
    CollectOptions,
    CompareOptions,
    EvaluateOptions,
    FitOptions,
    Flag,
    Location,
    Options,
    OutputPath,
    PlanOptions,
    RunOptions,
    ServeOptions,
    SetPolicyOptions,
    as_dataset,
    option,
)
from cauc_ray.api.samples import sample_logits
from cauc_ray.policies.policy import Policy

# The exit code of a check whose policy is not valid any more, and of work of which a part failed.
NOT_VALID, INCOMPLETE = 3, 1
# How often the command looks whether what it serves has ended by itself.
ALIVE_S = 0.5

# Called with a verb's result, lines that follow, and what JSON has besides.
Say: TypeAlias = Callable[..., None]
Logits: TypeAlias = Annotated[Location, Flag("LOGITS", is_positional=True)]
PoolFile: TypeAlias = Annotated[Location, Flag("POOL", is_positional=True)]
PolicyFile: TypeAlias = Annotated[Location, Flag("FILE")]
Input: TypeAlias = Annotated[Location, Flag("DATA")]
Folder: TypeAlias = Annotated[Location, Flag("DIR")]
OutFile: TypeAlias = Annotated[OutputPath, Flag("FILE", spellings=("-o", "--output"))]
OutFolder: TypeAlias = Annotated[OutputPath, Flag("DIR", spellings=("-o", "--output"))]
OutTable: TypeAlias = Annotated[OutputPath, Flag("LOGITS", spellings=("-o", "--output"))]

LOGITS = option("a logit table, by path or URI", ...)
LOGIT_FILES = option(
    "a logit table, by path or URI; or arrays, as small=small.npy large=large.npy (.npy, .csv), or an .npz file with "
    "one for each model",
    ...,
)
LABELS = option("file of the labels of arrays (.npy, .csv; default: the array 'labels' of the .npz file)")
POOL = option("a pool file", ...)
POLICY = option("a policy file", ...)


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: its options, an example of it, and what does its work and returns an exit code, 0 for None."""

    options: type[Options]
    example: str
    work: Callable[[Any, Say], int | None]


class Demo(Options):
    """Options of `cauc demo`."""

    output: OutFolder | None = option("a new folder (default: cauc-demo, or the next free name)")


def demo(options: Demo, say: Say) -> None:
    """Run the demo."""
    from cauc_ray.demo.pipeline import run_demo

    result = run_demo(None if options.output is None else str(options.output))
    say(result)


class Collect(CollectOptions):
    """Options of `cauc collect`."""

    pool: PoolFile = POOL
    dataset: Annotated[str, BeforeValidator(as_dataset), Flag("NAME|PATH")] = option(
        "a benchmark by name, NAME=PATH for its files, or a file or folder of tables or images, by path or URI", ...
    )
    output: OutTable = option("a logit table, new or to add to", Path("logits"))


def collect(options: Collect, say: Say) -> None:
    """Collect a pool's logits on a dataset."""
    from cauc_ray.api import collecting

    own = options.part(CollectOptions)
    with live.collect_progress() as on_progress:
        summary = collecting.collect(options.pool, options.dataset, options.output, **own, on_progress=on_progress)
    say(summary, f"written to {options.output}")


class Fit(FitOptions):
    """Options of `cauc fit`."""

    logits: LogitFiles = LOGIT_FILES
    labels: LabelsFile | None = LABELS
    output: OutFile = option("the policy file to write", Path("policy.json"))


def fit(options: Fit, say: Say) -> None:
    """Fit a policy and write its file."""
    from cauc_ray.api import offline

    offline.require_output_file(options.output, *array_files.files_of(options.logits))
    logits, labels = array_files.read_logits(options.logits, options.labels)
    with live.progress("searching" if options.search else "fitting"):
        policy = offline.fit(logits, labels, **options.part(FitOptions))
        policy.save(options.output)
    say(policy, f"written to {options.output}", policy=str(options.output))


class Evaluate(EvaluateOptions):
    """Options of `cauc evaluate`."""

    logits: LogitFiles = LOGIT_FILES
    labels: LabelsFile | None = LABELS
    policy: PolicyFile = POLICY
    predictions: Annotated[OutputPath | None, Flag("FILE")] = option("write the answers to this Parquet file")


def evaluate(options: Evaluate, say: Say) -> None:
    """Measure a policy on saved logits."""
    from cauc_ray.api import offline
    from cauc_ray.files.parquet import write_parquet

    if options.predictions is not None:
        offline.require_output_file(options.predictions, *array_files.files_of(options.logits), options.policy)
    logits, labels = array_files.read_logits(options.logits, options.labels)
    policy = Policy.load(options.policy)
    with live.progress("evaluating"):
        evaluation = offline.evaluate(logits, policy, labels=labels, **options.part(EvaluateOptions))
        if options.predictions is not None:
            write_parquet(options.predictions, evaluation.to_arrow())
    say(evaluation)


class Check(CheckOptions):
    """Options of `cauc check`."""

    logits: Logits = LOGITS
    policy: PolicyFile = option("a policy file, fitted with labelled validation", ...)


def check(options: Check, say: Say) -> int:
    """Check whether a policy is still valid on saved logits."""
    from cauc_ray.api import offline

    policy = Policy.load(options.policy)
    with live.progress("checking"):
        checked = offline.check(options.logits, policy, **options.part(CheckOptions))
    say(checked)
    return 0 if checked.holds else NOT_VALID


class Compare(CompareOptions):
    """Options of `cauc compare`."""

    logits: LogitFiles | None = option(
        "logit tables, by path or URI; or arrays, as small=small.npy large=large.npy (.npy, .npz, .csv), or one .npz "
        "with an array for each model; unless a config has sets"
    )
    labels: LabelsFile | None = LABELS
    output: OutFile | None = option(
        "a file of results (.csv, .json, .parquet, .tex, .pdf, .png, .svg), or a folder with all of them, where "
        "finished cells are kept and not measured again"
    )


def compare(options: Compare, say: Say) -> int:
    """Fit methods and measure them side by side, over budgets, seeds and chains."""
    from cauc_ray.comparison import comparing

    keywords: dict[str, Any] = options.part(CompareOptions)
    logits, labels = None, None
    if isinstance(options.logits, tuple) and len(options.logits) > 1:
        models, chains = keywords.pop("models"), keywords.pop("chains")
        chains = chains or ([models] if models else ())
        keywords["sets"] = [{"name": path.name, "logits": path, "chains": chains} for path in options.logits]
    elif options.logits is not None:
        logits, labels = array_files.read_logits(options.logits, options.labels)
    keywords["address"] = options.address or os.environ.get("RAY_ADDRESS")
    if isinstance(logits, Mapping):
        keywords["address"] = options.address
    with live.progress("compare", "cells") as on_cell:
        comparison = comparing.compare(logits, labels, output=options.output, on_cell=on_cell, **keywords)
    written = [] if options.output is None else [f"written to {options.output}"]
    say(comparison, *written)
    failed = [entry for entry in comparison.not_run if entry["why"].startswith("failed: ")]
    return _incomplete(
        tuple(f"{e['set']}, {e['chain']}: {e['method']}, seed {e['seed']}: {e['why'][8:]}" for e in failed)
    )


class Run(RunOptions):
    """Options of `cauc run`."""

    pool: PoolFile = POOL
    policy: PolicyFile = POLICY
    input: Annotated[str, BeforeValidator(as_dataset), Flag("NAME|PATH")] = option(
        "a file or folder of tables or images, by path or URI, or NAME=PATH for the files of a benchmark", ...
    )
    output: OutFolder = option("a new folder, by path or URI", Path("run"))


def run(options: Run, say: Say) -> None:
    """Run a cascade on Ray."""
    from cauc_ray.api import online

    policy, own = Policy.load(options.policy), options.part(RunOptions)
    with live.run_progress(policy.cost_unit) as on_progress:
        summary = online.run(options.pool, policy, options.input, options.output, **own, on_progress=on_progress)
    say(summary, f"written to {options.output}")


class Serve(ServeOptions):
    """Options of `cauc serve`."""

    pool: PoolFile = POOL
    policy: PolicyFile = POLICY


def serve(options: Serve, say: Say) -> None:
    """Serve a cascade until interrupted; what it is called and where is shown as soon as it answers."""
    from cauc_ray.api import serving

    if options.local:  # elsewhere Serve has logs of its own, and takes connections in another process
        from cauc_ray.serving.connections import raise_file_limit

        raise_file_limit()
        log = logging.getLogger("cauc_ray")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    with ExitStack() as stack:
        with live.progress("starting") as on_wait:
            served = serving.serve(options.pool, options.policy, **options.part(ServeOptions), on_wait=on_wait)
            service = stack.enter_context(served)
        say(service, "Ctrl-C ends it")
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has taken over SIGTERM
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.wait(ALIVE_S):
            service.require_alive()


class SetPolicy(SetPolicyOptions):
    """Options of `cauc policy set`."""

    policy: Annotated[Location | None, Flag("POLICY", is_positional=True)] = option(
        "a policy file (default: the one in force)"
    )


def set_policy(options: SetPolicy, say: Say) -> None:
    """Change the policy of a running service."""
    from cauc_ray.api import serving

    say(serving.set_policy(options.policy, **options.part(SetPolicyOptions)))


class Plan(PlanOptions):
    """Options of `cauc plan`."""

    pool: PoolFile = POOL
    policy: PolicyFile = option("a policy file that records how often its stages defer", ...)


def plan(options: Plan, say: Say) -> None:
    """Plan the replicas that sustain a rate."""
    from cauc_ray.planning.plan import plan as planned

    with live.progress("planning") as on_step:
        figures = planned(options.pool, options.policy, **options.part(PlanOptions), on_step=on_step)
    say(figures)


class Report(Options):
    """Options of `cauc report`."""

    folder: Annotated[Location, Flag("DIR", is_positional=True)] = option(
        "folder of the parts that no flag names", Path()
    )
    policy: PolicyFile | None = option(
        "a policy file (default: DIR/policy.json, or in DIR/policies the one of the run)"
    )
    logits: Annotated[Location | None, Flag("LOGITS")] = option("what the policy was fitted on (default: DIR/logits)")
    run: Folder | None = option("the output of cauc run with the policy (default: DIR/run)")
    comparison: Folder | None = option("the output of cauc compare on the table (default: DIR/comparison)")
    split: str = option("the split to measure on", "test")
    output: OutFile | None = option("the page to write (default: DIR/report.html)")


def report(options: Report, say: Say) -> None:
    """Write a policy's page and card."""
    from cauc_ray.reporting import writing

    with live.progress("reporting"):
        result = writing.report(**dict(options))
    say(result)


def _incomplete(failed: tuple[str, ...]) -> int:
    """Return the exit code of work that may have failed in parts, which are named on standard error."""
    for each in failed:
        print(f"cauc: failed: {each}", file=sys.stderr)
    return INCOMPLETE if failed else 0


class Show(Options):
    """Options of `cauc show`."""

    file: Annotated[Location, Flag("FILE", is_positional=True)] = option(
        "by path or URI, a policy, pool, logit table, run, comparison or Parquet file", ...
    )


def show_file(options: Show, say: Say) -> None:
    """Show what a file holds."""
    from cauc_ray.cli.contents import contents

    say(contents(options.file))


VERBS: Mapping[str, Verb] = {
    "demo": Verb(Demo, "cauc demo -o demo", demo),
    "collect": Verb(Collect, "cauc collect pool.yaml --dataset questions.csv -o logits", collect),
    "fit": Verb(Fit, f"cauc fit {shlex.quote(str(sample_logits()))} --method rf --budget 4", fit),
    "evaluate": Verb(Evaluate, "cauc evaluate logits --policy policy.json", evaluate),
    "compare": Verb(
        Compare,
        "cauc compare logits --methods single,base,rf,margin,oracle\n"
        "cauc compare logits --relative-budgets 0.3,0.5,0.8 --seeds 0,1,2 -o comparison\n"
        "cauc compare small=small.npy large=large.npy --labels labels.npy --costs 1,10 --points 10 -o table.tex",
        compare,
    ),
    "run": Verb(Run, "cauc run pool.yaml --policy policy.json --input photographs/ -o out", run),
    "serve": Verb(Serve, "cauc serve pool.yaml --policy policy.json --port 8000", serve),
    "policy set": Verb(SetPolicy, "cauc policy set --budget 4 --url http://127.0.0.1:8000", set_policy),
    "check": Verb(Check, "cauc check new-logits --policy policy.json", check),
    "plan": Verb(Plan, "cauc plan pool.yaml --policy policy.json --rate 200 --slo-p99 0.5", plan),
    "report": Verb(Report, "cauc report demo", report),
    "show": Verb(Show, "cauc show policy.json", show_file),
}
