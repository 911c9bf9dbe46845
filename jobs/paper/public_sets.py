"""Write logit and answer tables from files that are public, for the configs of jobs/paper.

    git clone https://github.com/colts661/LLM-Uncertainty-Bench
    git clone https://github.com/EFS-OpenSource/calibration-framework
    git clone https://github.com/mzelling/early-abstention-in-llm-cascades
    git clone https://github.com/cgnorthcutt/benchmarking-keras-pytorch
    git clone https://github.com/Linwei94/LLM-Calibration-Study
    python -m jobs.paper.public_sets . out/paper-logits

The networks of CIFAR-10 are the exception: `cauc collect` runs four of them by examples/cifar10.yaml.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow.csv import read_csv

from cauc_ray.data.answer_table import write_answers
from cauc_ray.data.splits import split_shares
from cauc_ray.data.writing import PoolModel, TableInfo, write_info, write_logits
from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Floats, Ints
from jobs.paper.folders import convert

# By the name of a clone: its url, the commit that was measured, and the SHA-256 of its files that are read, by path.
FILES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("public_files.toml").read_text(encoding="utf-8"))
SHARES = {"calibration": 0.25, "validation": 0.25, "test": 0.5}
PROMPTS = ("task_icl0", "base_icl1", "task_icl1")
# Questions that prompts show as examples.
PROMPT_EXAMPLES = {1, 3, 5, 7, 9}
# Sizes of language models whose file names do not tell, in 1e9 parameters.
PARAMS_B = {"mistral-7b-v0_1": 7.2}
# Multiply-adds of a call, in 1e9.
NETWORKS = {"lenet-5": 0.00065, "densenet-bc-100": 0.29, "wideresnet-16-4": 0.393}
# Networks on ImageNet: the framework that ran each, and multiply-adds of a call, in 1e9.
IMAGENET = {
    "mobilenetV2": ("keras", 0.301),
    "squeezenet1_1": ("pytorch", 0.349),
    "resnet18": ("pytorch", 1.814),
    "densenet169": ("pytorch", 3.36),
    "resnet50": ("pytorch", 4.089),
    "xception": ("keras", 8.4),
    "resnet152": ("pytorch", 11.514),
    "nasnetlarge": ("keras", 23.8),
}
# Language models on MMLU-Pro: USD per million tokens of their answers, list prices of 2025. Prices of Qwen3 differ
# between hosts: 0.02 USD per billion parameters, about what Llama 3.1 8B costs.
MMLU_PRO = {
    "gpt-4.1-nano": 0.4,
    "gpt-4.1-mini": 1.6,
    "gpt-4.1": 8.0,
    "Meta-Llama-3.1-8B-Instruct-Turbo": 0.18,
    "Meta-Llama-3.1-70B-Instruct-Turbo": 0.88,
    "Meta-Llama-3.1-405B-Instruct-Turbo": 3.5,
    "Qwen3-0.6B": 0.012,
    "Qwen3-4B": 0.08,
    "Qwen3-8B": 0.16,
    "Qwen3-32B": 0.64,
}
# Confidences of each answer: what the model says, and the mean probability of its tokens.
CONFIDENCES = {"verbal": "verbal_numerical_confidence", "sequence": "logit_perplexity_confidence"}
N_CLASSES, IMAGES_PER_CLASS = 1000, 50
# The least probability of an option that is written: some files have zeros.
LEAST = 1e-10
QUESTIONS = {"mmlu": "answer", "medmcqa": "cop"}
LETTERS = "ABCD"


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A model's saved outputs.

    Attributes:
        logits: Shape (N, K).
        cost: The mean cost of a call.
        costs: The cost of each call, shape (N,), where it is known.
    """

    logits: Floats
    cost: float
    costs: Floats | None = None


class _Record:
    """Stands for an object of another program."""

    def __init__(self, *arguments: object) -> None: ...


class _NumbersOnly(pickle.Unpickler):
    """Reads pickled numbers and texts; objects of other programs become records, and none of their code runs."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name of the file stands for."""
        is_number = module.startswith("numpy") and name in ("_reconstruct", "ndarray", "dtype", "scalar")
        return super().find_class(module, name) if is_number else _Record


def unpickled(path: Path) -> Any:
    """Return the numbers and texts of a pickle file."""
    with path.open("rb") as file:
        return _NumbersOnly(file).load()


def write_set(
    folder: Path, unit: str, kind: str, labels: Ints, models: Mapping[str, PublicModel], ids: Ints | None = None
) -> None:
    """Write models' outputs on the same rows as a logit table, cheapest first, cut at random."""
    ids = np.arange(len(labels)) if ids is None else ids
    models = dict(sorted(models.items(), key=lambda item: item[1].cost))
    for split, rows in split_shares(len(labels), SHARES, 0).items():
        example_ids = [f"{folder.name}-{one}" for one in ids[rows]]
        for name, model in models.items():
            costs = None if model.costs is None else model.costs[rows]
            write_logits(
                folder,
                name,
                split,
                example_ids=example_ids,
                labels=labels[rows],
                logits=model.logits[rows],
                costs=costs,
            )
    listed = [PoolModel(name=name, cost=model.cost) for name, model in models.items()]
    write_info(folder, TableInfo(cost_unit=unit, logit_kind=kind, models=listed))


def write_emotions(clone: Path, output: Path) -> None:
    """Write raw logits of six options by language models, under three prompts (LLM-Uncertainty-Bench)."""
    questions = json.loads((clone / "data" / "emotion_10k_4.json").read_text())
    rows = np.array([row for row, question in enumerate(questions) if question["id"] not in PROMPT_EXAMPLES])
    labels = np.array(["ABCDEF".index(questions[row]["answer"]) for row in rows], np.int32)
    for prompt in PROMPTS:
        models = {}
        for path in sorted((clone / "outputs_base").glob(f"*_emotion_10k_4_{prompt}.pkl")):
            answers = {answer["id"]: answer["logits_options"][:6] for answer in unpickled(path)}
            name = path.name.partition("_emotion")[0].lower().replace(".", "_")
            size = re.search(r"(\d+(?:_\d+)?)b", name)
            cost = PARAMS_B.get(name) or float(size[1].replace("_", ".") if size else "nan")
            models[name] = PublicModel(np.stack([answers[questions[row]["id"]] for row in rows]), cost)
        write_set(output / f"emotion10k_{prompt}", "B params", "raw", labels, models, rows)


def write_cifar100(clone: Path, output: Path) -> None:
    """Write log-probabilities of three networks on CIFAR-100's test images (calibration-framework)."""
    models, labels = {}, np.array([], np.int32)
    for name, cost in NETWORKS.items():
        saved = np.load(clone / "examples" / "classification" / "records" / "cifar100" / f"{name}-cifar-100.npz")
        labels = saved["ground_truth"].astype(np.int32)
        logits = np.log(saved["predictions"])
        models[f"efs_{name.replace('-', '_')}"] = PublicModel(logits, cost)
    write_set(output / "cifar100", "GMACs", "log-probabilities", labels, models)


def spread(options: Ints, probabilities: Floats) -> Floats:
    """Return log-probabilities of all classes from those of the best five, float32 (N, 1000).

    What these leave of the mass is spread evenly over the other classes, none of which gets more than the fifth.
    """
    listed = np.clip(probabilities.astype(np.float64), LEAST, 1.0)
    n_others = N_CLASSES - listed.shape[1]
    rest = np.clip((1.0 - listed.sum(axis=1)) / n_others, LEAST, listed.min(axis=1))
    logits = np.repeat(np.log(rest).astype(np.float32)[:, None], N_CLASSES, axis=1)
    np.put_along_axis(logits, options.astype(np.int64), np.log(listed).astype(np.float32), axis=1)
    return logits


def write_imagenet(clone: Path, output: Path) -> None:
    """Write log-probabilities of networks on ImageNet's validation images (benchmarking-keras-pytorch).

    The files hold the five best classes of each image, and the images are in the order of their classes.
    """
    models = {}
    for name, (framework, cost) in IMAGENET.items():
        saved = clone / f"{framework}_imagenet" / f"{name}_{framework}_imagenet_top5"
        options, probabilities = (np.load(f"{saved}{what}.npy") for what in ("preds", "probs"))
        models[name] = PublicModel(spread(options, probabilities), cost)
    labels = (np.arange(len(options)) // IMAGES_PER_CLASS).astype(np.int32)
    write_set(output / "imagenet", "GMACs", "log-probabilities", labels, models)


def write_priced(clone: Path, output: Path) -> None:
    """Write surrogates of nine served models with the price of each call (early-abstention-in-llm-cascades).

    A file holds the answer's log-probability log p; the other options are given log((1 - p) / 3).
    """
    for task, key in QUESTIONS.items():
        data, models = clone / "benchmarks" / "data" / task, {}
        labels = np.array([question[key] for question in unpickled(data / f"{task}_test.pkl")], np.int32)
        for chain in ("llama", "qwen_oai"):
            saved = unpickled(data / "chain_results" / f"{task}_full_{chain}_chain_results_test.pkl")
            for name, answers in saved["model_answers"].items():
                p = np.exp(np.minimum(np.array(saved["raw_confidences"][name], np.float64), -1e-6))
                logits = np.repeat(np.log((1 - p) / 3)[:, None], 4, axis=1)
                chosen = np.array([LETTERS.find(answer) for answer in answers])
                rows = np.flatnonzero(chosen >= 0)
                logits[rows, chosen[rows]] = np.log(p)[rows]
                costs = 1000 * np.array(saved["model_costs"][name])
                models[name] = PublicModel(logits.astype(np.float32), float(costs.mean()), costs)
        write_set(output / f"priced_{task}", "USD per 1,000 questions", "surrogate", labels, models)


def write_mmlu_pro(clone: Path, output: Path) -> None:
    """Write answers of language models to MMLU-Pro with one confidence or both (LLM-Calibration-Study).

    A call costs the tokens of its answer at the model's price.
    """
    for name, chosen in {"mmlu_pro": ("verbal", "sequence"), **{f"mmlu_pro_{of}": (of,) for of in CONFIDENCES}}.items():
        for model, price in MMLU_PRO.items():
            rows = read_csv(clone / "results" / f"mmlu_pro_{model}_eval_all_None.csv")
            answers, right = (
                rows[f"{role}_answer"].to_numpy(zero_copy_only=False) for role in ("extracted", "correct")
            )
            confidences = {of: rows[CONFIDENCES[of]].cast(pa.float64()).to_numpy() for of in chosen}
            costs = 1000 * price * 1e-6 * rows["token_length"].to_numpy()
            for split, part in split_shares(len(rows), SHARES, 0).items():
                write_answers(
                    output / name,
                    model,
                    split,
                    [f"mmlu_pro-{row}" for row in part],
                    answers[part].tolist(),
                    {of: values[part] for of, values in confidences.items()},
                    (answers == right)[part].tolist(),
                    costs[part],
                    cost=float(costs.mean()),
                    cost_unit="USD per 1,000 questions",
                )


def name_others(clone: Path) -> None:
    """Name files that are not those which the documentation's pages were measured on."""
    facts = FILES[clone.name]
    changed = [
        path
        for path, digest in facts["files"].items()
        if not (clone / path).is_file() or hashlib.sha256((clone / path).read_bytes()).hexdigest() != digest
    ]
    if changed:
        print(
            f"{clone}: {len(changed)} of {len(facts['files'])} files are not those that were measured, {changed[0]} "
            f"first; check out {facts['commit']}",
            file=sys.stderr,
        )


def write_sets(clones: Path, output: Path) -> None:
    """Write the tables of those clones that are in a folder. Raises DataError where there are none."""
    writers = {
        "LLM-Uncertainty-Bench": write_emotions,
        "calibration-framework": write_cifar100,
        "early-abstention-in-llm-cascades": write_priced,
        "benchmarking-keras-pytorch": write_imagenet,
        "LLM-Calibration-Study": write_mmlu_pro,
    }
    present = [name for name in writers if (clones / name).is_dir()]
    if not present:
        raise DataError(f"{clones} has none of the clones {', '.join(writers)}")
    for name, write in writers.items():
        if name in present:
            name_others(clones / name)
            write(clones / name, output)
        else:
            print(f"{clones / name} is missing: its tables are not written", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(convert("jobs.paper.public_sets", __doc__, write_sets))
