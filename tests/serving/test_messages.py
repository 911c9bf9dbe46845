"""Messages of the Open Inference Protocol: Triton's own client is understood and understands; nothing else breaks."""

import gzip
import json
import os
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_tensors import is_one_sentence, refusal, same, tensors
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.inference import OUTPUTS
from cauc_ray.serving.messages import DEFAULT_OUTPUTS, decoded_body, read_infer_request, write_infer_response

NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
PARAMETERS = st.fixed_dictionaries(
    {}, optional={"max_cost": st.floats(0, 1e9) | st.integers(0, 2**63), "max_stage": st.integers(-9, 9) | NAMES}
)
NAMED = st.dictionaries(st.sampled_from(sorted(OUTPUTS)), st.booleans(), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def tensor(**changes):
    return {"name": "x", "datatype": "INT8", "shape": [2], "data": [3, 4], **changes}


def body_of(**request):
    return json.dumps({"inputs": [tensor()], **request}).encode()


def read(body, json_length=None):
    return read_infer_request(body, json_length)


def fault(body, json_length=None):
    with pytest.raises(RequestError) as caught:
        read(body, json_length)
    assert is_one_sentence(caught.value.message)
    assert caught.value.status == 400
    return caught.value.message


def as_sent(tensor, binary):
    sent = InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)
    return sent.set_data_from_numpy(tensor.values, binary_data=binary)


@st.composite
def named(draw, json=False):
    """Return tensors of different names."""
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    return [draw(tensors(name=name, json=json)) for name in names]


@given(named(json=True), st.data(), st.booleans())
def test_requests_of_triton_s_client_are_understood(inputs, data, viewed):
    binary = [data.draw(st.booleans()) for _ in inputs]
    outputs = data.draw(NAMED)
    request_id = data.draw(NAMES | st.just(""))
    parameters = data.draw(PARAMETERS)
    body, length = InferenceServerClient.generate_request_body(
        [as_sent(one, raw) for one, raw in zip(inputs, binary, strict=True)],
        outputs=[InferRequestedOutput(name, binary_data=binary) for name, binary in outputs.items()],
        request_id=request_id,
        parameters=parameters,
    )
    assert (length is None) == (not any(binary))
    request = read(memoryview(body) if viewed else body, length)
    assert list(request.inputs) == [one.name for one in inputs]
    for one in inputs:
        assert request.inputs[one.name].datatype == one.datatype
        assert same(request.inputs[one.name].values, one.values)
    # This client asks for all that it does not name as raw bytes.
    assert request.outputs == (outputs or dict.fromkeys(DEFAULT_OUTPUTS, True))
    assert request.id == (request_id or None)
    assert {name: value for name, value in request.parameters.items() if name != "binary_data_output"} == parameters


@given(named())
def test_raw_inputs_of_triton_s_client_hold_whatever_it_sends(inputs):
    body, length = InferenceServerClient.generate_request_body([as_sent(one, True) for one in inputs])
    request = read(body, length)
    assert all(same(request.inputs[one.name].values, one.values) for one in inputs)


@given(named(json=True), st.data(), st.none() | NAMES, PARAMETERS)
def test_triton_s_client_understands_responses(outputs, data, request_id, parameters):
    binary = {one.name for one in outputs if data.draw(st.booleans())}
    body, length = write_infer_response(
        model="m", version="3", id=request_id, outputs=outputs, binary=binary, parameters=parameters
    )
    assert (length is None) == (not binary)
    result = InferenceServerClient.parse_response_body(body, header_length=length)
    for one in outputs:
        got = result.as_numpy(one.name)
        if one.datatype == "BYTES" and one.name not in binary:
            got = np.array([text.encode() for text in got.flat], dtype=object).reshape(got.shape)
        assert same(got, one.values)
        assert result.get_output(one.name)["datatype"] == one.datatype
    response = result.get_response()
    assert [output["name"] for output in response["outputs"]] == [one.name for one in outputs]
    assert (response["model_name"], response["model_version"]) == ("m", "3")
    assert response.get("id") == request_id
    assert response.get("parameters", {}) == parameters


@given(named())
def test_raw_outputs_hold_whatever_a_model_gave(outputs):
    names = [one.name for one in outputs]
    body, length = write_infer_response(model="m", version="1", id=None, outputs=outputs, binary=names, parameters={})
    result = InferenceServerClient.parse_response_body(body, header_length=length)
    assert all(same(result.as_numpy(one.name), one.values) for one in outputs)


def test_responses_are_always_json():
    body, length = write_infer_response(
        model="m", version="1", id="ä\n\u2028", outputs=[], binary=[], parameters={"cost": float("nan")}
    )
    assert length is None
    response = json.loads(body, parse_constant=pytest.fail)
    assert response["parameters"] == {"cost": None}
    assert response["id"] == "ä\n\u2028"


def test_numbers_that_json_has_not_are_refused():
    sent = as_sent(read(body_of(inputs=[tensor(datatype="FP32")])).inputs["x"], binary=False)
    body, _ = InferenceServerClient.generate_request_body([sent])
    for number in (b"nan", b"+1", b"01", b"1.", b"0x1"):
        assert "nvalid JSON" in fault(body.replace(b"3.0", number))
    for number in (b"NaN", b"Infinity", b"-Infinity"):
        assert "outside the range of FP32" in fault(body.replace(b"3.0", number))
    assert "outside the range of FP32" in fault(body.replace(b"3.0", b"1e999"))


def test_nulls_and_unknown_keys_are_as_good_as_nothing():
    asked = body_of(
        id=None,
        outputs=None,
        parameters={"max_cost": None, "binary_data_output": None},
        model_name="m",
        inputs=[tensor(parameters={"binary_data_size": None, "content_type": "np", "headers": {}}, more=1)],
    )
    for body in (asked, body_of(), body_of(outputs=[], parameters={})):
        request = read(body)
        assert (request.id, request.outputs) == (None, dict.fromkeys(DEFAULT_OUTPUTS, False))
        assert not any(request.parameters.values())
        assert request.inputs["x"].values.tolist() == [3, 4]


def test_outputs_are_binary_as_they_say_or_else_as_the_request_says():
    outputs = [{"name": "cost"}, {"name": "prediction_label", "parameters": {}}]
    for by in (False, True):
        outputs[1]["parameters"]["binary_data"] = not by
        request = read(body_of(outputs=outputs, parameters={"binary_data_output": by}))
        assert request.outputs == {"cost": by, "prediction_label": not by}
        assert read(body_of(parameters={"binary_data_output": by})).outputs == dict.fromkeys(DEFAULT_OUTPUTS, by)


TEXTS_REFUSED = {
    b"": "nvalid JSON: EOF",
    b"{": "nvalid JSON",
    b'{"inputs": [}': "nvalid JSON",
    b"{} {}": "nvalid JSON",
    b'{"inputs": "\xff"}': "nvalid JSON",
    b'{"inputs": "\\ud800"}': "nvalid JSON",
    b"\xff\xfe{\0}\0": "nvalid JSON",
    b"[" * 100_000: "recursion limit",
    b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "recursion limit",
    b'{"inputs": [' + b"1" * 100_000 + b"]}": "out of range",
    b"[]": "object",
    b"null": "object",
    b'"inputs"': "object",
    b"{}": "missing key 'inputs'",
}


@pytest.mark.parametrize(("text", "said"), TEXTS_REFUSED.items(), ids=range(len(TEXTS_REFUSED)))
def test_what_is_no_json_object_is_refused(text, said):
    assert said in fault(text)


REQUESTS_REFUSED = [
    ({"inputs": None}, "inputs: "),
    ({"inputs": []}, "inputs: list should have at least 1 item"),
    ({"inputs": {"name": "x"}}, "inputs: "),
    ({"inputs": [tensor(), None]}, "inputs.1: "),
    ({"inputs": [tensor(name=None)]}, "inputs.0.name: "),
    ({"inputs": [tensor(name="")]}, "inputs.0.name: "),
    ({"inputs": [tensor(name=3)]}, "inputs.0.name: "),
    ({"inputs": [{"shape": [1], "datatype": "INT8"}]}, "missing key 'inputs.0.name'"),
    ({"inputs": [tensor(), tensor()]}, "two inputs named 'x'"),
    ({"inputs": [tensor(datatype="BF16")]}, "inputs.0.datatype: input should be 'BOOL', 'UINT8',"),
    ({"inputs": [tensor(datatype=32)]}, "inputs.0.datatype: "),
    ({"inputs": [tensor(shape=[3])]}, "input 'x' has 2 values"),
    ({"inputs": [tensor(shape=[True, 2])]}, "inputs.0.shape.0: "),
    ({"inputs": [tensor(shape=[1.0, 2])]}, "inputs.0.shape.0: "),
    ({"inputs": [tensor(shape=[2, -1])]}, "inputs.0.shape.1: "),
    ({"inputs": [tensor(shape=[1] * 65)]}, "inputs.0.shape: "),
    ({"inputs": [tensor(shape=[2**62, 4])]}, "too large"),
    ({"inputs": [tensor(data=None)]}, "input 'x' has no 'data'"),
    ({"inputs": [tensor(data=3)]}, "inputs.0.data: "),
    ({"inputs": [tensor(parameters=[])]}, "inputs.0.parameters: "),
    ({"inputs": [tensor(parameters={"shared_memory_region": "r"})]}, "inputs.0.parameters.shared_memory_region: "),
    ({"inputs": [tensor(parameters={"binary_data_size": 2})]}, "input 'x' has both 'data' and a binary_data_size"),
    ({"inputs": [tensor(data=None, parameters={"binary_data_size": 2})]}, "header Inference-Header-Content-Length"),
    ({"id": 7}, "id: input should be a valid string, got 7"),
    ({"id": ["x"]}, "id: "),
    ({"parameters": "x"}, "parameters: "),
    ({"parameters": {"max_cost": [1]}}, "parameters.max_cost: "),
    ({"parameters": {"max_cost": -1}}, "parameters.max_cost: input should be greater than or equal to 0"),
    ({"parameters": {"max_cost": True}}, "parameters.max_cost: "),
    ({"parameters": {"max_cost": 10**400}}, "parameters.max_cost: "),
    ({"parameters": {"max_stage": 1.5}}, "parameters.max_stage"),
    (
        {"parameters": {"binary_data_output": 1}},
        "parameters.binary_data_output: input should be a valid boolean, got 1",
    ),
    ({"parameters": {"shared_memory_region": "r"}}, "unknown key 'parameters.shared_memory_region'"),
    ({"outputs": {}}, "outputs: "),
    ({"outputs": "prediction"}, "outputs: "),
    ({"outputs": ["prediction"]}, "outputs.0: "),
    ({"outputs": [{}]}, "missing key 'outputs.0.name'"),
    ({"outputs": [{"name": "y"}]}, "outputs.0.name: input should be 'prediction', 'prediction_label',"),
    ({"outputs": [{"name": "cost"}] * 2}, "names the output 'cost' twice"),
    ({"outputs": [{"name": "cost", "parameters": 3}]}, "outputs.0.parameters: "),
    ({"outputs": [{"name": "cost", "parameters": {"classification": 3}}]}, "outputs.0.parameters.classification: "),
    ({"outputs": [{"name": "cost", "parameters": {"binary_data": "no"}}]}, "outputs.0.parameters.binary_data: "),
    ({"outputs": [{"name": "cost", "parameters": {"shared_memory_region": "r"}}]}, "shared_memory_region: "),
]


@pytest.mark.parametrize(("request_", "said"), REQUESTS_REFUSED, ids=range(len(REQUESTS_REFUSED)))
def test_requests_that_are_not_the_protocol_s_are_refused(request_, said):
    assert said in fault(body_of(**request_))


def test_parameters_that_only_overflow_are_refused():
    body = body_of(parameters={"max_cost": 0.5})
    assert "max_cost" in fault(body.replace(b"0.5", b"1e999"))
    assert read(body.replace(b"0.5", b"1e300")).parameters == {"max_cost": 1e300}


@pytest.mark.parametrize("long", ["x" * 10**4, "\n" * 10**4, "\u2028" * 10**4, "\U0001f600" * 10**4, "'\"\0" * 10**4])
def test_no_message_is_as_long_as_what_was_sent(long):
    fault(body_of(inputs=[tensor(name=long, shape=[-1])]))
    fault(body_of(inputs=[tensor(datatype=long)]))
    fault(body_of(inputs=[tensor(shape=[long] * 10)]))
    fault(body_of(inputs=[tensor(shape=[9] * 10**6)]))
    fault(body_of(inputs=[tensor(shape={long: [long]})]))
    fault(body_of(id=[[long] * 9] * 9))
    fault(body_of(parameters={long: None, long + "2": []}))
    fault(body_of(parameters={"max_stage": [long]}))
    fault(body_of(parameters={"shared_memory_" + long: 1}))
    fault(body_of(outputs=[{"name": long, "parameters": {"binary_data": long}}]))
    fault(body_of(outputs=[{"name": long}, {"name": long}]))


def raw_body(*sizes, raw=b""):
    """Return a body whose inputs say to have so many raw bytes, and the length of its JSON part."""
    inputs = [
        {"name": f"x{at}", "datatype": "UINT8", "shape": [2], "parameters": {"binary_data_size": size}}
        for at, size in enumerate(sizes)
    ]
    text = json.dumps({"inputs": inputs}).encode()
    return text + raw, len(text)


def test_raw_bytes_that_are_too_many_or_too_few_are_refused():
    request = read(*raw_body(2, 2, raw=b"abcd"))
    assert [request.inputs[name].values.tobytes() for name in ("x0", "x1")] == [b"ab", b"cd"]
    assert "the body has 1 bytes more" in fault(*raw_body(2, 2, raw=b"abcde"))
    message = fault(*raw_body(2, 2, raw=b"abc"))
    assert "input 'x1' has the binary_data_size 2, but only 1 bytes are left" in message
    assert "input 'x1' has 1 bytes, but its shape [2] of UINT8 needs 2" in fault(*raw_body(2, 1, raw=b"abc"))
    for size in (-1, True, 2.0, "2", [2], 10**4000):
        assert "binary_data_size" in fault(*raw_body(size, raw=b"ab"))
    # A request without raw bytes may say so, or may be followed by none.
    assert read(body_of(), len(body_of())).inputs["x"].values.tolist() == [3, 4]
    assert "the body has 3 bytes more" in fault(body_of() + b"abc", len(body_of()))


def test_the_length_of_the_json_part_must_be_of_the_body():
    body = body_of()
    for length in (-1, len(body) + 1, 10**30):
        message = fault(body, length)
        assert f"Inference-Header-Content-Length is {length}, but the body has {len(body)} bytes" in message
    for length in range(len(body)):
        assert "nvalid JSON" in fault(body, length)


@given(st.binary(max_size=100), st.none() | st.integers(-5, 105))
def test_random_bytes_are_only_ever_refused(body, json_length):
    fault(body, json_length)


@st.composite
def bodies(draw):
    """Return a valid body and the length of its JSON part."""
    inputs = [as_sent(one, draw(st.booleans())) for one in draw(named(json=True))]
    outputs = [InferRequestedOutput(name, binary) for name, binary in draw(NAMED).items()]
    parameters = draw(PARAMETERS)
    return InferenceServerClient.generate_request_body(inputs, outputs=outputs, parameters=parameters)


def answered_or_refused(body, json_length):
    error = refusal(read, body, json_length)
    assert error is None or error.status == 400


@given(bodies(), st.data())
def test_damaged_bodies_are_only_ever_refused(valid, data):
    body, json_length = valid
    start, n = data.draw(st.integers(0, len(body))), data.draw(st.integers(0, 5))
    pieces = st.binary(max_size=5) | st.sampled_from([b"-", b"0", b"9" * 20, b"null", b"[", b'"', b"1e400", b"true"])
    answered_or_refused(body[:start] + data.draw(pieces) + body[start + n :], json_length)
    shift = data.draw(st.integers(-5, 5))
    answered_or_refused(body, (len(body) if json_length is None else json_length) + shift)


def places(value, path=()):
    """Return the paths to all values within JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, part in inner for place in places(part, (*path, key)))]


@given(bodies(), JSON | st.sampled_from(["BYTES", "FP16", "BOOL", 0, -1, 2**31, 2**63, 2**64, 10**400]), st.data())
def test_requests_with_any_value_at_any_place_are_only_ever_refused(valid, strange, data):
    body, json_length = valid
    length = len(body) if json_length is None else json_length
    request = json.loads(body[:length])
    path = data.draw(st.sampled_from(places(request)[1:]))
    holder = request
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[path[-1]] = strange
    else:
        del holder[path[-1]]
    text = json.dumps(request).encode()
    answered_or_refused(text + body[length:], len(text))


@given(st.binary(max_size=2000), st.sampled_from([gzip.compress, zlib.compress]), st.integers(0, 9), st.integers(-3, 3))
def test_bodies_are_inflated_up_to_the_limit(body, compress, level, more):
    encoding = {gzip.compress: "gzip", zlib.compress: "deflate"}[compress]
    limit = max(len(body) + more, 0)
    for sent, name in (
        (compress(body, level), encoding),
        (body, "identity"),
        (body, None),
        (body, " IDENTITY"),
        (body, ""),
    ):
        if len(body) <= limit:
            assert decoded_body(sent, name, limit) == body
            continue
        with pytest.raises(RequestError, match=f"the body has more than {limit} bytes") as caught:
            decoded_body(sent, name, limit)
        assert caught.value.status == 413
    assert decoded_body(compress(body, level), encoding.upper(), len(body)) == body


@given(st.binary(min_size=1, max_size=500), st.sampled_from([gzip.compress, zlib.compress]), st.data())
def test_bodies_that_are_not_so_encoded_are_refused(body, compress, data):
    encoding = {gzip.compress: "gzip", zlib.compress: "deflate"}[compress]
    whole = compress(body)
    for damaged, said in (
        (whole[: data.draw(st.integers(0, len(whole) - 1))], "ends within"),
        (whole + data.draw(st.binary(min_size=1)), "continues after the end"),
        (whole * 2, "continues after the end"),
        (b"\0" + body, "is not valid"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "is not valid"),
    ):
        with pytest.raises(RequestError, match=said) as caught:
            decoded_body(damaged, encoding, 1000)
        assert caught.value.status == 400
        assert is_one_sentence(caught.value.message)
        assert encoding in caught.value.message


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "x" * 10**6, "gzip\n\nfoo", "*"])
def test_other_encodings_are_refused_by_name(encoding):
    with pytest.raises(RequestError, match="supported are gzip, deflate and identity") as caught:
        decoded_body(b"{}", encoding, 100)
    assert caught.value.status == 415
    assert is_one_sentence(caught.value.message)


@pytest.mark.parametrize(("encoding", "window"), [("gzip", 31), ("deflate", 15)])
def test_a_bomb_is_not_inflated(encoding, window):
    deflater = zlib.compressobj(9, wbits=window)
    bomb = b"".join(deflater.compress(bytes(2**20)) for _ in range(200)) + deflater.flush()
    limit = 2**20
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="more than 1048576 bytes") as caught:
            decoded_body(bomb, encoding, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.status == 413
    assert peak < 4 * limit + len(bomb)


def test_inflating_random_bytes_only_ever_refuses():
    for size in range(200):
        for encoding in ("gzip", "deflate"):
            with pytest.raises(RequestError):
                decoded_body(os.urandom(size), encoding, 10**6)
