"""What a service answers over gRPC, asked by tritonclient's own client: the same as over HTTP, bit for bit."""

import json
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import pytest
from asking import Chain, Command, http, until
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


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    return Chain(tmp_path_factory.mktemp("service"))


@pytest.fixture(scope="module")
def service(chain):
    with cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, grpc_port=0, name="six", local=True) as running:
        yield running


@pytest.fixture
def client(service):
    with over_grpc.InferenceServerClient(service.grpc) as one:
        yield one


def tensor(kind, name, values, datatype=None):
    values = np.asarray(values)
    datatype = datatype or "BYTES"
    one = kind.InferInput(name, list(values.shape), datatype)
    one.set_data_from_numpy(values)
    return one


def ids_of(kind, ids):
    return tensor(kind, "example_id", np.array([one.encode() for one in ids], dtype=object))


def test_what_is_shipped_is_made_of_the_description_beside_it(tmp_path):
    made = tmp_path / "made"
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", PROTO.parent, "--descriptor_set_out", made, PROTO.name]
    subprocess.run(command, check=True, timeout=60)
    assert made.read_bytes() == PROTO.with_suffix(".binpb").read_bytes()


def test_names_and_numbers_are_those_that_tritonclient_has():
    for name, kinds in CALLS.items():
        theirs = over_grpc.service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name[name]
        for ours, other in zip(
            (kind.DESCRIPTOR for kind in kinds), (theirs.input_type, theirs.output_type), strict=True
        ):
            assert fields(ours) == fields(other)


def fields(message):
    return {
        (one.name, one.number, one.type, one.is_repeated): one.message_type and fields(one.message_type)
        for one in message.fields
    }


def test_an_unmodified_triton_client_is_told_what_http_tells(chain, client, service):
    assert client.is_server_live()
    assert client.is_server_ready()
    (version,) = client.get_model_metadata("six").versions
    assert client.is_model_ready("six", version)
    with over_http.InferenceServerClient(service.url.removeprefix("http://")) as other:
        theirs, ours = other.get_model_metadata("six"), client.get_model_metadata("six")
        assert client.get_server_metadata().version == other.get_server_metadata()["version"]
    assert (ours.name, list(ours.versions), ours.platform) == (theirs["name"], theirs["versions"], theirs["platform"])
    for which in ("inputs", "outputs"):
        seen = [{"name": x.name, "datatype": x.datatype, "shape": list(x.shape)} for x in getattr(ours, which)]
        assert seen == theirs[which]


def test_answers_are_those_of_http_bit_for_bit(chain, client, service):
    wanted = [over_grpc.InferRequestedOutput(name) for name in NAMES]
    result = client.infer(
        "six", [ids_of(over_grpc, chain.ids)], outputs=wanted, request_id="7", parameters={"max_stage": 1}
    )
    with over_http.InferenceServerClient(service.url.removeprefix("http://")) as other:
        same = [over_http.InferRequestedOutput(name, binary_data=True) for name in NAMES]
        theirs = other.infer("six", [ids_of(over_http, chain.ids)], outputs=same, parameters={"max_stage": 1})
    for name in NAMES:
        ours, expected = result.as_numpy(name), theirs.as_numpy(name)
        assert ours.dtype == expected.dtype
        assert np.array_equal(ours, expected), name
    response = result.get_response()
    assert (response.id, response.model_name, response.model_version) == (
        "7",
        "six",
        theirs.get_response()["model_version"],
    )
    own = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in response.parameters.items()}
    told = theirs.get_response()["parameters"]
    assert own.keys() == told.keys()
    assert {name: value for name, value in own.items() if name != "answer_id"} == {
        name: value for name, value in told.items() if name != "answer_id"
    }
    # Without the cap they are the replay's; without named outputs the same three as over HTTP.
    plain = client.infer("six", [ids_of(over_grpc, chain.ids)], compression_algorithm="gzip")
    assert np.array_equal(plain.as_numpy("prediction"), chain.expected("rf").predictions)
    assert [one.name for one in plain.get_response().outputs] == ["prediction", "prediction_label", "confidence"]


# --- what a request holds ---


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    """A service whose answers depend on the numbers x, in any datatype, and its port for gRPC."""
    folder = tmp_path_factory.mktemp("echo")
    pool = python_pool(folder, batch_size=4096)
    with pool.open("a") as file:
        file.write("\nserving: {max_body_mb: 4, max_request_rows: 100000, max_queued_rows: 200000}\n")
    with cauc_ray.serve(pool, two_model_policy(), port=0, grpc_port=0, local=True) as running:
        yield running


@pytest.fixture
def stub(echo):
    """Return what makes a call of any message: dictionaries of a request's fields."""
    asked, answered = CALLS["ModelInfer"]
    with grpc.insecure_channel(echo.grpc, options=[("grpc.max_send_message_length", -1)]) as channel:
        path = "/inference.GRPCInferenceService/ModelInfer"
        call = channel.unary_unary(path, asked.SerializeToString, answered.FromString)
        yield lambda timeout=60, metadata=(), **fields: call(
            asked(model_name="test", **fields), timeout=timeout, metadata=metadata
        )


def refused(call, *args, **fields):
    with pytest.raises(grpc.RpcError) as caught:
        call(*args, **fields)
    assert "\n" not in caught.value.details()
    return caught.value.code().name, caught.value.details()


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
WRONG = {
    "no contents": ({"inputs": [X]}, "x"),
    "too few": ({"inputs": [{**X, "contents": {"fp32_contents": [1.0]}}]}, "needs 2"),
    "both": ({"inputs": [{**X, "contents": {"fp32_contents": [1, 2]}}], "raw_input_contents": [b"12345678"]}, "both"),
    "short raw": ({"inputs": [X], "raw_input_contents": [b"1234"]}, "needs 8"),
    "more raw": ({"inputs": [X], "raw_input_contents": [b"12345678", b""]}, "raw_input_contents"),
    "NaN": ({"inputs": [X], "raw_input_contents": [np.array([np.nan, 0], np.float32).tobytes()]}, "NaN"),
    "beyond": ({"inputs": [{**X, "datatype": "INT8", "contents": {"int_contents": [1, 300]}}]}, "INT8"),
    "two fields": ({"inputs": [{**X, "contents": {"fp32_contents": [1], "int_contents": [1]}}]}, "one of them"),
    "bytes": ({"inputs": [{**X, "contents": {"bytes_contents": [b"a", b"b"]}}]}, "bytes_contents"),
    "datatype": ({"inputs": [{**X, "datatype": "FP8"}]}, "datatype"),
    "ragged": ({"inputs": [{**X, "shape": [-1]}], "raw_input_contents": [b""]}, "shape"),
    "twice": ({"inputs": [X, X], "raw_input_contents": [b"12345678"] * 2}, "two inputs"),
    "memory": ({"inputs": [{**X, "parameters": {"shared_memory_region": {"string_param": "a"}}}]}, "shared_memory"),
    "output": ({**SOUND, "outputs": [{"name": "y"}]}, "output"),
    "parameter": ({"inputs": [X], "parameters": {"sequence_id": {"int64_param": 1}}}, "sequence_id"),
    "cap": (
        {"inputs": [X], "raw_input_contents": [b"12345678"], "parameters": {"max_stage": {"int64_param": 9}}},
        "max_stage",
    ),
}


@pytest.mark.parametrize(("fields", "word"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_refused_in_one_line_that_names_it(stub, fields, word):
    code, details = refused(stub, **fields)
    assert code == "INVALID_ARGUMENT"
    assert word in details


def test_models_and_versions_that_are_not_there_are_not_found(stub, client):
    for call in (client.is_model_ready, client.get_model_metadata):
        with pytest.raises(InferenceServerException, match="no model 'seven'") as caught:
            call("seven")
        assert caught.value.status() == "StatusCode.NOT_FOUND"
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


def test_bytes_that_are_no_message_are_refused(echo):
    with grpc.insecure_channel(echo.grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert refused(call, b"\xff\xff\xff", timeout=60)[0] == "INVALID_ARGUMENT"
        unknown = channel.unary_unary("/inference.GRPCInferenceService/ModelStatistics")
        assert refused(unknown, b"", timeout=60)[0] == "UNIMPLEMENTED"


def test_texts_are_read_from_typed_contents_too(chain, service):
    ids = [one.encode() for one in chain.ids]
    asked, answered = CALLS["ModelInfer"]
    with grpc.insecure_channel(service.grpc) as channel:
        path = "/inference.GRPCInferenceService/ModelInfer"
        call = channel.unary_unary(path, asked.SerializeToString, answered.FromString)
        about = {"name": "example_id", "datatype": "BYTES", "shape": [len(ids)]}
        answer = call(asked(model_name="six", inputs=[{**about, "contents": {"bytes_contents": ids}}]), timeout=60)
        code, details = refused(
            call, asked(model_name="six", inputs=[{**about, "shape": [1], "contents": {"bytes_contents": [b"\xff"]}}])
        )
    assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.int32), chain.expected("rf").predictions)
    assert (code, "UTF-8" in details) == ("INVALID_ARGUMENT", True)


# --- who asks, and for how long ---


def test_a_token_is_asked_for_in_the_metadata(chain, monkeypatch):
    monkeypatch.setenv("CAUC_TOKEN", "s3cret")
    with (
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, grpc_port=0, name="six", local=True) as service,
        over_grpc.InferenceServerClient(service.grpc) as client,
    ):
        assert client.is_model_ready("six")
        for headers in (None, {"authorization": "Bearer other"}):
            with pytest.raises(InferenceServerException) as caught:
                client.infer("six", [ids_of(over_grpc, chain.ids[:1])], headers=headers)
            assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        client.infer("six", [ids_of(over_grpc, chain.ids[:1])], headers={"authorization": "Bearer s3cret"})


@pytest.fixture
def slow(tmp_path):
    python_pool(tmp_path, [("slow_by_x", {"seconds": 1.0, "log": str(tmp_path / "calls")}), ("by_x", {})])
    (tmp_path / "policy.json").write_text(two_model_policy().to_json())
    one = Command(tmp_path, "--port", "0", "--grpc-port", "0", "--local")
    yield one
    one.kill()


def test_a_deadline_and_a_cancelled_call_end_their_requests_and_a_signal_answers_what_is_open(slow, tmp_path):
    with ThreadPoolExecutor(1) as pool, over_grpc.InferenceServerClient(slow.said["grpc"]) as client:
        x, ended = tensor(over_grpc, "x", np.array([9.0]), "FP64"), Event()
        with pytest.raises(InferenceServerException) as caught:
            client.infer("test", [x], client_timeout=0.3)
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        context = client.async_infer("test", [x], callback=lambda result, error: ended.set())
        time.sleep(0.1)
        context.cancel()
        assert ended.wait(60)
        until(lambda: 'status="499"} 2.0' in http("GET", f"{slow.url}/metrics")[1].decode())
        n_calls = len((tmp_path / "calls").read_text())
        answer = pool.submit(client.infer, "test", [x])
        until(lambda: len((tmp_path / "calls").read_text()) > n_calls)
        code, out, err = slow.ended(15)
        assert answer.result(60).as_numpy("prediction").shape == (1,)
    assert (code, out) == (0, "")
    assert sorted(json.loads(line)["status"] for line in err.splitlines()) == [200, 499, 499]


def test_on_ray_it_is_not_opened_to_all_networks_unasked(chain):
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        cauc_ray.serve(chain.pool, chain.policies["rf"], port=0, grpc_port=0)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_session")
def test_an_unmodified_client_is_answered_by_serves_proxy(chain):
    """As by a local service: every call, refusals with their codes, deadlines; without Serve's own metadata."""
    more = {"host": "0.0.0.0", "port": 0, "grpc_port": 0, "name": "six"}
    with (
        cauc_ray.serve(chain.pool, chain.policies["rf"], **more) as service,
        over_grpc.InferenceServerClient(service.grpc) as client,
    ):
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("six")
        assert client.get_server_metadata().name == "cauc-ray"
        assert [one.name for one in client.get_model_metadata("six").inputs] == ["example_id"]
        wanted = [over_grpc.InferRequestedOutput(name) for name in ("prediction", "confidence", "stage")]
        result = client.infer("six", [ids_of(over_grpc, chain.ids)], outputs=wanted)
        expected = chain.expected("rf")
        assert np.array_equal(result.as_numpy("prediction"), expected.predictions)
        assert np.array_equal(result.as_numpy("stage"), expected.stages)
        assert np.array_equal(result.as_numpy("confidence"), expected.confidences.astype(np.float32))
        one = [ids_of(over_grpc, chain.ids[:1])]
        for code, asked in {
            "NOT_FOUND": lambda: client.infer("seven", one),
            "INVALID_ARGUMENT": lambda: client.infer("six", one, parameters={"max_stage": 9}),
            "DEADLINE_EXCEEDED": lambda: client.infer("six", one, client_timeout=0.0005),
        }.items():
            with pytest.raises(InferenceServerException) as caught:
                asked()
            assert caught.value.status() == f"StatusCode.{code}"
            assert "Traceback" not in caught.value.message()
        client.infer("six", one)
