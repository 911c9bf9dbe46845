"""Order confirmations with a question, and models that answer it in words.

python -m examples.orders    writes labelled.csv (with the right answers) and new.csv (without)
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.models import MODELS

GOODS = ("chairs", "lamps", "desks", "shelves", "stools", "mirrors", "rugs", "clocks")
PEOPLE = ("Amira", "Jonas", "Wei", "Olga", "Tunde", "Sofia", "Ravi", "Marta")
STREETS = ("Hill Road", "Station Street", "Mill Lane", "Park Avenue")
TEMPLATES = (
    "Hi {person}, thank you for order {order}. We will send {n} {goods} to {house} {street} within {days} days.",
    "Order {order}: {person} from {house} {street} has bought {n} {goods}; they arrive in {days} days.",
    "Hello {person}! In {days} days the {n} {goods} of your order {order} will be at {house} {street}.",
    "{person}, your {sold_out} are sold out. Instead, {n} {goods} leave for {house} {street}, order {order}.",
)
QUESTIONS = ("How many {goods} were ordered?", "What is the number of the order?", "What is the house number?")
# Turns before the question show that a number is enough.
SHOTS = (
    ("Hi Ben, order 8123 is ready. 7 rugs go to 71 Hill Road in 3 days. How many rugs were ordered?", "7"),
    ("Order 2345: Ana from 88 Mill Lane has bought 14 desks. What is the number of the order?", "2345"),
    ("Ida, 25 lamps of order 5512 leave for 93 Park Avenue. What is the house number?", "93"),
)
MOST_TOKENS = 10
# For a model without a template of its own: it continues lines.
PLAIN = (
    "{{ bos_token or '' }}{% for turn in messages %}{{ turn.content + '\\nAnswer:' if turn.role == 'user' else "
    "' ' + turn.content + '\\n\\n' }}{% endfor %}"
)


def write_orders(folder: Path, n_labelled: int = 900, n_new: int = 300, seed: int = 0) -> None:
    """Write labelled.csv and new.csv into a folder."""
    rng = np.random.default_rng(seed)
    for name, n in (("labelled", n_labelled), ("new", n_new)):
        rows = [_row(f"{name}-{row}", rng) for row in range(n)]
        names = ["example_id", "text", *(["label"] if name == "labelled" else [])]
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


def _row(example_id: str, rng: np.random.Generator) -> dict[str, object]:
    goods, sold_out = rng.choice(GOODS, 2, replace=False).tolist()
    numbers = {
        "n": int(rng.integers(2, 60)),
        "order": int(rng.integers(1000, 9999)),
        "house": int(rng.integers(60, 99)),
    }
    names = {"person": rng.choice(PEOPLE), "street": rng.choice(STREETS), "goods": goods, "sold_out": sold_out}
    mail = TEMPLATES[rng.integers(len(TEMPLATES))].format(**numbers, **names, days=int(rng.integers(2, 15)))
    asked = int(rng.integers(len(QUESTIONS)))
    text = f"{mail} {QUESTIONS[asked].format(goods=goods)}"
    return {"example_id": example_id, "text": text, "label": numbers[("n", "order", "house")[asked]]}


def generating(gguf_file: str) -> Callable[[Mapping[str, npt.NDArray[Any]]], Mapping[str, Sequence[object]]]:
    """Return a model that answers the column `text`, with the log probability of its answer for each token.

    Args:
        gguf_file: The model's file in examples/models.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODELS, gguf_file=gguf_file)
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    lines = [tokenizer.encode(end, add_special_tokens=False)[-1] for end in ("\n", "\n\n")]
    ends = [tokenizer.eos_token_id, *lines]
    network = AutoModelForCausalLM.from_pretrained(MODELS, gguf_file=gguf_file, dtype=torch.float32).eval()

    def one_answer(text: str) -> tuple[str, float]:
        turns = [turn for shot in SHOTS for turn in zip(("user", "assistant"), shot, strict=True)]
        messages = [{"role": role, "content": content} for role, content in (*turns, ("user", text))]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            generated = network.generate(
                **prompt,
                max_new_tokens=MOST_TOKENS,
                do_sample=False,
                eos_token_id=ends,
                return_dict_in_generate=True,
                output_logits=True,
                pad_token_id=tokenizer.eos_token_id,
            )
        tokens = generated.sequences[0, prompt["input_ids"].shape[1] :]
        steps = torch.cat(generated.logits).log_softmax(dim=-1)
        scores = steps[torch.arange(len(tokens)), tokens]
        return tokenizer.decode(tokens, skip_special_tokens=True).strip(), float(scores.mean())

    def answer(batch: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Sequence[object]]:
        texts, scores = zip(*(one_answer(str(text)) for text in batch["text"]), strict=True)
        return {"answer": texts, "confidence_sequence": scores}

    return answer


if __name__ == "__main__":
    write_orders(Path.cwd())
