"""What tensors become before models see them, for every kind of pool, without any model."""

import base64
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cauc_ray.data.columns import column_to_numpy
from cauc_ray.models.pool import pool_of
from cauc_ray.protocol.tensors import DATATYPES, RequestError, Tensor
from cauc_ray.serving.inputs import Inputs

MODELS = {
    "questions": {"kind": "transformers-choice", "model": "m"},
    "images": {"kind": "torchvision", "arch": "mnasnet0_5", "weights": "DEFAULT"},
    "saved": {"kind": "saved", "logits": "LOGITS", "model": "m", "split": "test"},
    "own": {"kind": "python", "factory": "user_models:by_x"},
}


def inputs_of(model, **pool):
    """Return the inputs of a pool of one stage."""
    stage = {"name": "one", "model": MODELS[model], "cost": {"gflops": 1.0}}
    loaded = pool_of({"name": "p", "task": "multiple-choice", "stages": [stage], **pool}, Path.cwd())
    return Inputs(loaded, tuple(loaded.stages))


INPUTS = {name: inputs_of(name) for name in MODELS}
INPUTS["declared"] = inputs_of("own", inputs={"x": {"datatype": "FP32", "shape": [4, -1]}})


def texts(name, *values, shape=None):
    data = np.array([value if isinstance(value, bytes) else value.encode() for value in values], dtype=object)
    return Tensor(name, "BYTES", data if shape is None else data.reshape(shape))


def columns(name, *tensors):
    return INPUTS[name].columns({tensor.name: tensor for tensor in tensors})


def test_images_come_encoded_or_as_pixels():
    for shape in (None, (2, 1)):
        read, n = columns("images", texts("image", b"\x89PNG", b"\xff\xd8", shape=shape))
        assert (n, read["image"].tolist()) == (2, [b"\x89PNG", b"\xff\xd8"])
    pixels = np.zeros((3, 4, 5, 3), dtype=np.uint8)
    read, n = columns("images", Tensor("image", "UINT8", pixels))
    assert (n, read["image"].shape) == (3, pixels.shape)


def test_questions_are_json_texts_or_texts_next_to_their_choices():
    asked = [
        {"question": "Which?", "choices": ["a", "b", "c"]},
        {"question": "Why?", "choices": ["d", "e"], "context": "x", "subject": "own"},
    ]
    together, n = columns("questions", texts("question", *map(json.dumps, asked)), texts("subject", "s", "t"))
    as_columns, _ = columns(
        "questions",
        texts("question", "Which?", "Why?"),
        texts("choices", '["a", "b", "c"]', '["d", "e"]'),
        texts("context", "", "x"),
    )
    assert n == 2
    for read in (together, as_columns):
        assert read["question"].tolist() == ["Which?", "Why?"]
        assert read["choices"].tolist() == [["a", "b", "c"], ["d", "e"]]
    assert (together["context"].tolist(), together["subject"].tolist()) == ([None, "x"], ["s", "t"])
    matrix, _ = columns("questions", texts("question", "Which?"), texts("choices", "a", "b", shape=(1, 2)))
    assert matrix["choices"].tolist() == [["a", "b"]]


def floats(*shape, dtype="FP32", value=0.0, name="x"):
    values = np.zeros(shape, DATATYPES[dtype])
    values.flat[-1:] = value
    return Tensor(name, dtype, values)


@pytest.mark.parametrize(
    ("name", "tensors", "reason"),
    [
        *(
            ("questions", [texts("question", text)], reason)
            for text, reason in [
                ("{", "row 0: "),
                ('{"question": "q"}', "'choices'"),
                ('{"question": "q", "choices": ["a"]}', "at least 2"),
                ('{"question": "q", "choices": ["a", "b"], "answer": 1}', "unknown key 'answer'"),
                (b"\xff", "not UTF-8"),
            ]
        ),
        ("questions", [texts("question", "q"), texts("choices", shape=(1, 0))], "BYTES of shape [rows] (JSON"),
        ("images", [floats(1, 4, 5, 3, name="image")], "UINT8"),
        ("images", [floats(1, 3, dtype="UINT8", name="image")], "UINT8"),
        ("declared", [floats(2, 4, 7, dtype="FP64")], "must be FP32, got FP64"),
        ("declared", [floats(2, 5, 7)], r"shape [rows, 4, -1], got [2, 5, 7]"),
        ("declared", [floats()], "first dimension"),
        ("declared", [floats(2, name="y")], "input 'x' is missing"),
        ("declared", [floats(2, 4, 7), floats(2, name="y")], "unknown input 'y'"),
        ("own", [floats(3), floats(2, name="y")], "has 2 rows, input 'x' has 3"),
        ("own", [floats(5000)], "1 to 4096 rows, got 5000"),
    ],
)
def test_tensors_that_no_model_reads_are_refused_in_one_line(name, tensors, reason):
    with pytest.raises(RequestError) as error:
        columns(name, *tensors)
    assert reason in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize(
    "values",
    [
        [1.5, None, 2.0],
        [1, None, 3],
        [True, None],
        ["a", None, "ü"],
        [None, None, 1.0],
        [[1.0, None], [2.0, 3.0]],
        [1, 2],
    ],
    ids=str,
)
def test_missing_values_mean_the_same_as_in_a_run(values):
    """As tensors of JSON, and row by row as in a file of JSON Lines, where a missing key is a null."""
    expected = column_to_numpy(pa.chunked_array([values]))
    rows = [{"x": value, "y": 0} for value in values]
    partial = [{name: value for name, value in row.items() if value is not None} for row in rows]
    read = [columns("own", *INPUTS["own"].tensors(sent).values())[0]["x"] for sent in (rows, partial)]
    for column in read:
        if expected.dtype != object or np.ndim(values[0]) == 0:
            assert column.dtype == expected.dtype
        assert [repr(value) for value in column.tolist()] == [repr(value) for value in np.array(expected).tolist()]


def test_rows_are_read_as_tensors_are():
    pixels, file = np.zeros((4, 5, 3), np.uint8), b"\x89PNG"
    image, _ = columns("images", *INPUTS["images"].tensors([{"image": pixels.tolist()}]).values())
    assert np.array_equal(image["image"][0], pixels)
    image, _ = columns("images", *INPUTS["images"].tensors([{"image": base64.b64encode(file).decode()}]).values())
    assert image["image"].tolist() == [file]
    asked = {"question": "Which?", "choices": ["a", "b", "c"]}
    rows = [asked, {**asked, "choices": ["a", "b"], "context": "x"}]
    as_columns, n = columns("questions", *INPUTS["questions"].tensors(rows).values())
    assert (n, as_columns["choices"].tolist(), as_columns["context"].tolist()) == (
        2,
        [["a", "b", "c"], ["a", "b"]],
        [None, "x"],
    )
    declared, _ = columns("declared", *INPUTS["declared"].tensors([{"x": np.ones((4, 7), int).tolist()}] * 2).values())
    assert (declared["x"].dtype, declared["x"].shape) == (np.float32, (2, 4, 7))
    for name, row, reason in (("images", {"image": "#"}, "base64"), ("own", {"x": [[1], [1, 2]]}, "several lengths")):
        with pytest.raises(RequestError, match=reason):
            INPUTS[name].tensors([row])
