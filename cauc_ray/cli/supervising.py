"""A command that can be stopped from outside whatever it does: it goes on in a process and session of its own.

Ray starts dozens of processes, in the group of the one that asks for them. A signal to that group, as Ctrl-C and most
process managers send it, ends them all in any order, and what is left cannot end in an orderly way. So the process that
was started stays behind, hears the signals, and has the other one stop; what does not stop in time is ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# From a signal to the end: for what is orderly, requests in flight included, and then for what is not.
ORDERLY_S = 7.0
KILLED_S = 1.0
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# What the new process is sent: Ray takes SIGTERM over once it starts, prints a stack and ends the process at once.
_STOP_CHILD = signal.SIGINT


def supervise(*, own_ray: bool) -> None:
    """Go on in a process and session of its own; the process that called exits when that one has ended.

    Returns in the new process only. SIGTERM, SIGINT or SIGHUP, to the caller or to its group, end both, with exit code
    0 and no process left; without them the exit code is the new process's.

    Args:
        own_ray: Put Ray's files in a folder of this command, which is deleted unless the command fails.
    """
    # A signal that comes while nobody is ready for it waits.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    folder = tempfile.mkdtemp(prefix="c", dir=os.environ.get("RAY_TMPDIR")) if own_ray else None
    alive, lifeline = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(lifeline)
        os.setsid()
        if folder is not None:
            os.environ["RAY_TMPDIR"] = folder
        leave_on_signals()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        threading.Thread(target=_end_with_supervisor, args=(alive,), daemon=True).start()
        return
    os.close(alive)
    code = _awaited(child)
    if folder is not None and (code == 0 or not os.listdir(folder)):
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def leave_on_signals() -> None:
    """Have SIGTERM, SIGINT and SIGHUP end this process in an orderly way, with exit code 0."""
    for number in _STOPS:
        signal.signal(number, _leave)


def _awaited(child: int) -> int:
    """Wait for the end of a process and of its session, passing on signals; return the exit code to end with."""
    asked = False

    def stop(*_: object) -> None:
        nonlocal asked
        if not asked:
            asked = True
            os.kill(child, _STOP_CHILD)
            signal.setitimer(signal.ITIMER_REAL, ORDERLY_S)

    signal.signal(signal.SIGALRM, lambda *_: _kill(child))
    for number in _STOPS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    # Not reaped yet, so that nobody else gets its number: that of the session, too.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.setitimer(signal.ITIMER_REAL, 0)
    deadline = time.monotonic() + KILLED_S
    while _kill(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 0 if asked else code if code >= 0 else 128 - code


def _leave(*_: object) -> None:
    """End this process in an orderly way, once."""
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(0)


def _end_with_supervisor(alive: int) -> None:
    """Stop this process and its session when the one that supervises it is gone."""
    os.read(alive, 1)  # nothing is ever written: it returns when the other end is closed
    os.kill(os.getpid(), _STOP_CHILD)
    time.sleep(ORDERLY_S)
    _kill(os.getpid())


def _kill(session: int) -> bool:
    """Kill all processes of a session, its leader last; return whether there were any besides the leader."""
    descendants = [pid for pid in _processes() if pid != session and _session_of(pid) == session]
    for pid in [*descendants, session]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(descendants)


def _processes() -> Iterator[int]:
    """Yield the process ids of all live processes."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if state not in "ZX":
            yield int(folder.name)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None
