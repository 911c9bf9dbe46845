"""The cauc command: its spellings, and what every verb does alike with errors, warnings and output."""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from cauc_ray import __version__
from cauc_ray.api.flags import add_options, names, pairs
from cauc_ray.api.samples import sample_logits
from cauc_ray.cli.supervising import leave_on_signals, supervise
from cauc_ray.cli.warned import warnings_on_stderr
from cauc_ray.errors import CaucError

# The exit code of a check whose policy no longer holds.
NO_LONGER_HOLDS = 3


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `cauc` and exit: 0, or 2 on bad input, 130 when interrupted, 1 on a fault of our own or a closed pipe.

    3 where a check finds that a policy no longer holds.
    """
    # A stream that the caller has closed is None; nobody reads what goes there.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a dash shall not end the program
    try:
        if options.verb == "serve" and arguments is None and sys.platform == "linux":
            # Before anything takes long: from here on a signal ends it in an orderly way.
            if options.local:
                leave_on_signals()
            else:
                supervise(own_ray=(options.address or os.environ.get("RAY_ADDRESS") or "local") == "local")
        # The verbs import what they need: `cauc --help` shall not wait for pyarrow, rich and Ray.
        from cauc_ray.cli.verbs import VERBS

        with warnings_on_stderr("cauc"):
            result = VERBS[options.verb](options)  # None where all is said
        if options.json and result is not None:
            print(json.dumps(result, allow_nan=False))
        sys.stdout.flush()
        sys.exit(NO_LONGER_HOLDS if options.verb == "check" and result and not result["holds"] else 0)
    except CaucError as error:
        if options.debug:
            raise
        _say("error", str(error))
        sys.exit(2)
    except BrokenPipeError:
        # The reader has seen enough. Nothing more can be written there, not by Python's own last flush either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as rich does, which writes the tables
    except KeyboardInterrupt:
        _say("stopped", "interrupted")
        sys.exit(130)
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, OSError) and error.strerror:  # too long a name, a disk that is full
            _say("error", f"{error.filename or 'the output'}: {error.strerror}")
            sys.exit(2)
        _say("error", f"{type(error).__name__}: {error} (a fault of cauc-ray; --debug shows where)")
        sys.exit(1)


def _say(kind: str, message: str) -> None:
    print(f"cauc: {kind}: {' '.join(message.split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    options: of api.options, the definition of further flags; loaded where they are parsed, as it needs numpy.
    """

    options: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does."""
        name, self.options = self.options, None
        if name is not None:
            add_options(self, getattr(import_module("cauc_ray.api.options"), name))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="cauc",
        description="Calibrated model cascades: pay for the dear model only where it helps.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cauc-ray {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)

    demo = _verb(verbs, "demo", "train three small models, calibrate, fit, sweep and run a live cascade, offline")
    demo.add_argument("-o", "--output", metavar="DIR", help="a new folder (default: cauc-demo, or the next free)")

    collect = _verb(verbs, "collect", "let a pool's models answer a labelled dataset and save their logits, on Ray")
    collect.add_argument("pool", metavar="POOL")
    collect.add_argument(
        "--dataset",
        required=True,
        metavar="NAME|PATH",
        help="a benchmark by name, NAME=PATH for its files, or a file or folder (Parquet, JSONL, CSV, images)",
    )
    collect.add_argument("--split", help="only this one (default: calibration, validation and test)")
    collect.add_argument("--models", type=names, metavar="A,B", help="only these of the pool (default: all)")
    collect.add_argument(
        "--columns",
        type=pairs,
        default={},
        metavar="image=jpeg,…",
        help="the dataset's own names for example_id, label, image, question, choices (a+b+c for several), context",
    )
    collect.add_argument("--embedding", metavar="ENCODER", help="collect embeddings instead: a stage, hub id or folder")
    collect.add_argument("--seed", type=int, default=0, help="of the splits (default: 0)")
    collect.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one started for this)")
    collect.add_argument("-o", "--output", metavar="LOGITS", required=True, help="a logit table, new or to go on with")

    fit = _verb(verbs, "fit", "fit a policy on a logit table")
    fit.formatter_class = argparse.RawDescriptionHelpFormatter
    fit.epilog = (
        "example, on a table that comes with the package:\n"
        f"  cauc fit {shlex.quote(str(sample_logits()))} --method rf --budget 4 -o policy.json"
    )
    fit.add_argument("logits", metavar="LOGITS")
    fit.options = "FitOptions"
    fit.add_argument("-o", "--output", metavar="FILE", required=True, help="the policy file to write")

    evaluate = _verb(verbs, "evaluate", "replay a policy on saved logits")
    evaluate.add_argument("logits", metavar="LOGITS")
    evaluate.add_argument("--policy", metavar="FILE", required=True)
    evaluate.options = "EvaluateOptions"
    evaluate.add_argument("--predictions", metavar="FILE", help="write the answers to this Parquet file")

    check = _verb(verbs, "check", "say whether a policy still holds on saved logits; exit 3 where it does not")
    check.add_argument("logits", metavar="LOGITS")
    check.add_argument("--policy", metavar="FILE", required=True, help="fitted with labelled validation")
    check.options = "CheckOptions"

    sweep = _verb(verbs, "sweep", "trace accuracy over cost for several methods")
    sweep.add_argument("logits", metavar="LOGITS")
    sweep.options = "SweepOptions"
    sweep.add_argument("-o", "--output", metavar="FILE", required=True, help="the Parquet file to write")

    compare = _verb(verbs, "compare", "fit every method of the paper on one chain, and measure them side by side")
    compare.add_argument("logits", metavar="LOGITS")
    compare.options = "CompareOptions"
    compare.add_argument(
        "-o", "--output", metavar="DIR", help="a new folder for rows.parquet, curves.parquet and comparison.json"
    )

    run = _verb(verbs, "run", "run a policy's cascade on real inputs, on Ray")
    run.add_argument("pool", metavar="POOL")
    run.add_argument("--policy", metavar="FILE", required=True)
    run.add_argument(
        "--input",
        metavar="DATA",
        required=True,
        help="Parquet, CSV or JSONL with example_id, or images: a file or folder",
    )
    run.add_argument("-o", "--output", metavar="DIR", required=True, help="a new folder, by path or URI")
    run.add_argument("--resume", action="store_true", help="go on with the run in DIR that was ended early")
    run.add_argument("--retry-failed", action="store_true", help="with --resume: try the rows in DIR/failed again")
    run.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one started for this run)")

    serve = _verb(verbs, "serve", "serve a policy's cascade over HTTP, on Ray Serve, until interrupted")
    serve.add_argument("pool", metavar="POOL")
    serve.add_argument("--policy", metavar="FILE", required=True)
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    serve.add_argument("--port", type=int, default=8000, help="where to listen (default: 8000; 0 takes a free one)")
    serve.add_argument("--name", help="of the model in URLs (default: the pool's)")
    serve.add_argument(
        "--local", action="store_true", help="in this process, without Ray: for edge boxes and development"
    )
    serve.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one started for this)")

    plan = _verb(verbs, "plan", "say how many replicas of each stage sustain a rate of requests, and what they cost")
    plan.description = (
        f"{plan.description}. How long batches take comes from an earlier run (--ledger), is measured now (--input), "
        "or is what saved stages are told to take."
    )
    plan.add_argument("pool", metavar="POOL")
    plan.add_argument("--policy", metavar="FILE", required=True, help="one that says how often its stages defer")
    plan.add_argument("--rate", type=float, required=True, metavar="R", help="requests a second, one row each")
    plan.add_argument("--slo-p99", type=float, metavar="S", help="seconds within which 99 of 100 shall be answered")
    seconds = plan.add_mutually_exclusive_group()
    seconds.add_argument(
        "--ledger", metavar="RUN", help="folder of an earlier `cauc run`, whose calls tell how long batches take"
    )
    seconds.add_argument("--input", metavar="DATA", help="rows to measure that on now, on Ray, as for run")
    plan.add_argument(
        "--address", help="of a Ray cluster for --input (default: RAY_ADDRESS, else one started for this)"
    )

    policy = verbs.add_parser("policy", help="change the policy of a running service", allow_abbrev=False)
    changes = policy.add_subparsers(dest="change", required=True, metavar="COMMAND", parser_class=_Parser)
    change = _verb(changes, "set", "change the policy of a running service, without restarting anything")
    change.add_argument("policy", metavar="POLICY", nargs="?", help="a policy file (default: the one in force)")
    number = change.add_mutually_exclusive_group()
    number.add_argument("--budget", type=float, metavar="B", help="mean cost per example, from the policy's own curve")
    number.add_argument("--threshold", type=float, metavar="T", help="a threshold to use as it is")
    change.add_argument("--url", default="http://127.0.0.1:8000", help="of the service (default: %(default)s)")
    change.add_argument("--name", help="of the model (default: the only one)")

    report = _verb(verbs, "report", "write one self-contained HTML page on a policy, and its policy card")
    report.add_argument("folder", metavar="DIR", help="where its policy, logit table, run or comparison lie")
    report.add_argument("--policy", metavar="FILE", help="where there are several (default: the one that a run was of)")
    report.add_argument("--logits", metavar="LOGITS", help="what the policy was fitted on, if not the only one in DIR")
    report.add_argument("--split", default="test", help="where final figures are measured (default: test)")
    report.add_argument("-o", "--output", metavar="FILE", help="the page to write (default: DIR/report.html)")

    inspect = _verb(verbs, "inspect", "say what a file or folder of cauc-ray holds")
    inspect.add_argument("file", metavar="FILE")
    return parser


def _verb(verbs: argparse._SubParsersAction[_Parser], name: str, says: str) -> _Parser:
    verb = verbs.add_parser(name, help=says, description=says, allow_abbrev=False)
    verb.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    verb.add_argument("--debug", action="store_true", help="show tracebacks")
    return verb
