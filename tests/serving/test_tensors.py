"""Tensors of the Open Inference Protocol: both forms hold what was written, and nothing else is read."""

import json
import math
import re
import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from protocol_tensors import is_one_sentence, refusal, same, tensors

from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.tensors import DATATYPES, Tensor

INTEGERS = sorted(name for name, dtype in DATATYPES.items() if dtype.kind in "iu")
FLOATS = sorted(name for name, dtype in DATATYPES.items() if dtype.kind == "f")
# Of Python's struct module, which writes the raw form by itself.
FORMATS = dict(
    zip(
        ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64"),
        "?bhiqBHIQefd",
        strict=True,
    )
)


def through_json(tensor, data):
    return Tensor.from_json(tensor.name, tensor.datatype, list(tensor.values.shape), json.loads(json.dumps(data)))


def nested(values):
    """Return an array's values for JSON, nested as it is."""
    values = np.vectorize(bytes.decode, otypes=[object])(values) if values.dtype == object else values
    return values.tolist()


def raw_fault(datatype, shape, raw):
    with pytest.raises(RequestError) as caught:
        Tensor.from_raw("pixels\n", datatype, shape, memoryview(raw))
    return checked(caught.value)


def json_fault(datatype, shape, data):
    with pytest.raises(RequestError) as caught:
        Tensor.from_json("pixels\n", datatype, shape, data)
    return checked(caught.value)


def checked(error):
    assert error.message.startswith(r"input 'pixels\n' ")
    assert is_one_sentence(error.message)
    assert str(error) == error.message
    assert (error.status, error.retry_after_s) == (400, None)
    return error.message


@given(tensors(json=True))
def test_json_holds_every_tensor_flat_and_nested(tensor):
    flat = tensor.to_json()
    assert isinstance(flat, list)
    assert same(through_json(tensor, flat).values, tensor.values)
    if tensor.values.ndim:
        assert same(through_json(tensor, nested(tensor.values)).values, tensor.values)


@given(tensors(), st.binary(max_size=5))
def test_raw_bytes_hold_every_tensor_wherever_they_lie(tensor, before):
    raw = memoryview(before + tensor.to_raw() + b"after")[len(before) : -5]
    read = Tensor.from_raw(tensor.name, tensor.datatype, list(tensor.values.shape), raw)
    assert (read.name, read.datatype) == (tensor.name, tensor.datatype)
    assert same(read.values, tensor.values)


@given(tensors())
def test_raw_bytes_are_those_of_the_protocol(tensor):
    if tensor.datatype == "BYTES":
        expected = b"".join(struct.pack("<I", len(element)) + element for element in tensor.values.flat)
        assert tensor.to_raw() == expected
    else:
        order = "<" + FORMATS[tensor.datatype]
        unpacked = [
            struct.unpack_from(order, tensor.to_raw(), at)
            for at in range(0, tensor.values.nbytes, tensor.values.itemsize)
        ]
        assert np.array_equal(np.array(unpacked).ravel(), tensor.values.ravel(), equal_nan=tensor.datatype in FLOATS)
        assert len(tensor.to_raw()) == struct.calcsize(order) * tensor.values.size


@given(tensors(json=True, shapes=hnp.array_shapes(min_dims=2, max_dims=3)))
def test_the_layout_in_memory_does_not_show(tensor):
    turned = Tensor(tensor.name, tensor.datatype, tensor.values.T.copy().T)
    assert turned.to_json() == tensor.to_json()
    assert turned.to_raw() == tensor.to_raw()


@given(st.sampled_from(INTEGERS), st.integers(0, 65), st.integers(-2, 2), st.booleans())
def test_whole_numbers_are_read_up_to_their_limits_and_no_further(datatype, power, more, negative):
    number = (-1 if negative else 1) * 2**power + more
    limits = np.iinfo(DATATYPES[datatype])
    if limits.min <= number <= limits.max:
        assert Tensor.from_json("x", datatype, [2], [0, number]).values.tolist() == [0, number]
    else:
        assert f"range of {datatype}, {limits.min} to {limits.max}" in json_fault(datatype, [2], [0, number])


@given(st.sampled_from(FLOATS), st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(), min_size=1))
def test_numbers_are_rounded_to_the_nearest_and_refused_beyond_the_range(datatype, numbers):
    with np.errstate(over="ignore"):
        expected = np.array([DATATYPES[datatype].type(float(number)) for number in numbers])
    if np.isfinite(expected).all():
        assert same(Tensor.from_json("x", datatype, [len(numbers)], numbers).values, expected)
    else:
        assert f"outside the range of {datatype}, -" in json_fault(datatype, [len(numbers)], numbers)


def test_numbers_that_not_even_python_s_floats_hold_are_refused():
    for datatype in FLOATS:
        for number in (10**400, -(10**4299), math.inf):
            assert "outside the range" in json_fault(datatype, [2], [0.5, number])


@given(tensors(json=True), st.data())
def test_a_value_of_another_type_is_refused_wherever_it_stands(tensor, data):
    assume(tensor.values.size)
    allowed = {"b": (bool,), "u": (int,), "i": (int,), "f": (int, float), "O": (str,)}[tensor.values.dtype.kind]
    strange = data.draw(st.sampled_from([v for v in (True, 1, 1.0, "1", None, [], {}) if type(v) not in allowed]))
    values = tensor.to_json()
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = strange
    message = json_fault(tensor.datatype, list(tensor.values.shape), values)
    if strange != []:
        assert f"is {tensor.datatype}, but its data have " in message


@given(tensors(json=True, shapes=hnp.array_shapes(min_dims=2, max_dims=4, min_side=2, max_side=4)), st.data())
def test_nesting_unlike_the_shape_is_refused(tensor, data):
    values = nested(tensor.values)
    part = values
    for _ in range(data.draw(st.integers(0, tensor.values.ndim - 2))):
        part = part[data.draw(st.integers(0, len(part) - 1))]
    how = data.draw(st.sampled_from(["longer", "shorter", "deeper", "shallower"]))
    if how == "longer":
        part.append(part[0])
    elif how == "shorter":
        part.pop()
    elif how == "deeper":
        part[-1] = [part[-1]]
    else:
        part[-1] = part[-1][0]
    message = json_fault(tensor.datatype, list(tensor.values.shape), values)
    assert "nested" in message or "lists deeper than its shape" in message or "values, but its shape" in message


@given(tensors(), st.data())
def test_one_byte_more_or_less_is_refused(tensor, data):
    raw, shape = tensor.to_raw(), list(tensor.values.shape)
    assert f"has {len(raw) + 1} bytes" in raw_fault(tensor.datatype, shape, raw + b"\0")
    if raw:
        cut = data.draw(st.integers(0, len(raw) - 1))
        assert f"has {cut} bytes" in raw_fault(tensor.datatype, shape, raw[:cut])


@given(st.lists(st.binary(max_size=5), min_size=1), st.integers(1, 2**32 - 1), st.data())
def test_lengths_of_elements_that_lead_astray_are_refused(elements, length, data):
    place = data.draw(st.integers(0, len(elements) - 1))
    assume(length != len(elements[place]))
    lengths = [length if at == place else len(element) for at, element in enumerate(elements)]
    raw = b"".join(struct.pack("<I", n) + element for n, element in zip(lengths, elements, strict=True))
    error = refusal(Tensor.from_raw, "x", "BYTES", [len(elements)], memoryview(raw))
    if error:
        assert f"has {len(raw)} bytes, which are not {len(elements)} BYTES" in error.message
    else:  # the bytes may be read in another way, but then as just these bytes
        assert Tensor.from_raw("x", "BYTES", [len(elements)], memoryview(raw)).to_raw() == raw


SHAPES_TOO_LARGE = [[2**62, 2], [10**4000], [2**40] * 64, [0, 2**62, 2**62], [0, 10**4000]]


@pytest.mark.parametrize("shape", SHAPES_TOO_LARGE, ids=range(len(SHAPES_TOO_LARGE)))
def test_shapes_that_no_array_has_are_refused(shape):
    for datatype in ("INT64", "BYTES"):
        assert "too large" in json_fault(datatype, shape, [1, 2])
        assert "too large" in raw_fault(datatype, shape, b"\0" * 16)


def test_shapes_at_the_limits_are_read():
    for dims in ([1] * 64, [2**31, 0, 2**28], [0], []):
        values = [7] * math.prod(dims)
        assert Tensor.from_json("x", "INT8", dims, values).values.shape == tuple(dims)
        assert Tensor.from_raw("x", "INT8", dims, memoryview(bytes(values))).values.shape == tuple(dims)


def test_counts_and_missing_data_are_reported():
    assert "has 5 values, but its shape [2, 3] needs 6" in json_fault("INT8", [2, 3], [1] * 5)
    assert "has 1 values, but its shape [] needs 1" not in json_fault("INT8", [], [1, 2])
    for data in (None, 3, "text", {}, True):
        assert "has no 'data', a list of its values" in json_fault("INT8", [1], data)
    assert "has 4 bytes, but its shape [3] of INT16 needs 6" in raw_fault("INT16", [3], b"1234")
    assert "bytes other than 0 and 1" in raw_fault("BOOL", [3], b"\0\1\2")
    assert "lists deeper than its shape" in json_fault("INT8", [1, 1], [[[1]]])
    assert "not nested" in json_fault("INT8", [2, 2], [[1, 2], 3, 4])
    for shape in ([2, 2], [1, 4], [4], [4, 1], [2, 1, 2]):  # as many values, otherwise laid out
        assert re.search("not nested|lists deeper", json_fault("INT8", shape, [[1, 2, 3], [4]]))
    assert "lists deeper than its shape" in json_fault("INT8", [], [[1]])


@given(tensors(json=True, shapes=hnp.array_shapes(min_dims=0), datatypes=[*FLOATS, "BYTES"]), st.data())
def test_what_json_cannot_hold_must_be_asked_for_as_binary(tensor, data):
    place = data.draw(st.integers(0, tensor.values.size - 1))
    strange = st.just(b"caf\xe9") if tensor.datatype == "BYTES" else st.sampled_from([np.nan, np.inf, -np.inf])
    tensor.values.flat[place] = data.draw(strange)
    message = refusal(tensor.to_json).message
    assert message.startswith("output 'x' has ")
    assert "binary_data" in message
    raw = memoryview(tensor.to_raw())
    assert same(Tensor.from_raw("x", tensor.datatype, list(tensor.values.shape), raw).values, tensor.values)


def test_a_tensor_is_of_its_datatype():
    for datatype, values in (("INT32", np.zeros(2)), ("BYTES", np.array([b"a"])), ("BF16", np.zeros(2, np.float32))):
        with pytest.raises(ValueError, match=f"tensor 'x' is {datatype}, but its values are"):
            Tensor("x", datatype, values)
