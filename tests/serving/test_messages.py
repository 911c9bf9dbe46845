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
from cauc_ray.serving.messages import RequestedOutput, decoded_body, read_infer_request, write_infer_response

NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
# Triton's client keeps some names for itself, `timeout` among them.
PARAMETERS = st.dictionaries(
    NAMES.map("own_{}".format),
    st.booleans() | st.integers(-(2**63), 2**63) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    max_size=3,
)
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
    names = data.draw(st.lists(NAMES, max_size=3, unique=True))
    outputs = [RequestedOutput(name, data.draw(st.booleans())) for name in names]
    request_id = data.draw(NAMES | st.just(""))
    parameters = data.draw(PARAMETERS)
    body, length = InferenceServerClient.generate_request_body(
        [as_sent(one, raw) for one, raw in zip(inputs, binary, strict=True)],
        outputs=[InferRequestedOutput(output.name, binary_data=output.binary) for output in outputs],
        request_id=request_id,
        parameters=parameters,
    )
    assert (length is None) == (not any(binary))
    request = read(memoryview(body) if viewed else body, length)
    assert list(request.inputs) == [one.name for one in inputs]
    for one in inputs:
        assert request.inputs[one.name].datatype == one.datatype
        assert same(request.inputs[one.name].values, one.values)
    assert request.outputs == (tuple(outputs) or None)
    assert request.id == (request_id or None)
    assert request.parameters == parameters
    assert request.binary_by_default == (not outputs)  # which this client asks for then


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
    for number in (b"NaN", b"Infinity", b"-Infinity", b"nan", b"+1", b"01", b"1.", b"0x1"):
        assert body != body.replace(b"3.0", number)
        assert "is not JSON" in fault(body.replace(b"3.0", number))
    assert "beyond those of FP32" in fault(body.replace(b"3.0", b"1e999"))


def test_nulls_and_unknown_keys_are_as_good_as_nothing():
    asked = body_of(
        id=None,
        outputs=None,
        parameters={"max_cost": None},
        model_name="m",
        inputs=[tensor(parameters={"binary_data_size": None, "content_type": "np", "headers": {}}, more=1)],
    )
    for body in (asked, body_of(), body_of(outputs=[], parameters={})):
        request = read(body)
        assert (request.id, request.outputs, request.parameters, request.binary_by_default) == (None, None, {}, False)
        assert request.inputs["x"].values.tolist() == [3, 4]


def test_outputs_are_binary_as_they_say_or_else_as_the_request_says():
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": not (by := False)}}]
    for by in (False, True):
        outputs[1]["parameters"]["binary_data"] = not by
        request = read(body_of(outputs=outputs, parameters={"binary_data_output": by}))
        assert request.outputs == (RequestedOutput("a", by), RequestedOutput("b", not by))
        assert request.parameters == {}
        assert request.binary_by_default == by


TEXTS_REFUSED = {
    b"": "is not JSON in UTF-8: EOF",
    b"{": "is not JSON",
    b'{"inputs": [}': "is not JSON",
    b"{} {}": "is not JSON",
    b'{"inputs": "\xff"}': "is not JSON in UTF-8",
    b'{"inputs": "\\ud800"}': "is not JSON",
    b"\xff\xfe{\0}\0": "is not JSON",
    b"[" * 100_000: "is not JSON in UTF-8: recursion limit",
    b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "recursion limit",
    b'{"inputs": [' + b"1" * 100_000 + b"]}": "out of range",
    b"[]": "must be a JSON object",
    b"null": "must be a JSON object",
    b'"inputs"': "must be a JSON object",
    b"{}": "needs 'inputs', a list of at least one tensor",
}


@pytest.mark.parametrize(("text", "said"), TEXTS_REFUSED.items(), ids=range(len(TEXTS_REFUSED)))
def test_what_is_no_json_object_is_refused(text, said):
    assert said in fault(text)


REQUESTS_REFUSED = [
    ({"inputs": None}, "needs 'inputs'"),
    ({"inputs": []}, "needs 'inputs'"),
    ({"inputs": {"name": "x"}}, "needs 'inputs'"),
    ({"inputs": [tensor(), None]}, "inputs[1] must be a JSON object"),
    ({"inputs": [tensor(name=None)]}, "inputs[0] needs a 'name'"),
    ({"inputs": [tensor(name="")]}, "inputs[0] needs a 'name'"),
    ({"inputs": [tensor(name=3)]}, "inputs[0] needs a 'name'"),
    ({"inputs": [tensor(), tensor()]}, "two inputs named 'x'"),
    ({"inputs": [tensor(datatype="BF16")]}, "input 'x' has the datatype 'BF16'"),
    ({"inputs": [tensor(shape=[3])]}, "input 'x' has 2 values"),
    ({"inputs": [tensor(data=None)]}, "input 'x' has no 'data'"),
    ({"inputs": [tensor(parameters=[])]}, "the parameters of input 'x' must be a JSON object"),
    ({"inputs": [tensor(parameters={"shared_memory_region": "r"})]}, "'shared_memory_region'; shared memory is not"),
    ({"inputs": [tensor(parameters={"binary_data_size": 2})]}, "input 'x' has both 'data' and a binary_data_size"),
    ({"inputs": [tensor(data=None, parameters={"binary_data_size": 2})]}, "header Inference-Header-Content-Length"),
    ({"id": 7}, "id of the request must be a text, not 7"),
    ({"id": ["x"]}, "id of the request"),
    ({"parameters": "x"}, "the parameters of the request must be"),
    ({"parameters": {"max_cost": [1]}}, "parameter 'max_cost' must be a boolean, a number or a text"),
    ({"parameters": {"max_cost": {}}}, "parameter 'max_cost'"),
    ({"parameters": {"max_cost": 10**400}}, "parameter 'max_cost' is beyond the range"),
    ({"parameters": {"binary_data_output": 1}}, "binary_data_output of the request must be true or false, not 1"),
    ({"parameters": {"shared_memory_region": "r"}}, "the request has the parameter 'shared_memory_region'"),
    ({"outputs": {}}, "'outputs' must be a list"),
    ({"outputs": "prediction"}, "'outputs' must be a list"),
    ({"outputs": ["prediction"]}, "outputs[0] must be a JSON object"),
    ({"outputs": [{}]}, "outputs[0] needs a 'name'"),
    ({"outputs": [{"name": "y"}] * 2}, "names the output 'y' twice"),
    ({"outputs": [{"name": "y", "parameters": 3}]}, "the parameters of output 'y'"),
    (
        {"outputs": [{"name": "y", "parameters": {"classification": 3}}]},
        "output 'y' has the parameter 'classification'",
    ),
    ({"outputs": [{"name": "y", "parameters": {"binary_data": "no"}}]}, "binary_data of output 'y' must be true or"),
    (
        {"outputs": [{"name": "y", "parameters": {"shared_memory_byte_size": 1}}]},
        "output 'y' has the parameter 'shared",
    ),
]


@pytest.mark.parametrize(("request_", "said"), REQUESTS_REFUSED, ids=range(len(REQUESTS_REFUSED)))
def test_requests_that_are_not_the_protocol_s_are_refused(request_, said):
    assert said in fault(body_of(**request_))


def test_parameters_that_only_overflow_are_refused():
    assert "parameter 'c' is beyond the range" in fault(body_of(parameters={"c": 0.5}).replace(b"0.5", b"-1e999"))
    assert read(body_of(parameters={"c": 10**300})).parameters == {"c": 10**300}


@pytest.mark.parametrize("long", ["x" * 10**4, "\n" * 10**4, "\u2028" * 10**4, "\U0001f600" * 10**4, "'\"\0" * 10**4])
def test_no_message_is_as_long_as_what_was_sent(long):
    fault(body_of(inputs=[tensor(name=long, shape=[-1])]))
    fault(body_of(inputs=[tensor(datatype=long)]))
    fault(body_of(inputs=[tensor(shape=[long] * 10)]))
    fault(body_of(inputs=[tensor(shape=[9] * 10**6)]))
    fault(body_of(inputs=[tensor(shape={long: [long]})]))
    fault(body_of(id=[[long] * 9] * 9))
    fault(body_of(parameters={long: None, long + "2": []}))
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
    assert "input 'x1' has the binary_data_size 2, but 1 bytes are left" in message
    assert "input 'x1' has 1 bytes, but its shape [2] of UINT8 takes 2" in fault(*raw_body(2, 1, raw=b"abc"))
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
        assert "is not JSON" in fault(body, length)


@given(st.binary(max_size=100), st.none() | st.integers(-5, 105))
def test_random_bytes_are_only_ever_refused(body, json_length):
    fault(body, json_length)


@st.composite
def bodies(draw):
    """Return a valid body and the length of its JSON part."""
    inputs = [as_sent(one, draw(st.booleans())) for one in draw(named(json=True))]
    outputs = [
        InferRequestedOutput(name, draw(st.booleans())) for name in draw(st.lists(NAMES, max_size=2, unique=True))
    ]
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
        (whole[: data.draw(st.integers(0, len(whole) - 1))], "ends in the midst"),
        (whole + data.draw(st.binary(min_size=1)), "goes on after the end"),
        (whole * 2, "goes on after the end"),
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
