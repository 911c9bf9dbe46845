"""The verbs of the cauc command: their options besides those of the library's functions, and their work."""

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
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from cauc_ray.api import array_files, live
from cauc_ray.api.array_files import LogitFiles
from cauc_ray.api.options import Common, DatasetName, Flag, Location, Options, Output, OutputPath, options_of
from cauc_ray.api.samples import sample_logits
from cauc_ray.policies.policy import Policy

# Exit codes besides 0: a check whose policy is not valid any more, and work that ended with failed rows or methods.
NOT_VALID, INCOMPLETE = 3, 5
# How often the command looks whether what it serves has ended by itself.
ALIVE_S = 0.5

# Called with a verb's result, lines that follow, and what JSON has besides.
Present: TypeAlias = Callable[..., None]
PoolFile: TypeAlias = Annotated[Location, Flag("POOL", is_positional=True)]


@dataclass(frozen=True)
class Verb:
    """A verb.

    Attributes:
        work: Its function, called with what shows results and with all options by name; returns an exit code, None for
            0. Options that it does not name itself go to the library.
        example: Commands that show it.
        function: The library's function that defines the other options, as module:name.
    """

    work: Callable[..., int | None]
    example: str
    function: str | None = None

    @cached_property
    def options(self) -> type[Options]:
        """Return the class of its options."""
        if self.function is None:
            return options_of(self.work)
        module, _, name = self.function.partition(":")
        return options_of(self.work, getattr(import_module(module), name))


def demo(present: Present, **options: Any) -> None:
    """Run the demo."""
    from cauc_ray.demo.pipeline import run_demo

    present(run_demo(**options))


def collect(
    present: Present,
    *,
    pool: PoolFile,
    dataset: Common[DatasetName],
    output: Common[Output] = Path("logits"),
    **options: Any,
) -> int:
    """Collect a pool's logits on a dataset.

    Args:
        output: A logit table, new or to add to.
    """
    from cauc_ray.api import collecting

    with live.collect_progress() as on_progress:
        summary = collecting.collect(pool, dataset, output, **options, on_progress=on_progress)
    present(summary, f"written to {output}")
    return INCOMPLETE if any(model["n_failed"] for model in summary["models"]) else 0


def fit(
    present: Present,
    *,
    logits: LogitFiles,
    labels: Location | None = None,
    output: Common[Output] = Path("policy.json"),
    **options: Any,
) -> None:
    """Fit a policy and write its file.

    Args:
        logits: A logit table, by path or URI; or arrays, as small=small.npy large=large.npy (.npy, .csv), or an .npz
            file with one for each model.
        labels: File of the labels of arrays (.npy, .csv; default: the array 'labels' of the .npz file).
        output: The policy file to write.
    """
    from cauc_ray.api import offline

    offline.require_output_file(output, *array_files.files_of(logits))
    source, known_labels = array_files.read_logits(logits, labels)
    with live.progress("searching" if options["search"] else "fitting"):
        policy = offline.fit(source, known_labels, **options)
        policy.save(output)
    present(policy, f"written to {output}", policy=str(output))


def evaluate(
    present: Present,
    *,
    logits: LogitFiles,
    policy: Common[Location],
    labels: Location | None = None,
    predictions: Common[OutputPath | None] = None,
    **options: Any,
) -> None:
    """Measure a policy on saved logits.

    Args:
        logits: A logit table, by path or URI; or arrays, as small=small.npy large=large.npy (.npy, .csv), or an .npz
            file with one for each model.
        labels: File of the labels of arrays (.npy, .csv; default: the array 'labels' of the .npz file).
        predictions: Write the answers to this Parquet file.
    """
    from cauc_ray.api import offline
    from cauc_ray.files.parquet import write_parquet

    if predictions is not None:
        offline.require_output_file(predictions, *array_files.files_of(logits), policy)
    source, known_labels = array_files.read_logits(logits, labels)
    loaded = Policy.load(policy)
    with live.progress("evaluating"):
        evaluation = offline.evaluate(source, loaded, labels=known_labels, **options)
        if predictions is not None:
            write_parquet(predictions, evaluation.to_arrow())
    present(evaluation)


def check(
    present: Present, *, logits: LogitFiles, policy: Common[Location], labels: Location | None = None, **options: Any
) -> int:
    """Check whether a policy is still valid on saved logits.

    Args:
        logits: A logit table, by path or URI; or arrays, as small=small.npy large=large.npy (.npy, .csv), or an .npz
            file with one for each model.
        labels: File of the labels of arrays, if any are known (.npy, .csv; default: the array 'labels' of the .npz
            file).
    """
    from cauc_ray.api import offline

    source, known_labels = array_files.read_logits(logits, labels, require_labels=False)
    loaded = Policy.load(policy)
    with live.progress("checking"):
        checked = offline.check(source, loaded, labels=known_labels, **options)
    present(checked)
    return 0 if checked.valid else NOT_VALID


def compare(
    present: Present, *, logits: LogitFiles | None = None, labels: Location | None = None, **options: Any
) -> int:
    """Fit methods and measure them side by side, over budgets, seeds and chains.

    Args:
        logits: Logit tables, by path or URI; or a table of scores (.parquet, .csv); or arrays, as small=small.npy
            large=large.npy (.npy, .npz, .csv), or one .npz with an array for each model; unless a config has sets.
        labels: File of the labels of arrays (.npy, .csv; default: the array 'labels' of the .npz file).
    """
    from cauc_ray.comparison import comparing
    from cauc_ray.data.scores import is_score_file

    source: Any = None
    known_labels = None
    if isinstance(logits, tuple) and len(logits) > 1:
        models, chains = options.pop("models"), options.pop("chains")
        chains = chains or ([models] if models else ())
        options["sets"] = [{"name": path.name, "logits": path, "chains": chains} for path in logits]
    elif isinstance(logits, tuple) and labels is None and is_score_file(logits[0]):
        source = logits[0]
    elif logits is not None:
        source, known_labels = array_files.read_logits(logits, labels)
    if not isinstance(source, Mapping):
        options["address"] = options["address"] or os.environ.get("RAY_ADDRESS") or None
    with live.progress("compare", "cells") as on_cell:
        comparison = comparing.compare(source, known_labels, **options, on_cell=on_cell)
    written = [] if options["output"] is None else [f"written to {options['output']}"]
    present(comparison, *written)
    failed = [entry for entry in comparison.not_run if entry["why"].startswith("failed: ")]
    for entry in failed:
        cell = f"{entry['set']}, {entry['chain']}: {entry['method']}, seed {entry['seed']}"
        print(f"cauc: failed: {cell}: {entry['why'].removeprefix('failed: ')}", file=sys.stderr)
    return INCOMPLETE if failed else 0


def run(
    present: Present,
    *,
    pool: PoolFile,
    policy: Common[Location],
    input: Common[DatasetName],
    output: Common[Output] = Path("run"),
    **options: Any,
) -> int:
    """Run a cascade on Ray.

    Args:
        output: A new folder, by path or URI.
    """
    from cauc_ray.api import online

    loaded = Policy.load(policy)
    with live.run_progress(loaded.cost_unit) as on_progress:
        summary = online.run(pool, loaded, input, output, **options, on_progress=on_progress)
    present(summary, f"written to {output}")
    return INCOMPLETE if summary["n_failed"] else 0


def serve(present: Present, *, pool: PoolFile, policy: Common[Location], **options: Any) -> None:
    """Serve a cascade until interrupted; its name and address are shown as soon as it answers."""
    from cauc_ray.api import serving

    if options["local"]:  # elsewhere Serve has logs of its own, and takes connections in another process
        from cauc_ray.serving.connections import raise_file_limit

        raise_file_limit()
        log = logging.getLogger("cauc_ray")
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    with ExitStack() as stack:
        with live.progress("serve", at_once=True) as on_wait:
            service = stack.enter_context(serving.serve(pool, policy, **options, on_wait=on_wait))
        present(service, "Ctrl-C ends it")
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):  # Ray has taken over SIGTERM
            signal.signal(number, lambda *_: stopped.set())
        while not stopped.wait(ALIVE_S):
            service.require_alive()


def set_policy(
    present: Present,
    *,
    policy: Common[Annotated[Location | None, Flag("POLICY", is_positional=True)]] = None,
    **options: Any,
) -> None:
    """Change the policy of a running service."""
    from cauc_ray.api import serving

    present(serving.set_policy(policy, **options))


def plan(present: Present, *, pool: PoolFile, policy: Common[Location], **options: Any) -> None:
    """Plan the replicas that sustain a rate."""
    from cauc_ray.planning.plan import plan as planned

    with live.progress("planning") as on_step:
        result = planned(pool, policy, **options, on_step=on_step)
    present(result)


def report(present: Present, *, policy: Common[Location | None] = None, **options: Any) -> None:
    """Write a policy's page and card."""
    from cauc_ray.reporting import writing

    with live.progress("reporting"):
        result = writing.report(policy=policy, **options)
    present(result)


def show_file(present: Present, *, file: Annotated[Location, Flag("FILE", is_positional=True)]) -> None:
    """Show what a file holds.

    Args:
        file: A policy, pool, logit table, run, comparison or Parquet file, by path or URI.
    """
    from cauc_ray.cli.contents import contents

    present(contents(file))


VERBS: Mapping[str, Verb] = {
    "demo": Verb(demo, "cauc demo -o demo", "cauc_ray.demo.pipeline:run_demo"),
    "collect": Verb(
        collect,
        "cauc collect pool.yaml --dataset questions.csv -o logits",
        "cauc_ray.api.collecting:collect",
    ),
    "fit": Verb(
        fit, f"cauc fit {shlex.quote(str(sample_logits()))} --method rf --budget 4", "cauc_ray.api.offline:fit"
    ),
    "evaluate": Verb(evaluate, "cauc evaluate logits --policy policy.json", "cauc_ray.api.offline:evaluate"),
    "compare": Verb(
        compare,
        "cauc compare logits --methods single,base,rf,margin,oracle\n"
        "cauc compare logits --relative-budgets 0.3,0.5,0.8 --seeds 0,1,2 -o comparison\n"
        "cauc compare small=small.npy large=large.npy --labels labels.npy --costs 1,10 --points 10 -o table.tex",
        "cauc_ray.comparison.comparing:compare",
    ),
    "run": Verb(run, "cauc run pool.yaml --policy policy.json --input photographs/ -o out", "cauc_ray.api.online:run"),
    "serve": Verb(serve, "cauc serve pool.yaml --policy policy.json --port 8000", "cauc_ray.api.serving:serve"),
    "policy set": Verb(
        set_policy,
        "cauc policy set --budget 4 --url http://127.0.0.1:8000",
        "cauc_ray.api.serving:set_policy",
    ),
    "check": Verb(check, "cauc check new-logits --policy policy.json", "cauc_ray.api.offline:check"),
    "plan": Verb(
        plan,
        "cauc plan pool.yaml --policy policy.json --rate 200 --slo-p99 0.5",
        "cauc_ray.planning.plan:plan",
    ),
    "report": Verb(report, "cauc report demo", "cauc_ray.reporting.writing:report"),
    "show": Verb(show_file, "cauc show policy.json"),
}
