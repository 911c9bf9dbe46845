"""A server of chat completions and of decisions whose answers are random and take their time."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import zlib

from aiohttp import web

# Least and most seconds of an answer.
ANSWER_S = (0.02, 0.06)


async def thought(text: str) -> random.Random:
    """Take the time of an answer, and return random numbers that depend on the question alone."""
    of_text = random.Random(zlib.crc32(text.encode()))
    await asyncio.sleep(of_text.uniform(*ANSWER_S))
    return of_text


async def complete(request: web.Request) -> web.Response:
    """Answer with log-probabilities of four letters."""
    of_text = await thought((await request.json())["messages"][0]["content"])
    top = [{"token": letter, "logprob": -1 - of_text.random(), "bytes": None} for letter in "ABCD"]
    content = [{**top[0], "top_logprobs": top}]
    choice = {
        "index": 0,
        "finish_reason": "length",
        "message": {"role": "assistant", "content": "A"},
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    )


async def decide(request: web.Request) -> web.Response:
    """Answer with a probability for each choice."""
    asked = await request.json()
    of_text, choices = await thought(asked["input"]), [one["value"] for one in asked["questions"][0]["choices"]]
    weights = [of_text.random() for _ in choices]
    listed = [{"value": c, "probability": weight / sum(weights)} for c, weight in zip(choices, weights, strict=True)]
    best = max(listed, key=lambda choice: choice["probability"])
    answer = {"type": "choice", "choice": best["value"], "confidence": best["probability"], "probabilities": listed}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    return web.json_response({"id": "1", "object": "decision", "model": "m", "answers": [answer], "usage": usage})


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_post("/v1/decisions", decide)
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    web.run_app(app, sock=listener, print=None)
