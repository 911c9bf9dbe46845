"""Classifiers in ONNX files: of columns, of texts and of images, against numpy on the same weights."""

import numpy as np
import pytest
from batches import column, encoded
from language_models import tiny_language_model
from PIL import Image

from cauc_ray.errors import DataError
from cauc_ray.models.onnx import OnnxSpec

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

RNG = np.random.default_rng(0)


def save(path, nodes, inputs, outputs, **weights):
    """Write a graph: inputs and outputs are (name, type, shape)."""
    values = [[helper.make_tensor_value_info(*end) for end in ends] for ends in (inputs, outputs)]
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", *values, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    onnx.save(model, str(path))
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


def test_texts_are_read_by_a_tokenizer_and_padding_changes_no_answer(tmp_path):
    """The mean of the tokens' vectors, padding left out."""
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
    inputs = [(name, TensorProto.INT64, ["n", "t"]) for name in ("input_ids", "attention_mask")]
    axes = {"last": np.array([2]), "middle": np.array([1])}
    out = [("logits", TensorProto.FLOAT, ["n", 3])]
    path = save(tmp_path / "text.onnx", nodes, inputs, out, vectors=vectors, **axes)
    model = spec(path, tokenizer=str(folder / "tokenizer.json"), max_tokens=20, batch_tokens=50).load()
    texts = ["It broke", "Why was I charged twice?", "thanks " * 50]
    answers = model({"text": column([*texts, None])})
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for row, text in enumerate(texts):
        assert answers.logits[row] == pytest.approx(vectors[tokenizer.encode(text).ids[:20]].mean(axis=0), abs=1e-5)
    assert answers.failures == {3: "it has no text in 'text'"}


def test_images_are_resized_cut_and_normalised_as_torchvision_does(tmp_path):
    transforms = pytest.importorskip("torchvision.transforms")
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w"], ["logits"]),
    ]
    w = RNG.normal(size=(3, 4)).astype(np.float32)
    ends = [("x", TensorProto.FLOAT, ["n", 3, 32, 32])], [("logits", TensorProto.FLOAT, ["n", 4])]
    model = spec(save(tmp_path / "image.onnx", nodes, *ends, w=w), image={"size": 32, "resize": 40}).load()
    pictures = [Image.fromarray(RNG.integers(0, 255, size, np.uint8)) for size in ((50, 70, 3), (90, 41, 3))]
    plain = transforms.Compose([
        transforms.Resize(40), transforms.CenterCrop(32), transforms.ToTensor(),
        transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ])  # fmt: skip
    answers = model({"image": column([*map(encoded, pictures), b"no image"])})
    for row, picture in enumerate(pictures):
        assert answers.logits[row] == pytest.approx(plain(picture).numpy().mean(axis=(1, 2)) @ w, abs=1e-4)
    assert "cannot be decoded" in answers.failures[2]
