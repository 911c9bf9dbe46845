"""A pool of two models that answer sums in words, and a policy for it."""

from contextlib import contextmanager

import numpy as np
import openai
import yaml
from user_models import adder

import cauc_ray
from cauc_ray.data.answer_table import write_answers

WORDS = {"rule": "number", "confidences": ["self"]}
# Sums that the small model knows; USD of a call of either.
MOST, PRICES = 60, {"small": 0.001, "large": 0.01}
KNOWS = {"small": MOST, "large": 1000}


def questions(n, seed=0):
    """Return n questions, and the right answers."""
    numbers = np.random.default_rng(seed).integers(1, 50, size=(n, 2))
    return [f"What is {a} + {b}?" for a, b in numbers.tolist()], numbers.sum(axis=1).tolist()


def pool(folder, **fields):
    """Write the pool file."""
    stages = [
        {
            "name": name,
            "model": {"kind": "python", "factory": "user_models:adder", "words": WORDS}
            | {"kwargs": {"most": KNOWS[name], "price": price}},
            "cost": {"usd": price},
            "batch_size": 8,
            "serving": {"batch_wait_s": 0.0, "timeout_s": 30.0},
        }
        for name, price in PRICES.items()
    ]
    inputs = {"question": {"datatype": "BYTES"}}
    path = folder / "sums.yaml"
    path.write_text(yaml.safe_dump({"name": "sums", "task": "generation", "inputs": inputs, "stages": stages} | fields))
    return path


@contextmanager
def client_of(path, fitted):
    """Serve a pool; yield the service and OpenAI's client of it."""
    with (
        cauc_ray.serve(path, fitted, port=0, name="sums", local=True) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield service, client


def asked(client, *messages, **options):
    """Return the response to messages: texts of the user, or whole ones."""
    sent = [{"role": "user", "content": text} if isinstance(text, str) else text for text in messages]
    return client.chat.completions.create(**{"model": "sums", "messages": sent} | options)


def policy(folder, large="self"):
    """Fit a policy to what both models answer; large: name of the large one's confidence, sequence is its logarithm."""
    for seed, split in enumerate(("calibration", "validation")):
        texts, right = questions(200, seed)
        for name, price in PRICES.items():
            output = adder(KNOWS[name])({"question": texts})
            correct = [f"{total}." in answer for answer, total in zip(output["answer"], right, strict=True)]
            values = np.array(output["confidence_self"])
            confidences = {"sequence": np.log(values)} if (name, large) == ("large", "sequence") else {"self": values}
            ids = [f"{split}-{row}" for row in range(len(texts))]
            more = {"cost": price, "cost_unit": "USD", "rule": "number"}
            write_answers(folder / "ANSWERS", name, split, ids, output["answer"], confidences, correct, **more)
    return cauc_ray.fit(str(folder / "ANSWERS"), threshold=0.7)
