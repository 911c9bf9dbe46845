"""Models on a real GPU, on a machine that has one: `.ci/soak gpu`. Each test records what it has measured."""

import gc
import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pyarrow as pa
import pytest
import torch
from batches import column, refused

import cauc_ray
from cauc_ray.cascade.bundles import Bundle, Part, packed
from cauc_ray.cascade.preparing import PreparingWorker
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.answers import EMBEDDING
from cauc_ray.models.pool import StageSpec
from jobs.bench.cases import Maker, language
from jobs.bench.checkpoints import network_model, random_pictures, random_texts
from jobs.bench.planted import drawn_labels, fit_deferring, stage, write_input, write_pool

DEVICE = "cuda"
pytestmark = [
    pytest.mark.soak("gpu"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU was found"),
    pytest.mark.filterwarnings("default"),  # of libraries, which may warn on a GPU alone
]
# A method of Maker, and changed settings of its model.
KINDS = {
    "torchvision": ("torchvision", {}),
    "transformers-image": ("transformers_image", {}),
    "transformers-zero-shot": ("transformers_zero_shot", {}),
    "vision-encoder": ("transformers_image", {"kind": "vision-encoder"}),
    "transformers-classifier": ("transformers_classifier", {}),
    "sentence-encoder": ("transformers_classifier", {"kind": "sentence-encoder", "columns": ["text"], "required": []}),
    "letters": ("transformers_choice", {}),
    "letters after examples": ("shared_prefix", {}),
    "names": ("transformers_choice", {"options": "name"}),
    "texts": ("transformers_choice", {"options": "text"}),
}


def loaded(model, num_gpus=1.0, **changes):
    settings = {"name": "s", "model": {**model, **changes}, "resources": {"num_gpus": num_gpus}}
    return StageSpec.model_validate(settings).load()


@pytest.fixture(scope="module", params=KINDS)
def case(request, tmp_path_factory):
    """Return a model's settings, rows, and their logits on a CPU."""
    method, changes = KINDS[request.param]
    with ExitStack() as resources:
        made = getattr(Maker(tmp_path_factory.mktemp("case"), "cpu", 48, resources), method)()
        model, rows = {**made.model, **changes}, {made.column: made.rows(48, 0)}
        yield model, rows, loaded(model, device="cpu")(rows).logits


@contextmanager
def at_most(n_bytes):
    """Let this process take so many bytes of the card; models of earlier tests are none of them."""
    gc.collect()  # hooks refer to the models that they belong to
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(n_bytes / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_those_of_a_cpu_and_not_rounded_to_a_lower_precision(case, dtype, record_property):
    settings, rows, expected = case
    model = loaded(settings, device=DEVICE, dtype=dtype)
    answers = model(rows)
    logits = answers.logits
    assert answers.device_s > 0
    assert model.facts.dtype == dtype
    summary, most = (np.max, 1e-4) if dtype == "float32" else (np.mean, 0.1)
    difference = float(summary(np.abs(logits - expected)) / expected.std())
    record_property(f"{summary.__name__} of the differences in standard deviations of the logits", difference)
    assert difference < most
    if dtype != "float32" and model.facts.logit_kind != EMBEDDING:
        assert np.mean(torch.from_numpy(logits).to(getattr(torch, dtype)).float().numpy() == logits) < 0.1


def test_device_seconds_are_those_of_the_computation(tmp_path, record_property):
    """Kernels are launched in a fraction of the time that they take."""
    model = loaded(network_model("resnet50", tmp_path), device=DEVICE, dtype="float32")
    prepared = model.prepare({"image": random_pictures(256, 0)})
    model.answer(prepared)
    began = time.perf_counter()
    device_s = model.answer(prepared).device_s
    wall_s = time.perf_counter() - began
    record_property("device seconds of a second on the wall", device_s / wall_s)
    assert 0.8 * wall_s < device_s < wall_s


def test_copies_of_the_cache_fit_into_the_share_of_the_card(tmp_path, record_property):
    names = [f"answer {number} {text[:9]}" for number, text in enumerate(random_texts(100, 1))]
    rows = {"text": column([" ".join(random_texts(60, seed))[:1200] for seed in range(4)])}
    with ExitStack() as resources:
        folder = Maker(tmp_path, "cpu", 1, resources).language_model()
    settings = language(folder, kind="transformers-choice", labels=names, options="name", dtype="float32")
    torch.cuda.reset_peak_memory_stats()
    expected = loaded(settings, device=DEVICE)(rows).logits
    most = torch.cuda.max_memory_allocated()
    share = 2e9 / torch.cuda.get_device_properties(0).total_memory
    record_property("gigabytes that the options take at once", most / 1e9)
    assert most > 2e9
    with at_most(2e9):
        answers = loaded(settings, share, device=DEVICE)(rows)
        assert not answers.failures
        assert answers.logits == pytest.approx(expected, abs=1e-3)
        assert "more than the" in refused(lambda: loaded(settings, 1e-4, device=DEVICE))


def test_a_batch_that_does_not_fit_is_divided_and_a_row_that_does_not_is_refused(tmp_path):
    model = network_model("resnet50", tmp_path, device=DEVICE, dtype="float32")
    spec = StageSpec.model_validate(stage("s", model, 256) | {"resources": {"num_gpus": 1}})
    worker, bundle = PreparingWorker(spec, 0, None), Bundle(packed({"image": random_pictures(256, 0)}))
    worker.load()

    def collected(n_rows):
        (result,), answers = worker.collect([Part(0, np.arange(n_rows))], None, bundle)
        return result, answers

    _, whole = collected(256)
    n_before = torch.cuda.memory_stats()["num_ooms"]
    with at_most(1.5e9):
        result, halves = collected(256)
    assert torch.cuda.memory_stats()["num_ooms"] > n_before
    assert not result.failures
    assert halves.answers.logits == pytest.approx(whole.answers.logits, abs=1e-3)
    with at_most(torch.cuda.memory_allocated()):
        result, answers = collected(2)
    assert answers is None
    assert "out of memory" in result.error
    assert "\n" not in result.error


def test_onnx_runtime_computes_on_the_gpu(tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime computes on CPUs alone")
    with ExitStack() as resources:
        made = Maker(tmp_path, "cpu", 8, resources).onnx()
        rows = {made.column: made.rows(8, 0)}
        assert loaded({**made.model, "device": "auto"})(rows).logits == pytest.approx(made.bare(rows), abs=1e-3)


def test_a_run_of_stages_that_share_a_gpu_is_the_replay_of_their_table(ray_session, tmp_path, record_property):
    costs, n = {"small": 1.0, "large": 4.0}, 512
    nets = {name: network_model(arch, tmp_path) for name, arch in zip(costs, ("resnet18", "resnet50"), strict=True)}
    resources = {"num_gpus": 0.5, "num_cpus": 1}
    stages = [stage(name, {**net, "device": DEVICE, "dtype": "float32"}, 64) for name, net in nets.items()]
    pool = write_pool(tmp_path / "pool.yaml", [{**of, "resources": resources} for of in stages], "image-classification")
    columns = {"example_id": [f"row-{row}" for row in range(n)], "image": random_pictures(n, 0)}
    inputs = write_input(tmp_path / "images", columns)
    cauc_ray.collect(pool, inputs, tmp_path / "LOGITS", split="all")

    def table(folder):
        return pa.concat_tables(map(read_parquet, parquet_files(folder))).to_pandas().set_index("example_id")

    saved = {name: table(tmp_path / "LOGITS" / f"model={name}" / "split=all") for name in nets}
    logits = {name: np.stack(of.loc[columns["example_id"], "logits"]) for name, of in saved.items()}
    policy = fit_deferring(logits, drawn_labels(logits), costs, 0.5)
    summary = cauc_ray.run(pool, policy, inputs, tmp_path / "OUT")
    replay = policy.predict(logits)
    live = table(tmp_path / "OUT" / "predictions").loc[columns["example_id"]]
    difference = float(np.abs(live["confidence"] - replay.confidence).max())
    record_property("largest difference of a confidence from the replay", difference)
    assert (live["prediction"] == replay.prediction).all()
    assert (live["stage"] == replay.stage).all()
    assert difference < 1e-6
    ledger = pa.concat_tables(map(read_parquet, parquet_files(tmp_path / "OUT" / "ledger"))).to_pandas()
    record_property("device seconds by stage", ledger.groupby("stage")["device_s"].sum().to_dict())
    assert (ledger["device_s"] > 0).all()
    assert (ledger["device_s"] < ledger["compute_s"]).all()
    assert ledger["device_s"].sum() < 2 * summary["run_s"]
