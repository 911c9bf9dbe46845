"""The Open Inference Protocol: Triton's own client is understood and understands; nothing else is read, nor breaks."""

import gzip
import json
import math
import tracemalloc
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from cauc_ray.protocol.messages import (
    DEFAULT_OUTPUTS,
    InferRequest,
    decoded_body,
    read_infer_request,
    read_infer_response,
    write_infer_response,
)
from cauc_ray.protocol.tensors import DATATYPES, RequestError, Tensor
from cauc_ray.serving.inference import OUTPUTS

INTEGERS = sorted(name for name, dtype in DATATYPES.items() if dtype.kind in "iu")
FLOATS = sorted(name for name, dtype in DATATYPES.items() if dtype.kind == "f")
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
PARAMETERS = st.fixed_dictionaries(
    {}, optional={"max_cost": st.floats(0, 1e9) | st.integers(0, 2**63), "max_stage": st.integers(-9, 9) | NAMES}
)
NAMED = st.dictionaries(st.sampled_from(sorted(OUTPUTS)), st.booleans(), max_size=3)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def tensors(draw, *, name="x", json=False, shapes=SHAPES, datatypes=tuple(DATATYPES)):
    """Return a tensor; json: one that JSON can hold, without NaN, infinities and bytes that are not UTF-8."""
    datatype = draw(st.sampled_from(datatypes))
    dtype = DATATYPES[datatype]
    options = {"allow_nan": False, "allow_infinity": False} if json and dtype.kind == "f" else {}
    if datatype != "BYTES":
        elements = hnp.from_dtype(dtype, **options)
    else:
        elements = st.text(max_size=9).map(str.encode) if json else st.binary(max_size=9)
    values = draw(hnp.arrays(dtype, draw(shapes), elements=elements))
    return Tensor(name, datatype, values.T.copy().T if draw(st.booleans()) else values)  # of any layout in memory


@st.composite
def named(draw):
    """Return tensors of different names, and whether each is sent as raw bytes."""
    binary = {name: draw(st.booleans()) for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))}
    return [draw(tensors(name=name, json=not raw)) for name, raw in binary.items()], binary


def same(values, expected):
    """Return whether two arrays are the same to the last bit: NaN equals itself, 0.0 is not -0.0."""
    if values.dtype != expected.dtype or values.shape != expected.shape:
        return False
    return values.tolist() == expected.tolist() if values.dtype == object else values.tobytes() == expected.tobytes()


def fault(call, *arguments, status=400):
    """Return the message of the RequestError that a call raises, which a client can be sent."""
    with pytest.raises(RequestError) as caught:
        call(*arguments)
    message = caught.value.message
    assert caught.value.status == status
    message.encode()
    assert 10 < len(message) < 1000
    assert message.isprintable()
    return message


def read(body, json_length=None):
    return read_infer_request(body, json_length)


def tensor(**changes):
    return {"name": "x", "datatype": "INT8", "shape": [2], "data": [3, 4], **changes}


def body_of(**request):
    return json.dumps({"inputs": [tensor()], **request}).encode()


def as_sent(tensor, binary):
    sent = InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)
    return sent.set_data_from_numpy(tensor.values, binary_data=binary)


@given(named(), st.data(), st.booleans())
def test_requests_of_triton_s_client_are_understood(sent, data, viewed):
    inputs, binary = sent
    outputs, parameters = data.draw(NAMED), data.draw(PARAMETERS)
    request_id = data.draw(NAMES | st.just(""))
    body, length = InferenceServerClient.generate_request_body(
        [as_sent(one, binary[one.name]) for one in inputs],
        outputs=[InferRequestedOutput(name, binary_data=binary) for name, binary in outputs.items()],
        request_id=request_id,
        parameters=parameters,
    )
    request = read(memoryview(body) if viewed else body, length)
    assert list(request.inputs) == list(binary)
    for one in inputs:
        assert request.inputs[one.name].datatype == one.datatype
        assert same(request.inputs[one.name].values, one.values)
    # This client asks for all that it does not name as raw bytes.
    assert request.outputs == (outputs or dict.fromkeys(DEFAULT_OUTPUTS, True))
    assert request.id == (request_id or None)
    assert {name: value for name, value in request.parameters.items() if name != "binary_data_output"} == parameters
    # Damaged, it is read or refused.
    start, n = data.draw(st.integers(0, len(body))), data.draw(st.integers(1, 5))
    pieces = st.binary(max_size=5) | st.sampled_from([b"-", b"0", b"9" * 20, b"null", b"[", b'"', b"1e400", b"true"])
    with suppress(RequestError):
        read(body[:start] + data.draw(pieces) + body[start + n :], length)


@given(named(), st.none() | NAMES, PARAMETERS)
def test_triton_s_client_understands_responses(sent, request_id, parameters):
    outputs, binary = sent
    body, length = write_infer_response(InferRequest(request_id, {}, binary, {}), "m", "1", outputs, parameters)
    assert (length is None) == (not any(binary.values()))
    result = InferenceServerClient.parse_response_body(body, header_length=length)
    for one in outputs:
        got = result.as_numpy(one.name)
        if one.datatype == "BYTES" and not binary[one.name]:
            got = np.array([text.encode() for text in got.flat], dtype=object).reshape(got.shape)
        assert same(got, one.values)
        assert result.get_output(one.name)["datatype"] == one.datatype
    tensors, by_our_client = read_infer_response(body, length)
    assert all(same(tensors[one.name].values, one.values) for one in outputs)
    response = result.get_response()
    assert [output["name"] for output in response["outputs"]] == list(tensors) == list(binary)
    assert (response["model_name"], response.get("id")) == ("m", request_id)
    assert response["parameters"] == by_our_client == parameters


def test_nulls_and_unknown_keys_are_as_good_as_nothing():
    asked = body_of(
        id=None,
        outputs=None,
        parameters={"max_cost": None, "binary_data_output": None},
        model_name="m",
        inputs=[tensor(parameters={"binary_data_size": None, "content_type": "np", "headers": {}}, more=1)],
    )
    for body in (asked, body_of(), body_of(outputs=[], parameters={}), body_of(parameters={"sequence_id": 1})):
        request = read(body)
        assert (request.id, request.outputs) == (None, dict.fromkeys(DEFAULT_OUTPUTS, False))
        assert not any(value for name, value in request.parameters.items() if name != "sequence_id")
        assert request.inputs["x"].values.tolist() == [3, 4]


@pytest.mark.parametrize("by_default", [False, True])
def test_outputs_are_binary_as_they_say_or_else_as_the_request_says(by_default):
    outputs = [{"name": "cost"}, {"name": "prediction_label", "parameters": {"binary_data": not by_default}}]
    request = read(body_of(outputs=outputs, parameters={"binary_data_output": by_default}))
    assert request.outputs == {"cost": by_default, "prediction_label": not by_default}


def one_number(number):
    return body_of(inputs=[tensor(datatype="FP32", data=[0.5, 4])]).replace(b"0.5", number)


REFUSED = [
    *((text, "nvalid JSON") for text in (b"", b"{", b"{} {}", b'{"inputs": "\xff"}', b'{"inputs": "\\ud800"}')),
    *((one_number(number), "nvalid JSON") for number in (b"nan", b"+1", b"01", b"1.")),
    *((one_number(number), "outside the range of FP32") for number in (b"-Infinity", b"1e999")),
    (b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion limit"),
    (b'{"inputs": [' + b"1" * 100_000 + b"]}", "out of range"),
    (body_of(inputs=[]), "inputs: list should have at least 1 item"),
    (body_of(inputs=[tensor(), tensor()]), "two inputs named 'x'"),
    (body_of(inputs=[tensor(datatype="BF16")]), "inputs.0.datatype: input should be 'BOOL', 'UINT8',"),
    (body_of(inputs=[tensor(shape=[3])]), "tensor 'x' has 2 values"),
    (body_of(inputs=[tensor(data=None)]), "tensor 'x' has no 'data'"),
    (body_of(inputs=[tensor(parameters={"shared_memory_region": "r"})]), "inputs.0.parameters.shared_memory_region: "),
    (body_of(inputs=[tensor(parameters={"binary_data_size": 2})]), "both 'data' and a binary_data_size"),
    (body_of(inputs=[tensor(data=None, parameters={"binary_data_size": 2})]), "header Inference-Header-Content-Len"),
    (body_of(id=7), "id: input should be a valid string, got 7"),
    (body_of(parameters={"max_cost": -1}), "parameters.max_cost: input should be greater than or equal to 0"),
    (body_of(rows=[{"x": 1}]), "either inputs or rows"),
    (body_of(outputs=[{"name": "y"}]), "outputs.0.name: input should be 'prediction', 'prediction_label',"),
    (body_of(outputs=[{"name": "cost"}] * 2), "names the output 'cost' twice"),
    (body_of(outputs=[{"name": "cost", "parameters": {"classification": 3}}]), "outputs.0.parameters.classification"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_the_protocol_is_refused(body, reason):
    assert reason in fault(read, body)


@pytest.mark.parametrize("long", ["x" * 10**4, "\u2028" * 10**4, "'\"\n\0" * 10**4])
def test_no_message_is_as_long_as_what_was_sent(long):
    fault(read, body_of(inputs=[tensor(name=long, shape=[-1])]))
    fault(read, body_of(inputs=[tensor(shape=[9] * 10**6)]))
    fault(read, body_of(id=[[long] * 9] * 9))
    fault(read, body_of(parameters={"priority": long}))
    fault(read, body_of(outputs=[{"name": long}]))


def raw_body(*sizes, raw=b""):
    """Return a body whose inputs declare so many raw bytes, and the length of its JSON part."""
    raw_tensor = tensor(datatype="UINT8", data=None)
    inputs = [raw_tensor | {"name": f"x{n}", "parameters": {"binary_data_size": size}} for n, size in enumerate(sizes)]
    text = body_of(inputs=inputs)
    return text + raw, len(text)


def test_raw_bytes_that_are_too_many_or_too_few_are_refused():
    request = read(*raw_body(2, 2, raw=b"abcd"))
    assert [request.inputs[name].values.tobytes() for name in ("x0", "x1")] == [b"ab", b"cd"]
    for sizes, raw in (((2, 2), b"abcde"), ((2, 2), b"abc"), ((2, 1), b"abc"), ((10**4000, 2), b"abcd")):
        fault(read, *raw_body(*sizes, raw=raw))
    for size in (-1, True, 2.0, "2"):
        assert "binary_data_size" in fault(read, *raw_body(size, raw=b"ab"))
    for length in (-1, len(body_of()) + 1, 10**30):
        fault(read, body_of(), length)


@given(st.binary(min_size=1, max_size=2000), st.sampled_from(["gzip", "deflate"]), st.integers(-3, 3), st.data())
def test_bodies_are_inflated_up_to_the_limit_and_damaged_ones_refused(body, encoding, more, data):
    whole = {"gzip": gzip.compress, "deflate": zlib.compress}[encoding](body)
    limit = max(len(body) + more, 0)
    for sent, name in ((whole, encoding.upper()), (body, None), (body, " IDENTITY"), (body, "")):
        if len(body) <= limit:
            assert decoded_body(sent, name, limit) == body
        else:
            assert f"the body has more than {limit} bytes" in fault(decoded_body, sent, name, limit, status=413)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for unsupported in ("br", "gzip, gzip", "x" * 10**6, "gzip\n\nfoo"):
        fault(decoded_body, body, unsupported, limit, status=415)
    for damaged in (cut, whole * 2, b"\0" + body, whole[:-1] + bytes([whole[-1] ^ 1])):
        assert encoding in fault(decoded_body, damaged, encoding, 5000)


@pytest.mark.parametrize(("encoding", "window"), [("gzip", 31), ("deflate", 15)])
def test_a_bomb_is_not_inflated(encoding, window):
    deflater = zlib.compressobj(9, wbits=window)
    bomb = b"".join(deflater.compress(bytes(2**20)) for _ in range(50)) + deflater.flush()
    tracemalloc.start()
    try:
        fault(decoded_body, bomb, encoding, 2**20, status=413)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20 + len(bomb)


def read_list(datatype, values):
    return Tensor.from_json("x", datatype, [len(values)], values)


def nested(values):
    """Return an array's values for JSON, nested as it is."""
    values = np.vectorize(bytes.decode, otypes=[object])(values) if values.dtype == object else values
    return values.tolist()


@given(tensors(), st.data())
def test_raw_bytes_of_another_length_are_refused(tensor, data):
    raw, shape = tensor.to_raw(), list(tensor.values.shape)
    for damaged in (raw + b"\0", *([raw[: data.draw(st.integers(0, len(raw) - 1))]] if raw else [])):
        fault(Tensor.from_raw, "x", tensor.datatype, shape, memoryview(damaged))


@given(st.sampled_from(INTEGERS), st.integers(0, 65), st.integers(-2, 2), st.booleans())
def test_whole_numbers_are_read_up_to_their_limits_and_no_further(datatype, power, more, negative):
    number = (-1 if negative else 1) * 2**power + more
    limits = np.iinfo(DATATYPES[datatype])
    if limits.min <= number <= limits.max:
        assert read_list(datatype, [0, number]).values.tolist() == [0, number]
    else:
        assert f"outside the range of {datatype}" in fault(read_list, datatype, [0, number])


@given(st.sampled_from(FLOATS), st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.integers(), min_size=1))
def test_numbers_are_rounded_to_the_nearest_and_refused_beyond_the_range(datatype, numbers):
    with np.errstate(over="ignore"):
        expected = np.array([DATATYPES[datatype].type(float(number)) for number in numbers])
    if np.isfinite(expected).all():
        assert same(read_list(datatype, numbers).values, expected)
        numbers[-1] = 10**400  # not even Python's floats hold it
    assert f"outside the range of {datatype}" in fault(read_list, datatype, numbers)


@given(tensors(json=True), st.data())
def test_a_value_of_another_type_is_refused_wherever_it_is(tensor, data):
    assume(tensor.values.size)
    allowed = {"b": (bool,), "u": (int,), "i": (int,), "f": (int, float), "O": (str,)}[tensor.values.dtype.kind]
    strange = data.draw(st.sampled_from([v for v in (True, 1, 1.0, "1", [], {}) if type(v) not in allowed]))
    values = tensor.to_json()
    values[data.draw(st.integers(0, len(values) - 1))] = strange
    fault(Tensor.from_json, "x", tensor.datatype, list(tensor.values.shape), values)


@given(tensors(json=True, shapes=hnp.array_shapes(min_dims=2, max_dims=4, min_side=2, max_side=4)), st.data())
def test_nesting_unlike_the_shape_is_refused(tensor, data):
    values = part = nested(tensor.values)
    assert same(Tensor.from_json("x", tensor.datatype, list(tensor.values.shape), values).values, tensor.values)
    for _ in range(data.draw(st.integers(0, tensor.values.ndim - 2))):
        part = part[data.draw(st.integers(0, len(part) - 1))]
    changes = {"longer": [*part, part[0]], "shorter": part[:-1], "deeper": [*part[:-1], [part[-1]]]}
    changes["shallower"] = [*part[:-1], part[-1][0]]
    part[:] = changes[data.draw(st.sampled_from(sorted(changes)))]
    fault(Tensor.from_json, "x", tensor.datatype, list(tensor.values.shape), values)


@pytest.mark.parametrize("shape", [[2**62, 2], [10**4000], [0, 2**62, 2**62]], ids=range(3))
def test_shapes_that_no_array_has_are_refused(shape):
    for datatype in ("INT64", "BYTES"):
        assert "too large" in fault(Tensor.from_json, "x", datatype, shape, [1, 2])
        assert "too large" in fault(Tensor.from_raw, "x", datatype, shape, memoryview(bytes(16)))


@pytest.mark.parametrize("shape", [[1] * 64, [2**31, 0, 2**28], [0], []], ids=range(4))
def test_shapes_at_the_limits_are_read(shape):
    values = [7] * math.prod(shape)
    assert Tensor.from_json("x", "INT8", shape, values).values.shape == tuple(shape)
    assert Tensor.from_raw("x", "INT8", shape, memoryview(bytes(values))).values.shape == tuple(shape)


def test_a_boolean_is_0_or_1_and_data_is_a_list():
    assert "bytes other than 0 and 1" in fault(Tensor.from_raw, "x", "BOOL", [3], memoryview(b"\0\1\2"))
    assert "has no 'data', a list of its values" in fault(Tensor.from_json, "x", "INT8", [1], "text")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, b"caf\xe9"])
def test_what_json_cannot_hold_must_be_asked_for_as_binary(value):
    values = np.array([value, value], dtype=object if isinstance(value, bytes) else np.float32)
    assert "binary_data" in fault(Tensor("x", "BYTES" if isinstance(value, bytes) else "FP32", values).to_json)
