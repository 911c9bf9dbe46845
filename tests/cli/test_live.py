"""What people see of a run while it goes on."""

import io
import os
import pty
import re
import subprocess
import sys
import threading

import pytest
from asking import until
from rich.console import Console

from cauc_ray.api import live
from cauc_ray.execution.progress import RateMeter, RunProgress, StageProgress

SMALL = StageProgress("small", 4096, 512, 640, 360, replicas=4, starting=1, cost=226.0)
LARGE = StageProgress("a-large-model-with-a-long-name [/red]", 812, 256, 250, 0, replicas=2, cost=4.09e7)


def drawn(width, *stages, n_rows=1_281_167, elapsed_s=3725):
    """Return the lines of a view ten seconds after a start."""
    meter = RateMeter()
    meter.add(RunProgress(100.0, n_rows, 0, tuple(StageProgress(stage.name, replicas=1) for stage in stages)))
    now = RunProgress(110.0, n_rows, 512, stages)
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(live.run_view(now, meter.add(now), "GFLOPs", elapsed_s))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_every_number_is_there_at_every_width(width):
    heading, small, large, whole = drawn(width, SMALL, LARGE)
    assert max(map(len, (heading, small, large, whole))) <= width
    assert heading.split() == ["stage", "queued", "in", "flight", "replicas", "rows/s", "accepted", "cost", "(GFLOPs)"]
    assert small.split() == ["small", "4,096", "512", "4", "+1", "100", "64.0", "%", "226"]
    assert large.split()[-8:] == ["812", "256", "2", "25", "100.0", "%", "40.9", "M"]
    assert large.startswith("a-large-mod" if width < 120 else "a-large-model-with-a-long-name [/red]")
    assert whole.endswith("  890 of 1,281,167 rows  89 rows/s  1:02:05 gone, 3:59:45 left")


def test_what_went_wrong_is_told_once_there_is_something():
    failing = StageProgress("large", failed=1234, degraded=3, replicas=1)
    assert drawn(80, SMALL, failing)[3] == "failed: 1,234 at large; degraded: 3 at large"
    assert not any("failed" in line or "degraded" in line for line in drawn(80, SMALL, LARGE))


def test_an_input_of_unknown_length_has_neither_bar_nor_end():
    assert drawn(120, SMALL, n_rows=None)[-1] == "640 rows  64 rows/s  1:02:05 gone"


def test_where_nobody_watches_one_line_comes_at_once_and_nothing_is_drawn(capsys):
    with live.run_progress("GFLOPs") as on_progress, live.collect_progress() as on_models:
        for _ in range(2):
            on_progress(RunProgress(0.0, 10, 5, (SMALL, LARGE)))
            on_models({"small": RunProgress(0.0, 10, 5, (SMALL,))})
    with live.progress("starting", at_once=True) as on_wait, live.progress("planning") as on_step:
        for _ in range(2):
            on_wait("starting 3 stages …")
            on_step("sizing")
    expected = ["cauc: starting 2 stages …", "cauc: starting 1 stage …", "cauc: starting 3 stages …"]
    assert capsys.readouterr() == ("", "\n".join([*expected, ""]))


# As the verbs do it: standard output is somewhere else while the work goes on, and then has the answer.
WATCHED = """
import os, sys
from contextlib import redirect_stdout
from cauc_ray.execution.progress import RunProgress, StageProgress
from cauc_ray.api import live
at = RunProgress(0.0, 10, 5, (StageProgress("small", 1, 2, 3, 2, replicas=1),))
manager, seen = {"run": (live.run_progress("GFLOPs"), at), "collect": (live.collect_progress(), {"small": at})}["KIND"]
with manager as on_progress, open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
    print("not yet", file=sys.stderr, flush=True)
    for _ in range(3):
        on_progress(seen)
    print("lost")
print("the answer")
"""


@pytest.mark.parametrize("kind", ["run", "collect"])
def test_a_terminal_shows_it_from_the_first_look_on_and_has_the_answer_afterwards(kind):
    ours, theirs = pty.openpty()
    code = WATCHED.replace("KIND", kind)
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    stderr_bytes = b""
    while more := _read(ours):
        stderr_bytes += more
    assert process.wait(timeout=60) == 0, stderr_bytes.decode()
    before, after = stderr_bytes.decode().split("not yet")
    assert not before
    assert "small" in after
    assert "lost" not in after
    # The view is wiped, line by line, before the answer.
    assert re.search(r"\x1b\[2K(\x1b\[\?25h)?the answer\r\n$", after.replace("\x1b[?25h", "")), after


def _read(fd):
    try:
        return os.read(fd, 65536)
    except OSError:  # the other end was closed
        return b""


def test_where_nobody_watches_lines_come_until_the_end(monkeypatch):
    monkeypatch.setattr(live, "LINE_EVERY_S", 0.001)
    monkeypatch.setattr(sys, "stderr", stderr := io.StringIO())
    threads = set(threading.enumerate())
    with live.progress("compare", "methods") as on_next:
        on_next("rf", 1, 3)
        until(lambda: stderr.getvalue().count("cauc: compare: 1 of 3 methods, 0:0") > 1)
    for thread in set(threading.enumerate()) - threads:
        thread.join(60)
        assert not thread.is_alive()  # which wrote the lines
