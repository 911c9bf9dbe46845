"""Classifiers in ONNX files: of columns, of texts and of images, against numpy on the same weights."""

from functools import partial
from itertools import permutations

import numpy as np
import pytest
from batches import column, encoded, refused
from language_models import tiny_language_model
from PIL import Image

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.kind import Placement
from cauc_ray.models.onnx import OnnxSpec

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)


def save(path, nodes, inputs, outputs, **weights):
    """Write a graph: inputs and outputs are (name, type, shape), or as the library has them."""
    values = [
        [end if isinstance(end, onnx.ValueInfoProto) else helper.make_tensor_value_info(*end) for end in ends]
        for ends in (inputs, outputs)
    ]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", *values, constants)
    opsets = [helper.make_opsetid("", 19), helper.make_opsetid("ai.onnx.ml", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return path


def spec(path, **settings):
    return OnnxSpec(kind="onnx", model=str(path), **settings)


W, B = RNG.normal(size=(2, 3)).astype(np.float32), RNG.normal(size=3).astype(np.float32)


@pytest.fixture
def linear(tmp_path):
    """A network of one input of two numbers, with its logits, its probabilities and its label as outputs."""
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["logits"]),
        helper.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
        helper.make_node("ArgMax", ["logits"], ["label"], axis=1, keepdims=0),
    ]
    outputs = [("label", TensorProto.INT64, ["n"])]
    outputs += [(name, TensorProto.FLOAT, ["n", 3]) for name in ("probabilities", "logits")]
    return save(tmp_path / "linear.onnx", nodes, [("x", TensorProto.FLOAT, ["n", 2])], outputs, w=W, b=B)


def test_columns_of_a_table_are_its_inputs(linear):
    age, income = np.array([20, 40, 60]), column([1.5, None, 3.0])
    model = spec(linear, columns=["age", "income"]).load()
    answers = model({"age": age, "income": income, "more": age})
    assert answers.logits[[0, 2]] == pytest.approx(np.array([[20, 1.5], [60, 3.0]], np.float32) @ W + B, rel=1e-5)
    assert answers.failures == {1: "one of its numbers is missing"}
    vectors = column([[1.0, 2.0], [3.0, 4.0]])
    by_name = spec(linear).load()({"x": vectors})
    assert by_name.logits == pytest.approx(np.array([[1, 2], [3, 4]], np.float32) @ W + B, rel=1e-5)
    probabilities = spec(linear, output="probabilities", logit_kind="probabilities").load()({"x": vectors})
    assert probabilities.logits.sum(axis=1) == pytest.approx([1, 1])
    with pytest.raises(DataError, match="needs numbers"):
        model({"age": column(["old"]), "income": column([1.0])})


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_stage_whose_gpu_onnx_runtime_cannot_use_is_refused(linear, device):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime computes on GPUs")
    load = partial(spec(linear, device=device).load, Placement(num_gpus=0.5))
    assert "ONNX Runtime has no GPU here" in refused(load)


def test_each_input_reads_the_column_of_its_name(tmp_path):
    """Numbers and texts, as pipelines of scikit-learn are exported."""
    kinds = [("age", TensorProto.FLOAT, ["n", 1]), ("plan", TensorProto.STRING, ["n", 1])]
    nodes = [
        helper.make_node("Equal", ["plan", "gold"], ["is_gold"]),
        helper.make_node("Cast", ["is_gold"], ["gold_number"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["age", "gold_number"], ["x"], axis=1),
        helper.make_node("Gemm", ["x", "w", "b"], ["scores"]),
    ]
    weights = {"w": W, "b": B, "gold": np.array(["gold"], dtype=object)}
    path = save(tmp_path / "mixed.onnx", nodes, kinds, [("scores", TensorProto.FLOAT, ["n", 3])], **weights)
    answers = spec(path).load()({"age": np.array([30.0, 50.0]), "plan": column(["gold", "basic"])})
    assert answers.logits == pytest.approx(np.array([[30, 1], [50, 0]], np.float32) @ W + B, rel=1e-5)


@pytest.mark.parametrize(("kind", "shape", "limit"), [("INT64", ["n", "t"], 20), ("INT32", [2, 6], 6)])
def test_texts_are_read_by_a_tokenizer_and_padding_changes_no_answer(tmp_path, kind, shape, limit):
    """The mean of the tokens' vectors, padding left out; in rows of any number and length, or of a fixed one."""
    folder = tiny_language_model(tmp_path / "model").folder
    vectors = RNG.normal(size=(600, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["vectors", "input_ids"], ["each"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["each", "mask3"], ["real"]),
        helper.make_node("ReduceSum", ["real", "middle"], ["sums"], keepdims=0),
        helper.make_node("ReduceSum", ["mask3", "middle"], ["counts"], keepdims=0),
        helper.make_node("Div", ["sums", "counts"], ["logits"]),
    ]
    inputs = [(name, getattr(TensorProto, kind), shape) for name in ("input_ids", "attention_mask")]
    axes = {"last": np.array([2]), "middle": np.array([1])}
    out = [("logits", TensorProto.FLOAT, [shape[0], 3])]
    path = save(tmp_path / "text.onnx", nodes, inputs, out, vectors=vectors, **axes)
    model = spec(path, tokenizer=str(folder / "tokenizer.json"), max_tokens=20, batch_tokens=50).load()
    texts = ["It broke", "Why was I charged twice?", "thanks " * 50]
    answers = model({"text": column([*texts, None])})
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row, text in enumerate(texts):
        assert answers.logits[row] == pytest.approx(vectors[tokenizer.encode(text).ids[:limit]].mean(axis=0), abs=1e-5)
    assert answers.failures == {3: "it has no text in 'text'"}


def probabilities_of_a_pipeline(path, classes, *, zipmap):
    """Write a file as skl2onnx does: labels, and probabilities in their order, or as maps by label."""
    n = len(classes)
    kind, key = (TensorProto.STRING, "strings") if isinstance(classes[0], str) else (TensorProto.INT64, "int64s")
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"], axis=1),
        helper.make_node("ArgMax", ["x"], ["best"], axis=1, keepdims=0),
        helper.make_node("Gather", ["classes", "best"], ["label"]),
    ]
    scores = ("p", TensorProto.FLOAT, ["n", n])
    if zipmap:
        names = {f"classlabels_{key}": list(classes)}
        nodes.append(helper.make_node("ZipMap", ["p"], ["maps"], domain="ai.onnx.ml", **names))
        values = helper.make_map_type_proto(kind, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
        scores = helper.make_value_info("maps", helper.make_sequence_type_proto(values))
    texts = np.array(classes, dtype=object if key == "strings" else np.int64)
    inputs, outputs = [("x", TensorProto.FLOAT, ["n", n])], [("label", kind, ["n"]), scores]
    return save(path, nodes, inputs, outputs, classes=texts)


X = RNG.normal(size=(40, 3)).astype(np.float32)
P = np.exp(X) / np.exp(X).sum(axis=1, keepdims=True)


def table(values):
    return {"x": column(list(values))}


@pytest.mark.parametrize("classes", [("NA", "ok", "zz"), (1, 2, 3), (0, 1, 2)])
def test_scores_come_in_the_order_of_the_pools_labels_or_are_refused(tmp_path, classes):
    """A file names its scores by label, or only the label of the highest one, which its first batch shows."""
    named = probabilities_of_a_pipeline(tmp_path / "named.onnx", classes, zipmap=True)
    bare = probabilities_of_a_pipeline(tmp_path / "bare.onnx", classes, zipmap=False)
    fits_any_names = classes == (0, 1, 2)  # numbers of options
    for order in permutations(range(3)):
        labels = [str(classes[option]) for option in order]
        logits = spec(named, labels=labels, logit_kind="probabilities").load()(table(X)).logits
        assert logits == pytest.approx(P[:, order], abs=1e-6)
        if order == (0, 1, 2):
            assert spec(bare, labels=labels).load()(table(X)).logits == pytest.approx(P, abs=1e-6)
        elif not fits_any_names:
            with pytest.raises(ConfigError, match="labels of the pool in the order"):
                spec(bare, labels=labels).load()(table(X))
    if fits_any_names:
        assert spec(named, logit_kind="probabilities").load()(table(X)).logits == pytest.approx(P, abs=1e-6)
    else:
        with pytest.raises(ConfigError, match="the pool has"):
            spec(named, labels=["a", "b", "c"], logit_kind="probabilities").load()(table(X))


def image_network(path, shape, kind=TensorProto.FLOAT):
    """Write a network that averages the pixels of an image, of a fixed shape and type."""
    axes = [1, 2] if shape[3] == 3 else [2, 3]
    nodes = [
        helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["f", "axes"], ["mean"], keepdims=0),
        helper.make_node("Cast", ["mean"], ["logits"], to=TensorProto.FLOAT),
    ]
    ends = [("x", kind, shape)], [("logits", TensorProto.FLOAT, [shape[0], 3])]
    return save(path, nodes, *ends, axes=np.array(axes))


@pytest.mark.parametrize(
    ("shape", "kind", "image"),
    [
        ([1, 3, 32, 32], TensorProto.FLOAT, {"size": 32, "resize": 40}),
        ([4, 3, 48, 48], TensorProto.FLOAT, {}),
        (["n", 32, 32, 3], TensorProto.FLOAT, {"resample": "bicubic"}),
        ([2, 40, 40, 3], TensorProto.FLOAT16, {}),
        (["n", 3, "h", "w"], TensorProto.FLOAT16, {}),
        ([3, 32, 32, 3], TensorProto.UINT8, {}),
    ],
)
def test_images_get_the_size_the_layout_the_type_and_the_rows_that_the_file_has(tmp_path, shape, kind, image):
    """Resized, cut and normalised as TorchVision does it."""
    transforms = pytest.importorskip("torchvision.transforms")
    model = spec(image_network(tmp_path / "m.onnx", shape, kind), image=image).load()
    pictures = [Image.fromarray(RNG.integers(0, 255, (60, 50 + n, 3), np.uint8)) for n in range(7)]
    answers = model({"image": column([*map(encoded, pictures), b"no image"])})
    assert answers.failures.keys() == {7}
    side = next((size for size in shape[1:] if isinstance(size, int) and size != 3), 224)
    filter_ = transforms.InterpolationMode(image.get("resample", "bilinear"))
    resize = transforms.Resize(image.get("resize", round(side * 256 / 224)), filter_)
    plain = transforms.Compose([resize, transforms.CenterCrop(side), transforms.ToTensor()])
    normal = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    tolerance = {TensorProto.FLOAT: 1e-4, TensorProto.FLOAT16: 2e-3, TensorProto.UINT8: 1e-2}[kind]
    for row, picture in enumerate(pictures):
        pixels = 255 * plain(picture) if kind == TensorProto.UINT8 else normal(plain(picture))
        assert answers.logits[row] == pytest.approx(pixels.numpy().mean(axis=(1, 2)), abs=tolerance)
    assert model.facts.dtype == ("float16" if kind == TensorProto.FLOAT16 else "float32")


def test_an_image_size_that_the_file_does_not_take_is_refused_before_any_call(tmp_path):
    path = image_network(tmp_path / "m.onnx", [1, 3, 32, 32])
    with pytest.raises(ConfigError, match="32 x 32 pixels, image has size 224"):
        spec(path, image={"size": 224}).load()
