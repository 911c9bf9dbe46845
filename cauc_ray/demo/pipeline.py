"""The steps of the demo: data, training, logits, policies, live run, comparison, figure."""

from __future__ import annotations

import inspect
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

import cauc_ray
from cauc_ray.api.live import progress
from cauc_ray.api.options import Common, Output
from cauc_ray.data.splits import split_shares
from cauc_ray.demo import digit_networks
from cauc_ray.display import Figures, Grid, Sheet
from cauc_ray.errors import ConfigError, require_packages
from cauc_ray.files.documents import new_folder, write_json, write_text
from cauc_ray.files.parquet import parquet_files, read_parquet, write_parquet
from cauc_ray.files.paths import RemotePath, absolute
from cauc_ray.policies.policy import Policy

SHARES = {"train": 0.40, "calibration": 0.15, "validation": 0.15, "test": 0.30}
N_PIXELS, N_DIGITS = 64, 10
# How many networks each model has, and hidden units in each; cheapest first.
MODELS = {"small": (1, 4), "medium": (4, 6), "large": (8, 32)}
LARGEST = "large"
# What CAUC-RF may spend per image on average, as shares of the largest model's cost.
BUDGETS = {"rf-5": 0.05, "rf-10": 0.1, "rf-20": 0.2}
LIVE = "rf-20"
TITLES = {"base": "CAUC Base"} | {name: f"CAUC-RF, budget {share:.0%}" for name, share in BUDGETS.items()}


class DemoResult(Figures):
    """The result of the demo: policies and models on the test images, and where its files are."""

    __slots__ = ()

    def sheet(self) -> Sheet:
        """Return the table of policies and models, the agreement of run and replay, and the files."""
        columns = [
            ("", "text", "name"),
            ("accuracy (95 %)", "share", "accuracy", "interval"),
            (f"cost ({self['cost_unit']})", "number", "cost"),
            ("relative", "decimals", "relative_cost"),
            (f"{LARGEST} avoided", "percent", "avoided"),
        ]
        rows = [row | {"interval": (row["low"], row["high"])} for row in self["rows"]]
        files = f"everything is in {self['folder']}: {', '.join(self['files'])}"
        title = f"{self['n']} test images of handwritten digits"
        return Sheet(title, [Grid.of("", rows, columns), self["agreement"], files])


def run_demo(output: Common[Output | None] = None) -> DemoResult:
    """Run the demo into a new folder and return what its table shows; a demo that fails leaves no folder behind.

    Args:
        output: A new folder (default: cauc-demo, or the next free name).

    Raises:
        ConfigError: scikit-learn or matplotlib is missing, with the install command, or the folder exists or is remote.
    """
    names = ["cauc-demo", *(f"cauc-demo-{n}" for n in range(2, 1000))]
    folder = absolute(output or next(name for name in names if not Path(name).exists()))
    if isinstance(folder, RemotePath):
        raise ConfigError(f"the demo is written to a folder of this machine, got {folder}")
    require_packages("the demo", "demo", "sklearn", "matplotlib")
    with new_folder(folder):
        try:
            return _demo(folder)
        except BaseException:
            shutil.rmtree(folder)
            folder.mkdir()
            raise


def _demo(folder: Path) -> DemoResult:
    from cauc_ray.execution.session import ray_session  # Ray takes seconds to import

    started = time.perf_counter()
    pool, logits = folder / "pool.yaml", folder / "logits"
    for name in ("inputs", "policies", "weights"):
        (folder / name).mkdir()
    with progress("demo") as step:
        step("reading 1,797 images of handwritten digits")
        images, labels = _write_inputs(folder)
        step("training three classifiers")
        _write_models(folder, images, labels)
        with ray_session(None, 2):
            step("collecting logits through Ray actors")
            unit = cauc_ray.collect(pool, folder / "inputs", logits)["cost_unit"]
            step("fitting CAUC Base, and CAUC-RF at three budgets")
            budgets = {name: share * _cost(LARGEST) for name, share in BUDGETS.items()}
            policies = {"base": cauc_ray.fit(logits, method="base")}
            policies |= {name: cauc_ray.fit(logits, method="rf", budget=budget) for name, budget in budgets.items()}
            for name, policy in policies.items():
                policy.save(folder / "policies" / f"{name}.json")
            step("running the live cascade on the test images")
            cauc_ray.run(pool, policies[LIVE], folder / "inputs" / "test.parquet", folder / "run")
        step("comparing methods")
        compared = cauc_ray.compare(logits, methods=["single", "margin", "base", "rf"], output=folder / "comparison")
        compared.save(folder / "accuracy-cost.png")
        rows = [_row(f"{name} alone", compared.row(f"single:{name}")) for name in MODELS]
        rows += [_row(TITLES[name], _figures(logits, policy)) for name, policy in policies.items()]
    figures = {
        "folder": str(folder),
        "seconds": time.perf_counter() - started,
        "n": len(read_parquet(folder / "inputs" / "test.parquet")),
        "cost_unit": unit,
        "rows": rows,
        "agreement": _agreement(logits, policies[LIVE], folder / "run" / "predictions"),
        "files": sorted(path.name for path in folder.iterdir() if path.name != "__pycache__"),
    }
    return DemoResult(figures)


def _write_inputs(folder: Path) -> tuple[Any, Any]:
    """Write the inputs and a request to serve, and return what models are trained on: images and labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    parts = split_shares(len(labels), SHARES, seed=0)
    train = parts.pop("train")
    for name, rows in parts.items():
        pixels = pa.FixedSizeListArray.from_arrays(pa.array(images[rows].ravel()), N_PIXELS)
        columns = {"example_id": [f"digit-{row:04d}" for row in rows], "image": pixels, "label": labels[rows]}
        write_parquet(folder / "inputs" / f"{name}.parquet", pa.table(columns))
    asked = images[parts["test"][:8]]
    tensor = {"name": "image", "datatype": "FP32", "shape": list(asked.shape), "data": asked.ravel().tolist()}
    outputs = [{"name": name} for name in ("prediction", "confidence", "stage", "cost")]
    write_json(folder / "request.json", {"inputs": [tensor], "outputs": outputs})
    return images[train], labels[train]


def _cost(model: str) -> float:
    """Return a model's multiply-adds for an image, in thousands."""
    n_networks, width = MODELS[model]
    return n_networks * width * (N_PIXELS + N_DIGITS) / 1000


def _write_models(folder: Path, images: Any, labels: Any) -> None:
    """Train the models, and write their weights, their code and the pool file, which name each other by relative paths.

    images: float32 (n, 64) in [0, 1].   labels: int (n,).
    """
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits

    stages = []
    for name, (n_networks, width) in MODELS.items():
        options = {"solver": "lbfgs", "alpha": 1.0, "tol": 0.003, "max_iter": 2000}
        networks = [MLPClassifier((width,), random_state=seed, **options) for seed in range(n_networks)]
        with threadpool_limits(1):  # several threads only wait for each other on networks so small
            of_network = [(*network.fit(images, labels).coefs_, *network.intercepts_) for network in networks]
        # The biases become (E, 1, H), as they are added to (E, n, H).
        arrays = [np.stack([np.atleast_2d(one) for one in layer]) for layer in zip(*of_network, strict=True)]
        weights = f"weights/{name}.npz"
        np.savez(folder / weights, *[array.astype(np.float32) for array in arrays])
        model = {"kind": "python", "factory": "digit_networks:load", "kwargs": {"weights": weights}}
        cost, resources = {"kflops": _cost(name)}, {"num_cpus": 0.5}
        stages.append({"name": name, "model": model, "cost": cost, "batch_size": 64, "resources": resources})
    write_text(folder / "digit_networks.py", inspect.getsource(digit_networks))
    pixels = {"image": {"datatype": "FP32", "shape": [N_PIXELS]}}
    content = {"name": "digits", "task": "image-classification", "inputs": pixels, "stages": stages}
    write_text(folder / "pool.yaml", yaml.safe_dump(content, sort_keys=False))


def _row(title: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the demo's table from what a comparison has of a method on the test images."""
    low, high = figures["accuracy_interval"]
    columns = {key: figures[key] for key in ("accuracy", "cost", "relative_cost", "avoided")}
    return {"name": title, **columns, "low": low, "high": high}


def _figures(logits: Path, policy: Policy) -> dict[str, Any]:
    """Return the same of a policy."""
    summary = cauc_ray.evaluate(logits, policy).as_json()
    return {**summary, "avoided": summary["last_stage_avoided"]}


def _agreement(logits: Path, policy: Policy, predictions: Path) -> str:
    """Compare the live run with the replay of the collected logits, row for row.

    The models computed the live logits again, in other batches: their last bits may differ, and with them a
    confidence by a few units of float32.
    """
    files = pa.concat_tables([read_parquet(file) for file in parquet_files(predictions)])
    replayed = cauc_ray.evaluate(logits, policy).to_arrow()
    live, replay = (table.sort_by("example_id").to_pydict() for table in (files, replayed))
    columns = ("example_id", "prediction", "stage", "cost")
    same = np.all([np.array(live[name]) == np.array(replay[name]) for name in columns], axis=0)
    gap = np.abs(np.subtract(live["confidence"], replay["confidence"])).max()
    return (
        f"live run and offline replay {'agree' if same.all() else 'DISAGREE'} row for row: {same.sum()} of {len(same)} "
        f"with the same prediction, stage and cost; confidences differ by at most {gap:.1g}"
    )
