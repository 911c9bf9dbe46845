"""A server that takes the Open Inference Protocol to the letter, as Triton does, with names of its own."""

from __future__ import annotations

import json
import struct
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


def logits_of(numbers, titles):
    """Return the logits of rows: two numbers, and how long their titles are in UTF-8, float16 (n, 3)."""
    lengths = [len(title.encode()) for title in titles]
    return np.column_stack([numbers, lengths]).astype(np.float16)


@dataclass
class StrictServer:
    """faults: what the next requests for inference get instead of an answer, each a status and headers.

    answers: makes logits of numbers and titles.   asked: of each request for inference, its headers, its parameters and
    its number of rows.   n_rows: that were answered.
    """

    answers: object = logits_of
    metadata: dict = field(default_factory=lambda: METADATA)
    refuses: str | None = None
    faults: list = field(default_factory=list)
    asked: list = field(default_factory=list)
    n_rows: int = 0
    url: str = ""

    def infer(self, headers, body):
        length = int(headers["Inference-Header-Content-Length"])
        message = json.loads(body[:length])
        assert headers["Content-Type"] == "application/octet-stream"
        assert message["outputs"] == [{"name": "OUTPUT__0", "parameters": {"binary_data": True}}]
        assert [one["name"] for one in message["inputs"]] == ["INPUT__0", "TITLE"]
        raw, parts = body[length:], []
        for one in message["inputs"]:
            size = one["parameters"]["binary_data_size"]
            parts.append(raw[:size])
            raw = raw[size:]
        assert not raw
        n = message["inputs"][0]["shape"][0]
        assert [one["shape"] for one in message["inputs"]] == [[n, 2], [n, 1]]
        assert [one["datatype"] for one in message["inputs"]] == ["FP32", "BYTES"]
        self.asked.append((headers, message.get("parameters"), n))
        if self.faults:
            return self.faults.pop(0)
        titles, at = [], 0
        while at < len(parts[1]):
            (size,) = struct.unpack_from("<I", parts[1], at)
            titles.append(parts[1][at + 4 : at + 4 + size].decode())
            at += 4 + size
        if self.refuses in titles:
            return 400, {}
        self.n_rows += n
        logits = self.answers(np.frombuffer(parts[0], "<f4").reshape(n, 2), titles)
        output = {"name": "OUTPUT__0", "datatype": "FP16", "shape": list(logits.shape)}
        output["parameters"] = {"binary_data_size": logits.nbytes}
        text = json.dumps({"model_name": "net", "model_version": "1", "outputs": [output]}).encode()
        return 200, {"Inference-Header-Content-Length": str(len(text))}, text + logits.tobytes()


@contextmanager
def strict_server(**settings):
    """Serve at a port for the length of the block."""
    server = StrictServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def send(self, status, headers, body=b'{"error": "not\\nnow"}'):
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            pages = {"/v2": {"name": "triton", "extensions": ["binary_tensor_data"]}, "/v2/models/net": server.metadata}
            content = pages.get(self.path)
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
