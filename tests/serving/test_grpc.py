"""What a service answers over gRPC, asked by tritonclient's own client: the same as over HTTP, bit for bit."""

import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import pytest
from asking import Command, edit_pool, http, until
from runs import python_pool, two_model_policy

import cauc_ray
from cauc_ray.errors import ConfigError
from cauc_ray.protocol import grpc_messages
from cauc_ray.protocol.grpc_messages import CALLS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tritonclient.grpc as over_grpc
    import tritonclient.http as over_http
    from tritonclient.utils import InferenceServerException

PROTO = Path(grpc_messages.__file__).with_name("open_inference.proto")
NAMES = ["prediction", "prediction_label", "confidence", "probabilities", "stage", "cost", "degraded"]


@pytest.fixture
def client(service):
    with over_grpc.InferenceServerClient(service.grpc) as client:
        yield client


@pytest.fixture
def http_client(service):
    """Return the HTTP client of the same service."""
    with over_http.InferenceServerClient(service.url.removeprefix("http://"), network_timeout=60) as client:
        yield client


def tensor(kind, name, values, datatype=None):
    values = np.asarray(values)
    result = kind.InferInput(name, list(values.shape), datatype or "BYTES")
    result.set_data_from_numpy(values)
    return result


def ids_of(kind, ids):
    return tensor(kind, "example_id", np.array([example.encode() for example in ids], dtype=object))


def test_the_shipped_descriptor_is_compiled_from_the_proto_file(tmp_path):
    made = tmp_path / "made"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", PROTO.parent, "--descriptor_set_out", made, PROTO.name]
    subprocess.run(command, check=True, timeout=60)
    assert made.read_bytes() == PROTO.with_suffix(".binpb").read_bytes()


def test_names_and_numbers_are_those_that_tritonclient_has():
    for name, kinds in CALLS.items():
        theirs = over_grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
        for ours, http_client in zip(
            (kind.DESCRIPTOR for kind in kinds), (theirs.input_type, theirs.output_type), strict=True
        ):
            assert fields(ours) == fields(http_client)


def fields(message):
    return {
        (one.name, one.number, one.type, one.is_repeated): one.message_type and fields(one.message_type)
        for one in message.fields
    }


def test_an_unmodified_triton_client_gets_the_metadata_of_http(client, http_client):
    assert client.is_server_live()
    assert client.is_server_ready()
    (version,) = client.get_model_metadata("six").versions
    assert client.is_model_ready("six", version)
    theirs, ours = http_client.get_model_metadata("six"), client.get_model_metadata("six")
    assert client.get_server_metadata().version == http_client.get_server_metadata()["version"]
    assert (ours.name, ours.platform) == (theirs["name"], theirs["platform"])
    assert list(ours.versions) == theirs["versions"]
    for name in ("inputs", "outputs"):
        tensors = [{"name": x.name, "datatype": x.datatype, "shape": list(x.shape)} for x in getattr(ours, name)]
        assert tensors == theirs[name]


def parameters_of(response):
    """Return a gRPC response's parameters but its own id."""
    values = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in response.parameters.items()}
    return {name: value for name, value in values.items() if name != "answer_id"}


def test_answers_are_those_of_http_bit_for_bit(chain, client, http_client):
    cap, ids = {"max_stage": 1}, chain.ids
    requested = [over_grpc.InferRequestedOutput(name) for name in NAMES]
    ours = client.infer("six", [ids_of(over_grpc, ids)], outputs=requested, request_id="7", parameters=cap)
    requested = [over_http.InferRequestedOutput(name, binary_data=True) for name in NAMES]
    theirs = http_client.infer("six", [ids_of(over_http, ids)], outputs=requested, parameters=cap)
    for name in NAMES:
        assert ours.as_numpy(name).dtype == theirs.as_numpy(name).dtype
        assert np.array_equal(ours.as_numpy(name), theirs.as_numpy(name)), name
    response, same = ours.get_response(), theirs.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "six", same["model_version"])
    assert parameters_of(response) == {k: value for k, value in same["parameters"].items() if k != "answer_id"}
    # Without the cap they are the replay's; without named outputs the same three as over HTTP.
    plain = client.infer("six", [ids_of(over_grpc, ids)], compression_algorithm="gzip")
    assert np.array_equal(plain.as_numpy("prediction"), chain.expected("rf").predictions)
    assert [output.name for output in plain.get_response().outputs] == ["prediction", "prediction_label", "confidence"]


# --- what a request holds ---


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A service whose answers depend on the numbers x, in any datatype, and its port for gRPC."""
    folder = tmp_path_factory.mktemp("echo")
    serving = {"max_body_mb": 4, "max_request_rows": 100_000, "max_queued_rows": 200_000}
    pool = edit_pool(python_pool(folder, batch_size=4096), serving=serving)
    with cauc_ray.serve(pool, two_model_policy(), port=0, grpc_port=0, local=True) as running:
        yield running


@contextmanager
def caller(service, model):
    """Yield a function that sends any message: a request's fields as dictionaries."""
    request, response = CALLS["ModelInfer"]
    with grpc.insecure_channel(service.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        path = "/inference.GRPCInferenceService/ModelInfer"
        call = channel.unary_unary(path, request.SerializeToString, response.FromString)
        yield lambda **fields: call(request(model_name=model, **fields), timeout=60)


@pytest.fixture
def stub(echo):
    with caller(echo, "test") as call:
        yield call


def refused(call, *args, **fields):
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **fields)
    assert "\n" not in error.value.details()
    return error.value.code().name, error.value.details()


CONTENTS = [
    ("FP64", "fp64_contents", [-1.0, 0.25, 1.5]),
    ("FP32", "fp32_contents", [-1.0, 0.25, 1.5]),
    ("INT8", "int_contents", [-1, 0, 2]),
    ("INT64", "int64_contents", [-1, 0, 2]),
    ("UINT16", "uint_contents", [1, 0, 2]),
    ("UINT64", "uint64_contents", [1, 0, 2]),
    ("BOOL", "bool_contents", [True, False, True]),
]


@pytest.mark.parametrize(("datatype", "field", "values"), CONTENTS)
def test_typed_and_raw_contents_are_the_same(stub, datatype, field, values):
    about = {"name": "x", "datatype": datatype, "shape": [3]}
    typed = stub(inputs=[{**about, "contents": {field: values}}])
    dtype = {"BOOL": bool}.get(datatype) or datatype.lower().replace("fp", "float")
    raw = stub(inputs=[about], raw_input_contents=[np.array(values, dtype=dtype).tobytes()])
    assert list(typed.raw_output_contents) == list(raw.raw_output_contents)
    assert len(set(typed.raw_output_contents[2])) > 1


X = {"name": "x", "datatype": "FP32", "shape": [2]}
SOUND = {"inputs": [X], "raw_input_contents": [b"12345678"]}
INVALID = {
    "no contents": ({"inputs": [X]}, "x"),
    "too few": ({"inputs": [{**X, "contents": {"fp32_contents": [1.0]}}]}, "needs 2"),
    "both": ({"inputs": [{**X, "contents": {"fp32_contents": [1, 2]}}], "raw_input_contents": [b"12345678"]}, "both"),
    "short raw": ({"inputs": [X], "raw_input_contents": [b"1234"]}, "needs 8"),
    "more raw": ({"inputs": [X], "raw_input_contents": [b"12345678", b""]}, "raw_input_contents"),
    "NaN": ({"inputs": [X], "raw_input_contents": [np.array([np.nan, 0], np.float32).tobytes()]}, "NaN"),
    "beyond": ({"inputs": [{**X, "datatype": "INT8", "contents": {"int_contents": [1, 300]}}]}, "INT8"),
    "two fields": ({"inputs": [{**X, "contents": {"fp32_contents": [1], "int_contents": [1]}}]}, "one of them"),
    "bytes": ({"inputs": [{**X, "contents": {"bytes_contents": [b"a", b"b"]}}]}, "values of type bytes"),
    "memory": ({"inputs": [{**X, "parameters": {"shared_memory_region": {"string_param": "a"}}}]}, "shared_memory"),
    "output": ({**SOUND, "outputs": [{"name": "y"}]}, "output"),
    "cap": ({**SOUND, "parameters": {"max_stage": {"int64_param": 9}}}, "max_stage"),
}


@pytest.mark.parametrize(("fields", "word"), INVALID.values(), ids=INVALID)
def test_an_invalid_request_is_refused_in_one_line_that_names_the_fault(stub, fields, word):
    code, details = refused(stub, **fields)
    assert code == "INVALID_ARGUMENT"
    assert word in details


def test_unknown_models_and_versions_are_not_found(stub, client):
    for call in (client.is_model_ready, client.get_model_metadata):
        with pytest.raises(InferenceServerException, match="unknown model 'seven'") as error:
            call("seven")
        assert error.value.status() == "StatusCode.NOT_FOUND"
    assert refused(stub, model_version="3", inputs=[X])[0] == "NOT_FOUND"


def test_rows_and_bytes_beyond_the_limits_are_refused_and_large_requests_are_not(echo, stub):
    n = 100_000
    values = np.linspace(-2, 2, n, dtype=np.float32)
    raw = stub(inputs=[{**X, "shape": [n]}], raw_input_contents=[values.tobytes()])
    typed = stub(inputs=[{**X, "shape": [n], "contents": {"fp32_contents": values}}])  # read in another process
    assert len(raw.raw_output_contents[0]) == 4 * n
    assert list(raw.raw_output_contents) == list(typed.raw_output_contents)
    code, details = refused(stub, inputs=[{**X, "shape": [n + 1]}], raw_input_contents=[bytes(4 * n + 4)])
    assert (code, "100000 rows" in details) == ("RESOURCE_EXHAUSTED", True)
    assert refused(stub, inputs=[X], raw_input_contents=[bytes(4_100_000)])[0] == "RESOURCE_EXHAUSTED"


def test_bytes_that_are_no_message_and_unknown_calls_are_refused(echo):
    with grpc.insecure_channel(echo.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert refused(call, b"\xff\xff\xff", timeout=60)[0] == "INVALID_ARGUMENT"
        unknown = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")
        assert refused(unknown, b"", timeout=60)[0] == "UNIMPLEMENTED"


def test_texts_are_read_from_typed_contents_too(chain, service):
    ids = [example.encode() for example in chain.ids]
    tensor = {"name": "example_id", "datatype": "BYTES", "shape": [len(ids)]}
    with caller(service, "six") as call:
        answer = call(inputs=[{**tensor, "contents": {"bytes_contents": ids}}])
        code, details = refused(call, inputs=[{**tensor, "shape": [1], "contents": {"bytes_contents": [b"\xff"]}}])
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.int32), chain.expected("rf").predictions)
    assert (code, "UTF-8" in details) == ("INVALID_ARGUMENT", True)


# --- for how long ---


def test_a_deadline_and_a_cancelled_call_end_their_requests_and_a_signal_answers_open_ones(tmp_path):
    log = tmp_path / "calls"
    python_pool(tmp_path, [("slow_by_x", {"seconds": 1.0, "log": str(log)}), ("by_x", {})])
    two_model_policy().save(tmp_path / "policy.json")
    service = Command(tmp_path, "--port", "0", "--grpc-port", "0", "--local")

    def n_calls():
        return len(log.read_text().splitlines()) if log.exists() else 0

    try:
        with over_grpc.InferenceServerClient(service.said["grpc"]) as client, ThreadPoolExecutor(1) as pool:
            x, ended = tensor(over_grpc, "x", np.array([9.0]), "FP64"), Event()
            with pytest.raises(InferenceServerException) as error:
                client.infer("test", [x], client_timeout=0.3)
            assert error.value.status() == "StatusCode.DEADLINE_EXCEEDED"
            before = n_calls()
            context = client.async_infer("test", [x], callback=lambda result, error: ended.set())
            until(lambda: n_calls() > before)
            context.cancel()
            assert ended.wait(60)
            until(lambda: 'status="499"}' in http("GET", f"{service.url}/metrics")[1].decode())
            before = n_calls()
            answer = pool.submit(client.infer, "test", [x])
            until(lambda: n_calls() > before)
            code, out, err = service.ended(15)
            assert answer.result(60).as_numpy("prediction").shape == (1,)
    finally:
        service.close()
    assert (code, out) == (0, "")
    # The first may have ended before it came to the service.
    logged = [json.loads(line)["status"] for line in err.splitlines() if not line.startswith("cauc: ")]
    assert logged in ([499, 200], [499, 499, 200])


def test_on_ray_it_is_not_opened_to_all_networks_unasked(chain):
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, grpc_port=0)
