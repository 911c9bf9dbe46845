"""Servers that speak OpenAI's completions protocol: one with a language model, and one that follows a script."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from language_models import Loaded
from scipy.special import log_softmax


class Fault:
    """An answer that is none: a status with a body, or without a status the end of the connection."""

    def __init__(self, status: int | None = None, body: Any = None, **headers: str) -> None:
        self.status = status
        self.body = body
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


class CompletionServer(ThreadingHTTPServer):
    """Answers each request with JSON or a fault."""

    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.lock = threading.Lock()

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any] | Fault:
        """Return the answer to a request; headers have names in lower case."""
        raise NotImplementedError


# What to answer to a prompt that was asked so many times before: JSON, or a fault.
Script = Callable[[str, int], "dict[str, Any] | Fault"]


class ScriptedServer(CompletionServer):
    """Answers as its script says, and notes what it was asked and how many requests it held at once."""

    def __init__(self, script: Script, hold_s: float) -> None:
        super().__init__()
        self.script = script
        self.hold_s = hold_s
        self.asked: Counter[str] = Counter()
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.n_in_flight = 0
        self.most_in_flight = 0

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any] | Fault:
        if path == "/tokenize":  # a server without it, as most are
            return Fault(404, {"detail": "Not Found"})
        prompt = _text(body.get("prompt") or body.get("input") or body.get("state") or body.get("messages"))
        with self.lock:
            before = self.asked[prompt]
            self.asked[prompt] += 1
            self.requests.append((path, headers, body))
            self.n_in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.n_in_flight)
        time.sleep(self.hold_s)
        reply = self.script(prompt, before)
        with self.lock:
            self.n_in_flight -= 1
        return reply


def _text(prompt: Any) -> str:
    """Return the text of a prompt, of the last of several messages, or of the last part of one."""
    while not isinstance(prompt, str):
        prompt = prompt[-1] if isinstance(prompt, list) else prompt.get("content") or prompt["text"]
    return prompt


class LanguageServer(CompletionServer):
    """Answers with the one token that a language model continues with, and its true log-probabilities.

    scores_tokens: as vLLM's server does, tokenise texts and chats, and score given tokens.
    """

    def __init__(self, model: Loaded, scores_tokens: bool = False) -> None:
        super().__init__()
        self.model = model
        self.scores_tokens = scores_tokens
        self.n_context = model.network.config.max_position_embeddings

    def reply(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any] | Fault:
        chat = path == "/v1/chat/completions"
        if path == "/tokenize" and self.scores_tokens:
            tokens = self._tokens(body)
            texts = self.model.tokenizer.convert_ids_to_tokens(tokens)
            return {"tokens": tokens} | ({"token_strs": texts} if body.get("return_token_strs") else {})
        if not chat and path != "/v1/completions":
            return Fault(404, {"error": {"message": f"there is no {path}"}})
        if body.get("max_tokens") != 1 or body.get("temperature") != 0:
            return _invalid("this server answers with the likeliest token only", "max_tokens")
        tokens = self._tokens(body)
        if len(tokens) >= self.n_context:
            message = f"This model's maximum context length is {self.n_context} tokens, your prompt has {len(tokens)}."
            return _invalid(message, "messages" if chat else "prompt")
        usage = {"prompt_tokens": len(tokens), "completion_tokens": 1, "total_tokens": len(tokens) + 1}
        with self.lock:
            following = log_softmax(self.model.logits(tokens)[-1].astype("float64"))
        n_top = body.get("top_logprobs") if chat else body.get("logprobs")
        ended = int(following.argmax()) == self.model.tokenizer.eos_token_id
        asked = body.get("logprob_token_ids") if self.scores_tokens else None
        if asked and len(asked) > 128:
            return _invalid("at most 128 tokens can be scored at once", "logprob_token_ids")
        likeliest = asked or ([] if ended else following.argsort()[::-1][: n_top or 0])
        names = "token_id:{}".format if asked else lambda token: self.model.tokenizer.decode([token])
        top = [(names(token), float(following[token])) for token in likeliest]
        return {"choices": [_choice(top, chat)], "usage": usage}

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        tokenizer = self.model.tokenizer
        if "messages" in body:
            settings = {"add_generation_prompt": True, **body.get("chat_template_kwargs", {})}
            settings |= {
                name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body
            }
            text = tokenizer.apply_chat_template(body["messages"], tokenize=False, **settings)
            return list(tokenizer.encode(text, add_special_tokens=False))
        return list(body["prompt"] if isinstance(body["prompt"], list) else tokenizer.encode(body["prompt"]))


def _choice(top: list[tuple[str, float]], chat: bool) -> dict[str, Any]:
    """Return an answer of one token with the likeliest ones, as the chat or the completions endpoint has it."""
    text = top[0][0] if top else ""
    if chat:
        return _chat_choice(text, top)
    likeliest: dict[str, float] = {}
    for token, logprob in top:  # tokens that are parts of a character are all written alike
        likeliest.setdefault(token, logprob)
    return {"text": text, "logprobs": {"top_logprobs": [likeliest] if top else []}}


def _chat_choice(text: str, top: list[tuple[str, float]]) -> dict[str, Any]:
    listed = [{"token": token, "logprob": logprob} for token, logprob in top]
    content = [{**listed[0], "top_logprobs": listed}] if listed else []
    return {"message": {"role": "assistant", "content": text}, "logprobs": {"content": content}}


def _invalid(message: str, param: str) -> Fault:
    return Fault(400, {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": None}})


@contextmanager
def running(server: CompletionServer) -> Iterator[None]:
    """Serve for the length of the block."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def scripted_server(script: Script, hold_s: float = 0.0) -> Iterator[ScriptedServer]:
    """Serve a script, holding each request for hold_s seconds."""
    server = ScriptedServer(script, hold_s)
    with running(server):
        yield server


@contextmanager
def language_server(model: Loaded, *, scores_tokens: bool = False) -> Iterator[str]:
    """Serve a language model and give the server's base_url."""
    server = LanguageServer(model, scores_tokens)
    with running(server):
        yield server.url


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: CompletionServer

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"]))
        if not text:  # the client gave up in between
            self.close_connection = True
            return
        reply = self.server.reply(self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(text))
        with suppress(ConnectionError):  # a client that waits no longer
            self._send(reply)

    def _send(self, reply: dict[str, Any] | Fault) -> None:
        fault = reply if isinstance(reply, Fault) else Fault(200, reply)
        if fault.status is None:
            self.close_connection = True
            return
        body = fault.body if isinstance(fault.body, str | bytes) else json.dumps(fault.body)
        content = body.encode() if isinstance(body, str) else body
        self.send_response(fault.status)
        for name, value in {"content-type": "application/json", **fault.headers}.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def chat_answer(probabilities: dict[str, float], n_prompt: int = 100) -> dict[str, Any]:
    """Return a chat answer of one token with the log of these probabilities."""
    top = [(token, math.log(p)) for token, p in probabilities.items()]
    usage = {"prompt_tokens": n_prompt, "completion_tokens": 1, "total_tokens": n_prompt + 1}
    return {"choices": [_chat_choice("A", top)], "usage": usage}
