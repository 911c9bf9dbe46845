"""The cauc command: its verbs, and what all of them do alike with options, errors, warnings, signals and output."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any, NoReturn

from cauc_ray import __version__
from cauc_ray.cli.flags import add_options
from cauc_ray.cli.supervising import leave_on_signals, supervise
from cauc_ray.cli.warned import warnings_on_stderr
from cauc_ray.errors import CaucError

if TYPE_CHECKING:
    from cauc_ray.cli.verbs import Verb

# What each verb does; how is in cauc_ray.cli.verbs, which takes long to import.
VERBS: Mapping[str, str] = {
    "demo": "train three small models, then collect, fit, compare and run a cascade of them",
    "collect": "save the logits of a pool's models on a labelled dataset",
    "fit": "fit a policy on saved logits",
    "evaluate": "measure a policy on saved logits",
    "compare": "compare methods on one chain of models",
    "sweep": "measure methods over budgets, chains and seeds",
    "run": "run a policy's cascade on real inputs",
    "serve": "serve a policy's cascade over HTTP",
    "policy set": "change the policy of a running service",
    "check": "check whether a policy is still valid on saved logits; exit code 3 where it is not",
    "plan": "plan the replicas of each stage for a rate of requests",
    "report": "write an HTML page on a policy, and its policy card",
    "paper": "make the paper's tables and figures from saved logits",
    "show": "show what a file or folder of cauc-ray holds",
}
# For one release.
REMOVED = {"inspect": "cauc show", "submit": "Ray's own command: ray job submit -- cauc VERB --config FILE"}
SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `cauc` and exit.

    0: done.   1: part of the work failed, or a fault of cauc-ray.   2: bad input.   3: a check found that the policy
    is not valid any more.   130, 143: stopped by Ctrl-C, or as `ray job stop` does.
    """
    # A stream that the caller has closed is None; nobody reads what goes there.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    options = parse(sys.argv[1:] if arguments is None else list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a dash shall not end the program
    try:
        with _stopped_by_sigterm():
            sys.exit(_run(options, is_process=arguments is None))
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
    except SystemExit as end:
        if end.code == signal.SIGTERM:
            _say("stopped", "terminated")
            sys.exit(128 + signal.SIGTERM)
        raise
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, OSError) and error.strerror:  # too long a name, a disk that is full
            _say("error", f"{error.filename or 'the output'}: {error.strerror}")
            sys.exit(2)
        _say("error", f"{type(error).__name__}: {error} (a fault of cauc-ray; --debug shows where)")
        sys.exit(1)


def _run(options: argparse.Namespace, *, is_process: bool) -> int:
    """Check a verb's options, do its work, and return the exit code."""
    given = {name: value for name, value in vars(options).items() if name not in ("verb", "json", "debug", "config")}
    verb = _verb(options.verb)
    # Flags that name paths are relative to the current folder, whatever the config's.
    own = verb.options.of(given) if options.config is None else verb.options.read(options.config, given)
    if options.verb == "serve" and is_process and sys.platform == "linux":
        # Before anything takes long: from here on a signal ends it in an orderly way.
        if getattr(own, "local", False):
            leave_on_signals()
        else:
            supervise(own_ray=(getattr(own, "address", None) or os.environ.get("RAY_ADDRESS") or "local") == "local")
    out = sys.stdout

    def say(result: Mapping[str, Any], show: Callable[[], None]) -> None:
        with redirect_stdout(out):
            if options.json:
                print(json.dumps(result, allow_nan=False))
            else:
                show()
            out.flush()

    # Ray writes to standard output when it starts, when it ends and when a process dies; that is for the answer alone.
    with warnings_on_stderr("cauc"), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return verb.work(own, say) or 0


def _verb(name: str) -> Verb:
    from cauc_ray.cli import verbs

    return verbs.VERBS[name]


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """End the block on SIGTERM as Ray does, which handles it once it has started: by SystemExit with its number."""

    def stop(number: int, frame: object) -> None:
        sys.exit(number)

    if threading.current_thread() is not threading.main_thread():  # which alone can hear signals
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(kind: str, message: str) -> None:
    print(f"cauc: {kind}: {' '.join(message.split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line.

    lazy: the verb whose options are its flags, loaded where they are parsed.
    """

    lazy: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments as argparse does."""
        self.load()
        return super().parse_known_args(args, namespace)

    def load(self) -> None:
        """Add the flags of the verb."""
        name, self.lazy = self.lazy, None
        if name is not None:
            verb = _verb(name)
            add_options(self, verb.options)
            self.epilog = f"example:\n  {verb.example}"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}; see {self.prog} --help\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the verb and its flags that the words of a command line give; exits with 2 and a line for bad ones."""
    parser, verbs = _parsers()
    if not arguments:
        parser.print_help()
        sys.exit(0)
    if arguments[0] in REMOVED:
        parser.exit(2, f"cauc: error: `cauc {arguments[0]}` is replaced by {REMOVED[arguments[0]]}\n")
    options: argparse.Namespace
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        own = next((verb for verb in verbs if verb.prog == f"cauc {options.verb}"), parser)
        flags = [flag for action in own._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        own.error(f"unknown argument {unknown[0]!r}" + (f"; did you mean {near[0]!r}" if near else ""))
    if options.completion is None:
        del options.completion
        return options
    import shtab

    for verb in verbs:
        verb.load()
    print(shtab.complete(parser, options.completion))
    sys.exit(0)


def _parsers() -> tuple[_Parser, list[_Parser]]:
    parser = _Parser(
        prog="cauc",
        description="Calibrated model cascades: pay for the expensive model only where it helps.",
        epilog="Start with: cauc demo. Help on a verb: cauc VERB --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cauc-ray {__version__}")
    parser.add_argument("--completion", choices=SHELLS, help="print a completion script for a shell")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser, title="verbs")
    groups, made = {"": verbs}, []
    for name, about in VERBS.items():
        within, _, word = name.rpartition(" ")
        if within not in groups:
            outer = verbs.add_parser(within, help=about, allow_abbrev=False)
            groups[within] = outer.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
        verb = groups[within].add_parser(
            word,
            prog=f"cauc {name}",
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.set_defaults(verb=name)
        verb.lazy = name
        verb.add_argument("--config", metavar="FILE", help="YAML file with options by name; flags take precedence")
        verb.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        verb.add_argument("--debug", action="store_true", help="show tracebacks")
        made.append(verb)
    return parser, made
