"""Feedback on disk: whole after a kill, bounded, in order."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.serving.feedback_queue import BATCH_BYTES, FeedbackQueue

MOST = 10 * BATCH_BYTES
# Adds messages for ever, and says after each that it is added.
ADDS = f"""
import sys
from pathlib import Path
from cauc_ray.serving.feedback_queue import FeedbackQueue
queue, number = FeedbackQueue(Path(sys.argv[1]), {MOST}), 0
while True:
    queue.add({{"number": number, "label": [0] * 500}})
    print(number, flush=True)
    number += 1
"""


def message(number, size=1):
    return {"number": number, "label": [0] * size}


def numbers(queue):
    """Take out all that waits, batch by batch."""
    found = []
    while (batch := queue.oldest()) is not None:
        assert queue.oldest() == batch  # until it is removed
        found += [one["number"] for one in batch.messages]
        queue.remove(batch)
        queue.remove(batch)
    assert queue.n_bytes == 0
    return found


def test_what_is_added_comes_out_in_order_also_of_another_process_s_queue(tmp_path):
    queue = FeedbackQueue(tmp_path, MOST)
    assert queue.oldest() is None
    for number in range(10):
        assert queue.add(message(number, 20_000)) == 0
        if number == 4:
            first = queue.oldest()
            assert 0 < len(first.messages) <= 5
    again = FeedbackQueue(tmp_path, MOST)
    assert again.n_bytes == queue.n_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert again.oldest() == first  # a batch keeps its id and its messages
    assert numbers(again) == list(range(10))
    assert not list(tmp_path.iterdir())


def test_the_bound_drops_the_oldest_and_counts_its_rows(tmp_path):
    queue, n_dropped, size = FeedbackQueue(tmp_path, 2 * BATCH_BYTES), 0, 10_000
    for number in range(100):
        n_dropped += queue.add(message(number, size))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) == queue.n_bytes <= 2 * BATCH_BYTES
    kept = numbers(queue)
    assert kept == list(range(100 - len(kept), 100))
    assert n_dropped == size * (100 - len(kept))
    assert len(kept) * size * 3 > BATCH_BYTES


def test_a_batch_that_is_dropped_while_it_is_sent_is_over(tmp_path):
    queue = FeedbackQueue(tmp_path, 2 * BATCH_BYTES)
    queue.add(message(0))
    batch = queue.oldest()
    while queue.oldest() == batch:
        queue.add(message(1, 50_000))
    queue.remove(batch)
    assert set(numbers(queue)) == {1}


@given(st.integers(0, 400), st.binary(max_size=5))
def test_a_torn_last_line_is_skipped(cut, rest):
    with TemporaryDirectory() as folder:
        require_whole_lines(Path(folder), cut, rest)


def require_whole_lines(folder, cut, rest):
    queue = FeedbackQueue(folder, MOST)
    for number in range(10):
        queue.add(message(number))
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:cut] + (rest if cut < len(whole) else b""))
    again = FeedbackQueue(folder, MOST)
    again.add(message(10))  # to a file of its own
    found = numbers(again)
    n_whole = whole[:cut].count(b"\n")
    assert found[:n_whole] == list(range(n_whole))
    assert found[-1] == 10
    assert len(found) <= n_whole + 2


def test_a_full_disk_costs_no_other_message(tmp_path):
    """Here files may have a few bytes only, so that what is written last is torn."""
    queue, (soft, hard) = FeedbackQueue(tmp_path, MOST), resource.getrlimit(resource.RLIMIT_FSIZE)
    queue.add(message(0))
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (queue.n_bytes + 5, hard))
        with pytest.raises(OSError, match="large"):
            queue.add(message(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    queue.add(message(2))
    assert numbers(queue) == [0, 2]


def test_a_kill_loses_nothing_that_was_added(tmp_path):
    for _ in range(2):
        command = [sys.executable, "-c", ADDS, str(tmp_path)]
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            while int(process.stdout.readline()) < 300:
                pass
            process.send_signal(signal.SIGKILL)
            added = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        last = added[-1] if added else 300
        found = numbers(FeedbackQueue(tmp_path, MOST))
        assert found in (list(range(last + 1)), list(range(last + 2)))
