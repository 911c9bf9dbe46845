"""Servers that speak OpenAI's completions protocol: a real one with a real model, and one that does as told."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

READY_DEADLINE_S = 60.0


@contextmanager
def llama_server(model: Path, log: Path) -> Iterator[str]:
    """Serve a GGUF file with llama.cpp and give the server's base_url."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(model), "--n_ctx", "2048"]
    command += ["--logits_all", "true", "--host", "127.0.0.1", "--port", str(port), "--n_threads", "2"]
    url = f"http://127.0.0.1:{port}/v1"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            _wait_until_ready(f"{url}/models", process, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_DEADLINE_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server is not ready: {log.read_text()[-2000:]}")


class Fault:
    """An answer that is none: a status with a body, or without a status the end of the connection."""

    def __init__(self, status: int | None = None, body: Any = None, **headers: str) -> None:
        self.status = status
        self.body = body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


# What to answer to a prompt that was asked so many times before: JSON, or a fault.
Script = Callable[[str, int], "dict[str, Any] | Fault"]


class ScriptedServer(ThreadingHTTPServer):
    """Answers as its script says, and notes what it was asked and how many requests it held at once."""

    request_queue_size = 64

    def __init__(self, script: Script, hold_s: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.hold_s = hold_s
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.lock = threading.Lock()
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.n_in_flight = 0
        self.most_in_flight = 0


@contextmanager
def scripted_server(script: Script, hold_s: float = 0.0) -> Iterator[ScriptedServer]:
    """Serve a script, holding each request for hold_s seconds."""
    server = ScriptedServer(script, hold_s)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        with server.lock:
            before = server.asked[prompt]
            server.asked[prompt] += 1
            server.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}, body))
            server.n_in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.n_in_flight)
        time.sleep(server.hold_s)
        reply = server.script(prompt, before)
        with server.lock:
            server.n_in_flight -= 1
        with suppress(ConnectionError):  # a client that waits no longer
            self._send(reply)

    def _send(self, reply: dict[str, Any] | Fault) -> None:
        fault = reply if isinstance(reply, Fault) else Fault(200, reply)
        if fault.status is None:
            self.close_connection = True
            return
        text = fault.body if isinstance(fault.body, str) else json.dumps(fault.body)
        self.send_response(fault.status)
        for name, value in {"content-type": "application/json", **fault.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def chat_answer(probabilities: dict[str, float], n_prompt: int = 100) -> dict[str, Any]:
    """Return a chat answer of one token with the log of these probabilities."""
    top = [{"token": token, "logprob": math.log(p), "bytes": None} for token, p in probabilities.items()]
    content = [{"token": next(iter(probabilities)), "logprob": 0.0, "bytes": None, "top_logprobs": top}]
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "A"}, "logprobs": {"content": content}}],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": 1, "total_tokens": n_prompt + 1},
    }
