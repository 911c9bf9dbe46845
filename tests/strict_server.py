"""A server that takes the Open Inference Protocol to the letter, as Triton does, with names of its own."""

from __future__ import annotations

import json
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import numpy as np

TITLES = {"name": "TITLE", "datatype": "BYTES", "shape": [-1, 1]}
NUMBERS = {"name": "INPUT__0", "datatype": "FP32", "shape": [-1, 2]}
LOGITS = {"name": "OUTPUT__0", "datatype": "FP16", "shape": [-1, 3]}
METADATA = {
    "name": "net",
    "versions": ["1"],
    "platform": "onnxruntime_onnx",
    "inputs": [NUMBERS, TITLES],
    "outputs": [LOGITS],
}
LENGTH = "Inference-Header-Content-Length"


def logits_of(numbers, titles):
    """Return the logits of rows: two numbers, and how long their titles are in UTF-8, float16 (n, 3)."""
    lengths = [len(title.encode()) for title in titles]
    return np.column_stack([numbers, lengths]).astype(np.float16)


@dataclass
class StrictServer:
    """A server and its log.

    Attributes:
        answers: Makes logits of numbers and titles.
        faults: What the next requests for inference get instead of an answer, each a status, headers and maybe a body.
        refuses: A title whose requests are rejected.
        status: Of rejected requests.
        max_batch_size: Larger requests are rejected.
        extensions: Those of /v2, None if there is no such page.
        speaks_binary: Whether raw bytes are taken and written.
        requests: Headers, parameters and number of rows of each request for inference.
        n_rows: Answered rows.
    """

    answers: object = logits_of
    metadata: dict = field(default_factory=lambda: METADATA)
    refuses: str | None = None
    status: int = 400
    faults: list = field(default_factory=list)
    max_batch_size: int = 1000
    extensions: list | None = field(default_factory=lambda: ["binary_tensor_data"])
    speaks_binary: bool = True
    requests: list = field(default_factory=list)
    n_rows: int = 0
    url: str = ""

    def infer(self, headers, body):
        message, raw = json.loads(body[: int(headers.get(LENGTH, len(body)))]), body[int(headers.get(LENGTH, 0)) :]
        assert headers["Content-Type"] == f"application/{'octet-stream' if LENGTH in headers else 'json'}"
        assert self.speaks_binary or LENGTH not in headers
        assert message["outputs"] == [{"name": "OUTPUT__0", "parameters": {"binary_data": True}}]
        n = message["inputs"][0]["shape"][0]
        described = [(tensor["name"], tensor["datatype"], tensor["shape"]) for tensor in message["inputs"]]
        assert described == [("INPUT__0", "FP32", [n, 2]), ("TITLE", "BYTES", [n, 1])]
        numbers, titles = self._read(message["inputs"], raw) if LENGTH in headers else _listed(message["inputs"])
        self.requests.append((headers, message.get("parameters"), n))
        if self.faults:
            return self.faults.pop(0)
        if self.refuses in titles or n > self.max_batch_size:
            return self.status, {}
        self.n_rows += n
        logits = self.answers(np.reshape(numbers, (n, 2)), titles)
        output = {"name": "OUTPUT__0", "datatype": "FP16", "shape": list(logits.shape)}
        if not self.speaks_binary:
            output["data"] = logits.astype(float).ravel().tolist()
            return 200, {}, json.dumps({"model_name": "net", "outputs": [output]}).encode()
        output["parameters"] = {"binary_data_size": logits.nbytes}
        text = json.dumps({"model_name": "net", "model_version": "1", "outputs": [output]}).encode()
        return 200, {LENGTH: str(len(text))}, text + logits.tobytes()

    def _read(self, tensors, raw):
        sizes = [tensor["parameters"]["binary_data_size"] for tensor in tensors]
        assert sum(sizes) == len(raw)
        titles, at = [], sizes[0]
        while at < len(raw):
            (size,) = struct.unpack_from("<I", raw, at)
            titles.append(raw[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return np.frombuffer(raw[: sizes[0]], "<f4"), titles


def _listed(tensors):
    return np.array(tensors[0]["data"], "f4"), tensors[1]["data"]


@contextmanager
def strict_server(**settings):
    """Serve at a port for the length of the block."""
    server = StrictServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *args):
            pass

        def send(self, status, headers, body=b'{"error": "not\\nnow"}'):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            pages = {"/v2/models/net": server.metadata}
            if server.extensions is not None:
                pages["/v2"] = {"name": "triton", "extensions": server.extensions}
            content = pages.get(urlsplit(self.path).path)  # proxies get whole URLs
            self.send(404 if content is None else 200, {}, json.dumps(content or {"error": "unknown model"}).encode())

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send(*server.infer(self.headers, body))

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}"
    threading.Thread(target=http.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
