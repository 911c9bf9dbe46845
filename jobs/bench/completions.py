"""A server of chat completions that says nothing of interest and takes its time."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import zlib

from aiohttp import web

# What an answer takes, in seconds, by chance.
ANSWER_S = (0.02, 0.06)


async def answer(request: web.Request) -> web.Response:
    """Answer with log-probabilities of four letters that depend on the question alone."""
    text = (await request.json())["messages"][0]["content"]
    of_text = random.Random(zlib.crc32(text.encode()))
    await asyncio.sleep(of_text.uniform(*ANSWER_S))
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


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    listener = socket.create_server(("127.0.0.1", 0))
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    web.run_app(app, sock=listener, print=None)
