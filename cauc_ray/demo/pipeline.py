"""The steps of the demo: data, training, logits, policies, sweep, live run, figure."""

from __future__ import annotations

import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

from cauc_ray.api import offline, online
from cauc_ray.api.collecting import collect
from cauc_ray.api.live import steps
from cauc_ray.api.sources import read_policy_chain
from cauc_ray.comparison import sweeping
from cauc_ray.data.splits import split_shares
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.execution.session import cpus_needed, ray_session
from cauc_ray.files.atomic import new_folder, require_new
from cauc_ray.files.documents import write_json, write_text
from cauc_ray.files.parquet import parquet_files, read_parquet, write_parquet
from cauc_ray.models.pool import Pool, load_pool
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import single_model_accuracy

SHARES = {"train": 0.40, "calibration": 0.15, "validation": 0.15, "test": 0.30}
SEED = 0
# Of the largest model's cost: what RF may spend per image on average.
BUDGETS = (0.1, 0.2, 0.4)
LIVE_BUDGET = 0.2
# Test images in request.json, for a first try of `cauc serve`.
REQUEST_ROWS = 8


def run_demo(output: str | None) -> dict[str, Any]:
    """Run the demo into a new folder and return what its table shows.

    Raises ConfigError with the install command where torch, scikit-learn or matplotlib is missing, or when the
    folder exists. A demo that fails leaves no folder behind.
    """
    folder = (Path(output) if output else _free_folder()).absolute()
    require_new(folder)
    _require_packages()
    with new_folder(folder):
        try:
            return _demo(folder)
        except BaseException:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            raise


def _demo(folder: Path) -> dict[str, Any]:
    started = time.perf_counter()
    with steps(7) as step:
        step("reading 1,797 images of handwritten digits")
        splits = _write_inputs(folder)
        step("training three classifiers")
        pool = _train(folder, *splits["train"])
        with ray_session(None, cpus_needed(pool.stages)):
            step("collecting logits through Ray actors")
            collected = collect(pool, folder / "inputs", folder / "logits")
            costs = {model["name"]: model["cost"] for model in collected["models"]}
            step("fitting CAUC Base, and CAUC-RF at three budgets")
            policies = _fit(folder, pool, costs)
            step("sweeping all operating points")
            logits, models = folder / "logits", [stage.name for stage in pool.stages]
            curves = sweeping.sweep(logits, models=models)
            offline.save_table(curves, folder / "sweep.parquet")
            step("running the live cascade on the test images")
            live = policies[_rf_name(LIVE_BUDGET)]
            online.run(pool, live, folder / "inputs" / "test.parquet", folder / "run")
        step("drawing the accuracy-cost curves")
        rows = _rows(logits, policies)
        _draw(curves, rows, collected["cost_unit"], folder / "accuracy-cost.png")
    return {
        "folder": str(folder),
        "seconds": time.perf_counter() - started,
        "n": len(splits["test"][1]),
        "cost_unit": collected["cost_unit"],
        "rows": rows,
        "agreement": _agreement(logits, live, folder / "run"),
        "files": [
            "pool.yaml",
            "logits",
            "policies",
            "sweep.parquet",
            "run/predictions",
            "run/ledger",
            "accuracy-cost.png",
            "request.json",
        ],
    }


def _require_packages() -> None:
    for package in ("torch", "sklearn", "matplotlib"):
        if find_spec(package) is None:
            raise ConfigError(f"the demo needs {package}; install it with: pip install 'cauc-ray[demo]'")


def _free_folder() -> Path:
    names = ["cauc-demo", *(f"cauc-demo-{n}" for n in range(2, 1000))]
    return next(Path(name) for name in names if not Path(name).exists())


def _write_inputs(folder: Path) -> dict[str, tuple[Any, Any]]:
    """Split the images, write the inputs of all but the training part, and return each part's images and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    parts = split_shares(len(labels), SHARES, SEED)
    (folder / "inputs").mkdir()
    for name, rows in parts.items():
        if name == "train":
            continue
        table = pa.table(
            {
                "example_id": [f"digit-{row:04d}" for row in rows],
                "image": pa.FixedSizeListArray.from_arrays(pa.array(images[rows].ravel()), images.shape[1]),
                "label": labels[rows],
            }
        )
        write_parquet(folder / "inputs" / f"{name}.parquet", table)
    write_json(folder / "request.json", _request(images[parts["test"][:REQUEST_ROWS]]))
    return {name: (images[rows], labels[rows]) for name, rows in parts.items()}


def _request(images: Any) -> dict[str, Any]:
    """Return what `cauc serve` is asked with for some images, float32 (n, 64)."""
    tensor = {"name": "image", "datatype": "FP32", "shape": list(images.shape), "data": images.ravel().tolist()}
    outputs = ("prediction", "confidence", "stage", "cost")
    return {"inputs": [tensor], "outputs": [{"name": name} for name in outputs]}


def _train(folder: Path, images: Any, labels: Any) -> Pool:
    import torch

    from cauc_ray.demo import classifiers

    (folder / "weights").mkdir()
    stages = []
    for name in classifiers.RECIPES:
        network = classifiers.train(name, images, labels, SEED)
        weights = folder / "weights" / f"{name}.pt"
        torch.save(network.state_dict(), weights)
        factory = f"{classifiers.__name__}:load"
        stages.append(
            {
                "name": name,
                "model": {"kind": "python", "factory": factory, "kwargs": {"name": name, "weights": str(weights)}},
                "batch_size": 64,
                "resources": {"num_cpus": 0.5},
            }
        )
    pixels = {"image": {"datatype": "FP32", "shape": [images.shape[1]]}}
    content = {"name": "digits", "task": "image-classification", "inputs": pixels, "stages": stages}
    write_text(folder / "pool.yaml", yaml.safe_dump(content, sort_keys=False))
    return load_pool(folder / "pool.yaml")


def _fit(folder: Path, pool: Pool, costs: dict[str, float]) -> dict[str, Policy]:
    models = [stage.name for stage in pool.stages]
    largest = costs[models[-1]]
    policies = {"CAUC Base": offline.fit(folder / "logits", models=models, method="base")}
    for share in BUDGETS:
        policies[_rf_name(share)] = offline.fit(folder / "logits", models=models, method="rf", budget=share * largest)
    (folder / "policies").mkdir()
    for name, policy in policies.items():
        policy.save(folder / "policies" / f"{_file_name(name)}.json")
    return policies


def _rf_name(share: float) -> str:
    return f"CAUC-RF, budget {share:.0%}"


def _file_name(name: str) -> str:
    return name.lower().removeprefix("cauc").strip(" -").replace(", budget ", "-").replace("%", "")


def _rows(logits: Path, policies: dict[str, Policy]) -> list[dict[str, Any]]:
    base = policies["CAUC Base"]
    chain = read_policy_chain(logits, base, "test")
    largest = float(chain.costs.means[-1])
    rows = []
    for place, model in enumerate(chain.models):
        alone, cost = single_model_accuracy(chain, place), float(chain.costs.means[place])
        avoided = 0.0 if place == len(chain.models) - 1 else 1.0
        rows.append(_row(f"{model} alone", alone, cost, cost / largest, avoided))
    for name, policy in policies.items():
        measures = offline.evaluate(logits, policy).measures
        avoided = 1 - measures.stages[-1].reached / measures.n
        rows.append(_row(name, measures.accuracy, measures.cost, measures.cost / largest, avoided))
    return rows


def _row(name: str, accuracy: Any, cost: float, relative_cost: float, avoided: float) -> dict[str, Any]:
    return {
        "name": name,
        "accuracy": accuracy.value,
        "low": accuracy.low,
        "high": accuracy.high,
        "cost": cost,
        "relative_cost": relative_cost,
        "avoided": avoided,
    }


def _agreement(logits: Path, policy: Policy, run: Path) -> str:
    """Compare the live run with the replay of the collected logits, row for row.

    The models computed the live logits anew, in other batches: their last bits may differ, and with them a
    confidence by a few units of float32.
    """
    replayed = offline.evaluate(logits, policy).to_arrow()
    live = pa.concat_tables([read_parquet(file) for file in parquet_files(run / "predictions")])
    live, replayed = (table.sort_by("example_id").to_pydict() for table in (live, replayed))
    if live["example_id"] != replayed["example_id"]:
        raise DataError("the live run answered other images than the replay")
    same = np.full(len(live["stage"]), True)
    for column in ("prediction", "stage", "cost"):
        same &= np.array(live[column]) == np.array(replayed[column])
    gap = float(np.abs(np.array(live["confidence"]) - np.array(replayed["confidence"])).max())
    verdict = "agree" if same.all() else "DISAGREE"
    confidences = f"confidences differ by at most {gap:.1g}" if gap else "and confidences equal to the last bit"
    return (
        f"live run and offline replay {verdict} row for row: {same.sum()} of {len(same)} with the same prediction, "
        f"stage and cost, {confidences}"
    )


def _draw(curves: pa.Table, rows: list[dict[str, Any]], unit: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    names = {"margin": "Margin Sampling", "base": "CAUC Base", "rf": "CAUC-RF"}
    table = curves.to_pydict()
    for (method, label), colour in zip(names.items(), ("#a0a0a0", "#1b6ca8", "#c8502d"), strict=True):
        here = [place for place, name in enumerate(table["method"]) if name == method]
        cost = [table["cost"][place] for place in here]
        accuracy = [100 * table["accuracy"][place] for place in here]
        axes.plot(cost, accuracy, color=colour, label=label, linewidth=1.8, drawstyle="steps-post")
    alone = [row for row in rows if row["name"].endswith(" alone")]
    for row in alone:
        at = (row["cost"], 100 * row["accuracy"])
        axes.plot(*at, "o", color="black", markersize=5)
        # The curves pass below the last model and above the others.
        offset = (0, 9) if row is alone[-1] else (0, -16)
        axes.annotate(row["name"], at, textcoords="offset points", xytext=offset, ha="center")
    axes.margins(x=0.12, y=0.12)
    axes.set_xscale("log")
    axes.set_xlabel(f"mean cost per image ({unit}, log scale)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_title("Thresholds from validation, measured on test")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
