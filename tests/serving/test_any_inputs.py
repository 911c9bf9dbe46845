"""What tensors become before models see them, for every kind of pool, without any model."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.models.pool import pool_of
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inputs import Inputs
from cauc_ray.serving.tensors import DATATYPES, Tensor

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
INPUTS["declared"] = inputs_of("own", inputs={"x": {"datatype": "FP32", "shape": [2, -1]}})


def texts(*values):
    """Return texts as a tensor's values."""
    return np.array([value.encode() for value in values] + [None], dtype=object)[:-1]


numbers = st.none() | st.booleans() | st.integers(-3, 3)
anything = st.recursive(
    numbers | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
choices = st.lists(st.text(max_size=4), max_size=4)
questions = st.fixed_dictionaries(
    {"question": st.text(max_size=4) | anything, "choices": choices | anything},
    optional={"context": st.text() | anything, "subject": st.text(), "task": st.none(), "other": st.text()},
)
elements = (anything | choices | questions).map(json.dumps).map(str.encode) | st.binary(max_size=6)


@st.composite
def tensors(draw, n):
    name = draw(st.sampled_from(["question", "choices", "context", "subject", "image", "example_id", "x", "\n"]))
    rows = draw(st.sampled_from([n, n, n, n, 0, 1, 5000]))
    shape = draw(
        st.sampled_from([(rows,), (rows,), (rows, 1), (rows, 2), (rows, 0), (rows, 2, 3), (rows, 4, 4, 3), ()])
    )
    datatype = draw(st.sampled_from(["BYTES", "BYTES", "BYTES", *DATATYPES]))
    size = int(np.prod(shape))
    if datatype != "BYTES":
        return Tensor(name, datatype, np.zeros(shape, DATATYPES[datatype]))
    few = draw(st.lists(elements, min_size=1, max_size=3))
    values = np.empty(size, dtype=object)
    values[:] = (few * (size // len(few) + 1))[:size]
    return Tensor(name, datatype, values.reshape(shape))


@given(st.sampled_from(list(INPUTS)), st.integers(1, 3).flatmap(lambda n: st.lists(tensors(n), min_size=1, max_size=4)))
def test_tensors_become_columns_of_rows_or_are_refused(name, given_tensors):
    inputs = INPUTS[name]
    by_name = {tensor.name: tensor for tensor in given_tensors}
    columns, n, refused = {}, 1, None
    try:
        columns, n = inputs.columns(by_name)
    except RequestError as error:
        refused = error
    if refused is not None:
        assert refused.status in (400, 413)
        assert "\n" not in refused.message
        return
    assert 1 <= n <= 4096
    assert all(len(column) == n for column in columns.values())
    assert inputs.takes_any or set(columns) <= set(inputs.names) | {"choices"}
    for own in columns.get("choices", ()):
        assert len(own) >= 2
        assert all(isinstance(choice, str) for choice in own)
    if name == "questions":
        assert all(isinstance(question, str) for question in columns["question"])
        for optional in {"context", "subject", "task"} & set(columns):
            assert all(isinstance(one, str | None) for one in columns[optional])


def test_what_stands_beside_questions_is_kept():
    question = json.dumps({"question": "q", "choices": ["a", "b"], "subject": "own"})
    columns, _ = INPUTS["questions"].columns(
        {name: Tensor(name, "BYTES", texts(text)) for name, text in (("question", question), ("context", "separate"))}
    )
    assert (columns["context"][0], columns["subject"][0], columns["choices"][0]) == ("separate", "own", ["a", "b"])
