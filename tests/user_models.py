"""Factories such as a user would write, for pools of kind python."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress

import numpy as np

no_callable = dict


def by_x(factor=1.0):
    """Answer with two logits: the column x times a factor, and 0."""
    return lambda batch: np.stack([factor * batch["x"], np.zeros(len(batch["x"]))], axis=1)


def on_device(device="unknown"):
    """Answer with costs of 1 on a GPU and 0 elsewhere, until the model is closed."""
    from cauc_ray import Answers

    class Model:
        closed = False

        def __call__(self, batch):
            if self.closed:
                raise RuntimeError("closed")
            n = len(batch["x"])
            return Answers(np.zeros((n, 2), np.float32), costs=np.full(n, float(device == "cuda")))

        def close(self):
            self.closed = True

    return Model()


def labelled(names):
    """Answer x as an option's number, and name that option."""
    from cauc_ray import Answers

    def answer(batch):
        numbers = [int(value) for value in batch["x"]]
        return Answers(np.eye(len(names), dtype=np.float32)[numbers], labels=[names[number] for number in numbers])

    return answer


def notes_its_end(path):
    """Answer as by_x does, and write a file when the model is closed."""
    answer = by_x()

    class Model:
        def __call__(self, batch):
            return answer(batch)

        def close(self):
            with open(path, "a") as file:
                file.write(f"{os.getpid()}\n")

    return Model()


def before(factory):
    """Make a factory of a function of a batch and options: its model does that, and then answers as another's does."""

    def decorate(do):
        def of(**options):
            model = factory()

            def answer(batch):
                do(batch, **options)
                return model(batch)

            return answer

        return of

    return decorate


def loads_unless(path):
    """Answer as by_x does; it cannot be loaded while there is a file at a path."""
    if os.path.exists(path):
        raise OSError("not now")
    return by_x()


def is_first(path):
    """Say whether this is the first process to ask for a path."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        return True
    return False


def loads_at_second_try(path):
    """Answer as by_x does; the first process that loads it cannot."""
    if is_first(path):
        raise OSError("the device is broken")
    return by_x()


def mended(path, factory, **kwargs):
    """Answer as another factory's model does, or, once there is a file at a path, as by_x does."""
    return by_x() if os.path.exists(path) else globals()[factory](**kwargs)


@before(by_x)
def tells_modules(batch, path):
    """Answer as by_x does, and write what the process has imported by then."""
    with open(path, "w") as file:
        json.dump(sorted({name.partition(".")[0] for name in sys.modules}), file)


def saved_while(logits, model, fails, hangs):
    """Answer as a saved model does; while there is a file at `fails` it raises, at `hangs` it takes two seconds."""
    import pyarrow.dataset as ds  # only here: services without Ray do without it

    files = ds.dataset(logits, partitioning="hive", exclude_invalid_files=True)
    rows = files.to_table(filter=ds.field("model") == model).to_pylist()
    table = {row["example_id"]: row["logits"] for row in rows}

    def answer(batch):
        if os.path.exists(fails):
            raise ValueError("not on these rows")
        if os.path.exists(hangs):
            time.sleep(2.0)
        return np.array([table[one] for one in batch["example_id"]], dtype=np.float32)

    return answer


def saved_and_logged(logits, log):
    """Answer from a folder of one model's logits, and add a line with the ids of each call's rows to the file `log`."""
    import pyarrow.parquet as pq

    rows = pq.read_table(logits, columns=["example_id", "logits"], partitioning=None).to_pylist()
    table = {row["example_id"]: row["logits"] for row in rows}

    def answer(batch):
        ids = batch["example_id"].tolist()
        with open(log, "a") as file:
            file.write(json.dumps(ids) + "\n")
        return np.array([table[one] for one in ids], dtype=np.float32)

    return answer


def tracing_that_exits():
    """Set up OpenTelemetry so that the first span ends the event loop."""
    from opentelemetry import trace

    class Exits(trace.NoOpTracer):
        def start_span(self, *args, **kwargs):
            raise SystemExit("no spans")

    class Provider(trace.NoOpTracerProvider):
        def get_tracer(self, *args, **kwargs):
            return Exits()

    trace.set_tracer_provider(Provider())


def hanging():
    """Answer once `hanging.leave` is set, and set `hanging.entered` before."""

    def answer(batch):
        hanging.entered.set()
        assert hanging.leave.wait(60)
        return by_x()(batch)

    return answer


def loads_slowly(seconds, log=os.devnull):
    """Answer as by_x does, after some seconds in which the model loads; note that it begins to."""
    with open(log, "a") as file:
        file.write("loads\n")
    time.sleep(seconds)
    return by_x()


@before(by_x)
def hangs_on(batch, x):
    """Answer as by_x does, but hang on a batch that holds a value."""
    if (batch["x"] == x).any():
        time.sleep(600.0)


@before(by_x)
def slow_by_x(batch, seconds, log):
    """Answer as by_x does, after some seconds, and note each call as it begins."""
    with open(log, "a") as file:
        file.write(f"{len(batch['x'])}\n")
    time.sleep(seconds)


@before(by_x)
def by_x_once(batch, path):
    """Answer as by_x does, as soon as a file is there."""
    ends = time.monotonic() + 60
    while not os.path.exists(path) and time.monotonic() < ends:
        time.sleep(0.01)


def sign_of_x():
    """Answer 0 where the column x is above 0, else 1, whatever it holds; its other inputs are only pixels and texts."""

    def answer(batch):
        assert all(np.asarray(one).dtype == np.uint8 for one in batch["pixels"])
        assert all(isinstance(one, str) for one in batch["note"])
        x = np.clip(np.nan_to_num(batch["x"]), -30, 30)
        return np.stack([x, np.zeros_like(x)], axis=1)

    return answer


def ragged():
    """Answer with as many options as the row's number."""
    return lambda batch: [np.full(place + 1, x) for place, x in enumerate(batch["x"])]


@before(by_x)
def fails_on(batch, example):
    """Answer, but raise on any batch that holds one example."""
    if example in batch["example_id"]:
        raise ValueError(f"cannot look at {example}\nat all")


@before(by_x)
def fails_below(batch, limit, path):
    """Answer, but raise on any batch with an x below a limit, until a file exists at a path."""
    if (batch["x"] < limit).any() and not os.path.exists(path):
        raise ValueError(f"no kernel image for x {batch['x'].min():g}")


def always_fails():
    """Raise on every batch."""

    def answer(batch):
        raise RuntimeError("no such device")

    return answer


def cannot_load():
    """Raise while loading."""
    raise OSError("weights.pt is not there")


def ends_its_process():
    """End the process while loading, as a bad extension does."""
    os._exit(3)


@before(by_x)
def speaks_in_surrogates(batch, example):
    """Answer, but raise on one example with a message that UTF-8 cannot hold, as names of files may be."""
    if example in batch["example_id"]:
        raise ValueError("cannot open caf\udce9.jpg")


class WordlessError(BaseException):
    """No Exception, and without words."""

    def __str__(self):
        raise RuntimeError("no words")


@before(by_x)
def raises_wordlessly(batch, example):
    """Answer, but raise what no handler of Exception catches on one example."""
    if example in batch["example_id"]:
        raise WordlessError


@before(by_x)
def dies_on_x(batch, x):
    """Answer as by_x does, but be killed on a batch that holds a value."""
    if (batch["x"] == x).any():
        os.kill(os.getpid(), signal.SIGKILL)


@before(by_x)
def dies_on(batch, example):
    """Answer, but be killed on any batch that holds one example."""
    if example in batch["example_id"]:
        os.kill(os.getpid(), signal.SIGKILL)


@before(by_x)
def gives_up_on(batch, example):
    """Answer, but give up for good at a batch that holds one example."""
    from cauc_ray.errors import ExecutionError

    if example in batch["example_id"]:
        raise ExecutionError("the model's server is down")


def writes_to_its_input():
    """Answer after writing to the batch, which is the model's own."""

    def answer(batch):
        batch["x"][:] = batch["x"] + 1.0
        return by_x()(batch)

    return answer


def brightness(factor=1.0):
    """Answer images of one byte each with their brightness, and 100; raise on an image of no bytes."""

    def answer(batch):
        if any(not image for image in batch["image"]):
            raise ValueError("an image of no bytes")
        return np.array([[factor * image[0], 100.0] for image in batch["image"]], dtype=np.float32)

    return answer


def longest(exponent=1.0):
    """Answer questions with a power of each choice's length."""
    return lambda batch: [[float(len(choice)) ** exponent for choice in choices] for choices in batch["choices"]]


def linear(seed):
    """Answer images of four bytes with a torch layer: 4 x 3 multiply-adds each."""
    import torch

    torch.manual_seed(seed)
    layer = torch.nn.Linear(4, 3)

    def answer(batch):
        pixels = torch.tensor([list(image) for image in batch["image"]], dtype=torch.float32)
        with torch.inference_mode():
            return layer(pixels / 255).numpy()

    return answer


def always_dies():
    """Be killed by every batch."""
    return lambda batch: os.kill(os.getpid(), signal.SIGKILL)


POISON = {666: "raises", 667: "exits", 668: "nan", 669: "shape", 670: "kills", 671: "hangs", 672: "slow"}


def poisonable(column=0):
    """Answer with a column of x's numbers, and 0; but do what POISON says where that is one of its keys."""

    def answer(batch):
        x = np.asarray(batch["x"], dtype=np.float64)[:, column]
        kinds = [POISON.get(one) for one in x.tolist()]
        if "raises" in kinds:
            raise ValueError("cannot look at it")
        if "exits" in kinds:
            raise SystemExit(3)
        if "kills" in kinds:
            os._exit(3)
        if "hangs" in kinds:
            time.sleep(600)
        if "slow" in kinds:
            time.sleep(1.0)
        logits = np.stack([x, np.zeros_like(x)], axis=1)
        logits[[kind == "nan" for kind in kinds]] = np.nan
        return logits[1:] if "shape" in kinds else logits

    return answer


def talkative(seconds):
    """Answer as by_x does, slowly, and print and log what it does, with a progress bar.

    Its process gets the order to end while it takes something down, as Ray does to replicas.
    """
    import logging
    import sys

    class Ended:
        def __del__(self):
            raise SystemExit(1)

    log = logging.getLogger("talkative")
    log.addHandler(logging.StreamHandler())
    print(f"loaded in process {os.getpid()}")

    def answer(batch):
        time.sleep(seconds)
        for done in range(3):
            sys.stderr.write(f"\r{done} of 3")
        sys.stderr.write("\n")
        log.warning("a batch of %d rows", len(batch["x"]))
        Ended()
        return by_x()(batch)

    return answer


def prepared(factory, host_s=0.0, device_s=0.0, **kwargs):
    """Answer as the model of another factory does, all of whose work is done in prepare; both steps may take time."""
    model = globals()[factory](**kwargs)

    class Prepared:
        def prepare(self, batch):
            time.sleep(host_s)
            return model(batch)

        def __call__(self, logits):
            time.sleep(device_s)
            return logits

    return Prepared()


def waits_for_the_next(n_batches):
    """Answer as by_x does, but each batch of so many only once the next one is being prepared."""
    prepared = [threading.Event() for _ in range(n_batches + 1)]
    prepared[-1].set()
    numbers = iter(range(n_batches))

    class Waits:
        def prepare(self, batch):
            number = next(numbers)
            prepared[number].set()
            return number, batch

        def __call__(self, asked):
            number, batch = asked
            assert prepared[number + 1].wait(60)
            return by_x()(batch)

    return Waits()


@before(longest)
def longest_noted(batch, log):
    """Answer as longest does, and note each batch's size."""
    with open(log, "a") as file:
        file.write(f"{len(batch['choices'])}\n")


@before(brightness)
def brightness_together(batch, logs, name, n):
    """Answer as brightness does once so many models have been called, and note the time of each call by name."""
    with open(os.path.join(logs, f"calls-{name}"), "a") as file:
        file.write(f"{time.monotonic()}\n")
    deadline = time.monotonic() + 120
    while sum(name.startswith("calls-") for name in os.listdir(logs)) < n:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@before(brightness)
def brightness_below(batch, limit):
    """Answer as brightness does, and raise on a batch that holds an image brighter than a limit."""
    if any(image[0] > limit for image in batch["image"]):
        raise ValueError("too bright")


def planted(strength, seed, k=4):
    """Answer with logits that favour the option x mod k by about a strength; a row's noise depends on x alone."""

    def answer(batch):
        rows = [np.random.default_rng([int(x), seed]).normal(0, 2, k) for x in batch["x"]]
        logits = np.array(rows) + strength * (np.arange(k) == (np.asarray(batch["x"]) % k)[:, None])
        return logits.astype(np.float32)

    return answer


def adder(most, price=0.0):
    """Answer the sum that a question asks for, wrongly and less surely if it is above a number; price: USD a call."""

    def answer(batch):
        sums = [sum(map(int, re.findall(r"\d+", text))) for text in batch["question"]]
        noise = [np.random.default_rng([sum_, int(most)]).uniform(-0.2, 0.2) for sum_ in sums]
        return {
            "answer": [f"It is\n{total if total <= most else total - 1}." for total in sums],
            "confidence_self": [
                (0.75 if total <= most else 0.35) + part for total, part in zip(sums, noise, strict=True)
            ],
            "cost": [price] * len(sums),
        }

    return answer


def says(kills=(), flag=None):
    """Say x + 1, or x where it is a multiple of 3, surely where it is right; be killed once by each of some values."""
    from pathlib import Path

    def answer(batch):
        for x in set(kills) & set(batch["x"].tolist()):
            with suppress(FileExistsError):
                Path(f"{flag}{x}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        assert set(batch) <= {"example_id", "x"}
        right = batch["x"] % 3 != 0
        return {
            "answer": [f"It is {x + ok}." for x, ok in zip(batch["x"].tolist(), right.tolist(), strict=True)],
            "confidence_self": np.where(right, 0.9, 0.4),
            "cost": np.full(len(right), 0.25),
        }

    return answer


def first_word(answer):
    """Return the first word of an answer: a rule by which answers are the same."""
    words = answer.casefold().split()
    return words[0].strip(",.") if words else None
