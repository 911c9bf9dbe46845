import json

import numpy as np
import pytest
from fake_stages import a_pool

from cauc_ray.models.pool import pool_of
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inputs import Inputs
from cauc_ray.serving.tensors import Tensor

IMAGES = {"kind": "torchvision", "arch": "mnasnet0_75", "weights": "IMAGENET1K_V1"}
QUESTIONS = {"kind": "transformers-choice", "model": "m"}
SAVED = {"kind": "saved", "logits": "L", "model": "m", "split": "test"}
OWN = {"kind": "python", "factory": "a:b"}


def inputs_of(model, **pool):
    task = "multiple-choice" if model is QUESTIONS else "image-classification"
    content = {"name": "p", "task": task, "stages": [{"name": "s", "model": model}], **pool}
    read = pool_of(content, a_folder)
    return Inputs(read, read.stages)


@pytest.fixture(autouse=True)
def folder(tmp_path):
    global a_folder
    a_folder = tmp_path


def texts(name, *values, shape=None):
    data = np.array([value if isinstance(value, bytes) else value.encode() for value in values], dtype=object)
    return Tensor(name, "BYTES", data if shape is None else data.reshape(shape))


def columns(inputs, *tensors):
    return inputs.columns({tensor.name: tensor for tensor in tensors})


def refusal(inputs, *tensors):
    with pytest.raises(RequestError) as error:
        columns(inputs, *tensors)
    assert "\n" not in error.value.message
    return error.value.message


def test_images_come_encoded_or_as_pixels():
    inputs = inputs_of(IMAGES)
    for shape in (None, (2, 1)):
        read, n = columns(inputs, texts("image", b"\x89PNG", b"\xff\xd8", shape=shape))
        assert (n, read["image"].tolist()) == (2, [b"\x89PNG", b"\xff\xd8"])
    pixels = np.zeros((3, 4, 5, 3), dtype=np.uint8)
    read, n = columns(inputs, Tensor("image", "UINT8", pixels))
    assert (n, read["image"].shape) == (3, pixels.shape)
    assert "UINT8" in refusal(inputs, Tensor("image", "FP32", pixels.astype(np.float32)))
    assert "UINT8" in refusal(inputs, Tensor("image", "UINT8", pixels[:, 0, 0]))


def test_questions_are_json_texts_or_texts_beside_their_choices():
    inputs = inputs_of(QUESTIONS)
    asked = [
        {"question": "Which?", "choices": ["a", "b", "c"]},
        {"question": "Why?", "choices": ["d", "e"], "context": "x"},
    ]
    together, n = columns(inputs, texts("question", *map(json.dumps, asked)))
    apart, _ = columns(
        inputs,
        texts("question", "Which?", "Why?"),
        texts("choices", '["a", "b", "c"]', '["d", "e"]'),
        texts("context", "", "x"),
    )
    assert n == 2
    for read in (together, apart):
        assert read["question"].tolist() == ["Which?", "Why?"]
        assert read["choices"].tolist() == [["a", "b", "c"], ["d", "e"]]
    assert together["context"].tolist() == [None, "x"]
    matrix, _ = columns(inputs, texts("question", "Which?"), texts("choices", "a", "b", shape=(1, 2)))
    assert matrix["choices"].tolist() == [["a", "b"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "JSON"),
        ("[]", "row 0"),
        ('{"choices": ["a", "b"]}', "'question'"),
        ('{"question": "q"}', "'choices'"),
        ('{"question": "q", "choices": ["a"]}', "at least 2"),
        ('{"question": "q", "choices": ["a", 2]}', "choices.1"),
        ('{"question": "q", "choices": ["a", "b"], "answer": 1}', "unknown key 'answer'"),
        ('{"question": "q", "choices": ["a", "b"], "context": 3}', "context"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_question_with_a_fault_is_refused_in_one_line(text, says):
    assert says in refusal(inputs_of(QUESTIONS), texts("question", text))


def test_what_a_pool_declares_is_asked_for():
    inputs = inputs_of(OWN, inputs={"image": {"datatype": "FP32", "shape": [4, -1]}})
    good = Tensor("image", "FP32", np.zeros((2, 4, 7), np.float32))
    read, n = columns(inputs, good)
    assert (n, read["image"] is good.values) == (2, True)
    for tensor, says in (
        (Tensor("image", "FP64", np.zeros((2, 4, 7))), "must be FP32, got FP64"),
        (Tensor("image", "FP32", np.zeros((2, 5, 7), np.float32)), r"shape [rows, 4, -1], got [2, 5, 7]"),
        (Tensor("image", "FP32", np.zeros((2, 4), np.float32)), "got [2, 4]"),
        (Tensor("image", "FP32", np.zeros((), np.float32)), "first dimension"),
        (Tensor("x", "FP32", np.zeros((2, 4, 7), np.float32)), "no input 'image'"),
    ):
        assert says in refusal(inputs, tensor)
    assert "unknown input 'x'" in refusal(inputs, good, Tensor("x", "FP32", np.zeros((2, 1), np.float32)))


def test_models_of_a_users_own_take_what_comes():
    read, n = columns(inputs_of(OWN), Tensor("x", "INT64", np.arange(3)), texts("text", "a", "ü", "c"))
    assert n == 3
    assert read["x"].tolist() == [0, 1, 2]
    assert read["text"].tolist() == ["a", "ü", "c"]


def test_tensors_have_as_many_rows_as_each_other_and_no_more_than_allowed():
    inputs = inputs_of(OWN, serving={"max_request_rows": 5})
    assert "has 2 rows, input 'x' has 3" in refusal(
        inputs, Tensor("x", "INT64", np.arange(3)), Tensor("y", "INT64", np.arange(2))
    )
    assert "1 to 5 rows, got 6" in refusal(inputs, Tensor("x", "INT64", np.arange(6)))


def test_saved_models_ask_for_ids():
    inputs = inputs_of(SAVED)
    assert list(inputs.declared) == ["example_id"]
    read, _ = columns(inputs, texts("example_id", "a", "b"))
    assert read["example_id"].tolist() == ["a", "b"]
    assert a_pool(["x"]).inputs == {}


@pytest.mark.parametrize("declared", [{}, {"inputs": {"x": {"datatype": "FP32", "shape": [2]}}}])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(value, declared):
    inputs = inputs_of(OWN, **declared)
    x = np.zeros((3, 2), dtype=np.float32)
    columns(inputs, Tensor("x", "FP32", x))
    x[1, 1] = value
    said = refusal(inputs, Tensor("x", "FP32", x))
    assert "'x'" in said
    assert "row 1" in said
    assert "finite" in said
