"""Serve something on the cluster whose Ray client listens on a port, until stdin ends.

Arguments: the client's port, Serve's HTTP port, how many nodes to wait for, a file to make once Serve answers.
"""

import sys
import time
from pathlib import Path

import ray
from ray import serve


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Something:
    """Answers whatever is asked."""

    async def __call__(self, request):
        return "something"


if __name__ == "__main__":
    client, http, n_nodes = map(int, sys.argv[1:4])
    ray.init(f"ray://127.0.0.1:{client}", logging_level="ERROR")
    deadline = time.monotonic() + 60
    while sum(node["Alive"] for node in ray.nodes()) < n_nodes:
        if time.monotonic() > deadline:
            sys.exit("the cluster's nodes did not come")
        time.sleep(0.2)
    serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": http})
    serve.run(Something.bind())
    Path(sys.argv[4]).touch()
    sys.stdin.read()
