"""The cauc command: its verbs and their flags, errors, warnings, signals and output, which all verbs have in common."""

from __future__ import annotations

import argparse
import difflib
import io
import json
import logging
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin

from cauc_ray import __version__
from cauc_ray.cli.supervising import leave_on_signals, supervise
from cauc_ray.errors import CaucError, OptionError, masked, own_warnings

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from cauc_ray.api.options import Flag, Options
    from cauc_ray.cli.verbs import Verb


# What each verb does; how is in cauc_ray.cli.verbs, which takes long to import.
VERBS: Mapping[str, str] = {
    "demo": "train three small models, then collect, fit, compare and run a cascade of them",
    "collect": "save the logits of a pool's models on a labelled dataset",
    "fit": "fit a policy on saved logits",
    "evaluate": "measure a policy on saved logits",
    "compare": "compare methods over budgets, chains and seeds",
    "run": "run a policy's cascade on real inputs",
    "serve": "serve a policy's cascade over HTTP",
    "policy set": "change the policy of a running service",
    "check": "check whether a policy is still valid on saved logits; exit code 3 where it is not",
    "plan": "plan the replicas of each stage for a rate of requests",
    "report": "write an HTML page on a policy, and its policy card",
    "show": "show what a file or folder of cauc-ray holds",
}
# For one release.
REMOVED = {
    "inspect": "cauc show",
    "paper": "python -m jobs.paper, in a checkout",
    "sweep": "cauc compare, which takes budgets, seeds and chains",
    "submit": "Ray's own command: ray job submit -- cauc VERB --config FILE",
}
SHELLS = ("bash", "zsh", "tcsh")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `cauc` and exit.

    - 0: done.
    - 1: an internal error.
    - 2: bad input.
    - 3: a check that fails.
    - 4: infrastructure that is worth a retry: a lost cluster, a stage that is down.
    - 5: done with failed rows or methods.
    - 130, 143: stopped by Ctrl-C, or as `ray job stop` does.
    """
    # A stream that the caller has closed is None; nobody reads what goes there.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if arguments is None:
        with suppress(FileNotFoundError):  # the current folder is gone
            sys.path.append(os.getcwd())  # where rules and factories of a user are, as for `python -m`
    options = parse(sys.argv[1:] if arguments is None else list(arguments))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a dash shall not end the program
    terminated = threading.Event()
    try:
        with _stopped_by_sigterm(terminated):
            sys.exit(_run(options, is_process=arguments is None))
    except CaucError as error:
        if options.debug:
            raise
        _say("error", str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # The reader has seen enough. Nothing more can be written there, not by Python's own last flush either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)  # as rich does, which writes the tables
    except KeyboardInterrupt:
        _say("stopped", "interrupted")
        _end(130, is_process=arguments is None)
    except SystemExit as end:
        if terminated.is_set() or end.code == signal.SIGTERM:
            _say("stopped", "terminated")
            _end(128 + signal.SIGTERM, is_process=arguments is None)
        raise
    except Exception as error:
        if options.debug:
            raise
        if isinstance(error, OSError) and error.strerror:  # too long a name, a disk that is full
            _say("error", f"{error.filename or 'the output'}: {error.strerror}")
            sys.exit(2)
        _say("error", f"{type(error).__name__}: {error} (internal error, please report; --debug shows where)")
        sys.exit(1)


def _run(options: argparse.Namespace, *, is_process: bool) -> int:
    """Check a verb's options, do its work, and return the exit code."""
    from cauc_ray.api.options import Door

    verb = _verb(options.verb)
    fields = verb.options.model_fields
    flag_values = {name: value for name, value in vars(options).items() if name in fields}
    flags = {name: spelled[-1] for name, field in fields.items() if (spelled := spellings_of(name, field))}
    door = Door(flags, flag_values, None if (config := options.config) is None else Path(config))
    read = verb.options.of(flag_values, door) if config is None else verb.options.read(config, flag_values, flags)
    checked = dict(read)
    if options.verb == "serve" and is_process and sys.platform == "linux":
        # Before anything takes long: from here on a signal ends it in an orderly way.
        if checked["local"]:
            leave_on_signals()
        else:
            supervise(own_ray=(checked["address"] or os.environ.get("RAY_ADDRESS") or "local") == "local")
    out = sys.stdout

    def present(result: Any, *lines: str, **about: str) -> None:
        with redirect_stdout(out):
            if options.json:
                print(masked(json.dumps({**about, **result.as_json()}, allow_nan=False)))
            else:
                result.sheet().print()
                print(*map(masked, lines), sep="\n", end="\n" if lines else "")
            out.flush()

    # Ray writes to standard output when it starts, when it ends and when a process dies; that is for the answer alone.
    with warnings_on_stderr("cauc"), open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            return verb.work(present, **checked) or 0
        except OptionError as error:
            raise door.error(error.args[0]) from error


def _verb(name: str) -> Verb:
    from cauc_ray.cli import verbs

    return verbs.VERBS[name]


def _end(code: int, *, is_process: bool) -> NoReturn:
    """Exit after a signal: at once, since Ray's threads may abort an interpreter that ends while they run."""
    if is_process:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


@contextmanager
def _stopped_by_sigterm(terminated: threading.Event) -> Iterator[None]:
    """End the block on SIGTERM by SystemExit, and note it: where Ray waits, the exception loses its number."""

    def stop(number: int, frame: object) -> None:
        terminated.set()
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
    line = masked(f"cauc: {kind}: {' '.join(message.split())}")
    # Names in others' files must not move the cursor.
    print("".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line), file=sys.stderr)


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
            general = self.add_argument_group("options of every verb")
            general.add_argument(
                "--config", metavar="FILE", help="YAML file with options by name; flags take precedence"
            )
            general.add_argument("--json", action="store_true", help="Print one JSON object instead of tables")
            general.add_argument("--debug", action="store_true", help="Show tracebacks")
            general.add_argument("-h", "--help", action="help", help="Show this help and exit")
            positionals = [
                (action.metavar or action.dest, verb.options.model_fields[action.dest].is_required())
                for action in self._get_positional_actions()
            ]
            words = [str(word) if is_required else f"[{word}]" for word, is_required in positionals]
            self.usage = " ".join([self.prog, *words, "[options]"])
            self.epilog = "example:\n" + textwrap.indent(verb.example, "  ")

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
        verb_parser = next((verb for verb in verbs if verb.prog == f"cauc {options.verb}"), parser)
        flags = [flag for action in verb_parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        if not unknown[0].startswith("-"):
            hint = "; write lists with commas, as A,B,C"
        verb_parser.error(f"unknown argument {unknown[0]!r}{hint}")
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
            outer = verbs.add_parser(within, help="change a service's policy", allow_abbrev=False)
            groups[within] = outer.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=_Parser)
        verb = groups[within].add_parser(
            word,
            prog=f"cauc {name}",
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        verb.set_defaults(verb=name)
        verb.lazy = name
        made.append(verb)
    return parser, made


def add_options(verb: argparse.ArgumentParser, options: type[Options]) -> None:
    """Give a verb a flag for each of its options, in the groups of the help.

    What is not given is absent from the parsed namespace: a config file may give it, else its default holds. Types are
    checked by the options' class.
    """
    from cauc_ray.api.options import GROUPS, OTHER, Group

    groups = {group: verb.add_argument_group(group.title) for group in GROUPS}
    for name, field in options.model_fields.items():
        marks, flag = _marks(field), flag_of(field)
        if flag.config_only:
            continue
        group = next((mark for mark in marks if isinstance(mark, Group)), OTHER)
        kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
        kinds = _kinds(field.annotation)
        if kinds[0] is bool:
            kwargs["action"] = "store_true"
        elif get_origin(kinds[0]) is Literal:
            kwargs["choices"] = get_args(kinds[0])
        else:
            kwargs["metavar"] = flag.metavar or name.rpartition("_")[2].upper()
        if flag.is_positional:
            verb.add_argument(name, nargs="*" if flag.is_several else "?", **kwargs)
        else:
            groups[group].add_argument(*spellings_of(name, field), dest=name, **kwargs)


def flag_of(field: FieldInfo) -> Flag:
    """Return the form of an option on the command line."""
    from cauc_ray.api.options import Flag

    return next((mark for mark in reversed(_marks(field)) if isinstance(mark, Flag)), Flag())


def spellings_of(name: str, field: FieldInfo) -> tuple[str, ...]:
    """Return an option's spellings on the command line: flags, or its placeholder if it has a position."""
    flag = flag_of(field)
    if flag.is_positional:
        return (flag.metavar or name.upper(),)
    return () if flag.config_only else flag.spellings or (f"--{name.replace('_', '-')}",)


def _marks(field: FieldInfo) -> list[Any]:
    """Return the marks of an option's type, those of the parameter itself last."""
    return [*(mark for kind in _kinds(field.annotation) for mark in getattr(kind, "__metadata__", ())), *field.metadata]


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an option may have, but None."""
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [kind for kind in kinds if kind is not type(None)]


def _help(field: FieldInfo) -> str:
    default, about = field.get_default(), str(field.description)
    if field.is_required():
        about += " (required)"
    elif not (default is None or default is False or default in ((), {}) or "default:" in about):
        about += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
    return about.replace("%", "%%")


@contextmanager
def warnings_on_stderr(program: str) -> Iterator[None]:
    """Write each CaucWarning of a block to standard error as it arises, as one line, equal ones once.

    What models print on their replicas is written there, too.   program: what each line of a warning begins with.
    """
    written: set[str] = set()

    def write(message: str) -> None:
        text = " ".join(message.split())
        if text not in written:  # every method that is fitted may give the same
            written.add(text)
            _write(f"{program}: warning: {text}")

    output, handler = logging.getLogger("cauc_ray.output"), _Handler()
    output.addHandler(handler)
    output.setLevel(logging.INFO)
    try:
        with own_warnings(write):
            yield
    finally:
        output.removeHandler(handler)


class _Handler(logging.Handler):
    """Writes log records to whatever stands for standard error when they arise."""

    def emit(self, record: logging.LogRecord) -> None:
        _write(self.format(record))


def _write(line: str) -> None:
    # In one piece, through whatever stands for standard error now: a progress bar moves out of its way.
    # Where nobody reads it any more, the line is lost and the work goes on, as with Python's own warnings.
    with suppress(OSError):
        sys.stderr.write(f"{masked(line)}\n")
        sys.stderr.flush()
