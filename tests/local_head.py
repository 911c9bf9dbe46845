"""A Ray head of this machine with the Jobs API, in processes of its own, for tests that submit jobs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

START_DEADLINE_S = 120


@dataclass(frozen=True)
class Head:
    """A running head.

    Attributes:
        address: URL of its dashboard.
        gcs_address: Address to join it at.
        metrics_port: Port of its node's metrics.
        folder: Folder of all that it writes.
    """

    address: str
    gcs_address: str
    metrics_port: int
    folder: str


@contextmanager
def local_head(*, n_cpus, grows_by=None, **environment):
    """Start a head with free ports and a folder of its own, and yield where it is.

    grows_by: the resources of nodes that Ray's autoscaler starts where something asks for them (their processes run on
    this machine).   environment: of the head's processes.
    """
    folder = tempfile.mkdtemp(prefix="h", dir="/tmp")  # short: sockets lie below it
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    address = f"http://127.0.0.1:{ports['dashboard-port']}"
    words = [f"--{name}={port}" for name, port in ports.items()]
    words += ["--head", "--block", f"--num-cpus={n_cpus}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
    words += ["--node-ip-address=127.0.0.1", "--object-store-memory=200000000"]
    bin_ = str(Path(sys.executable).parent)
    env = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    if grows_by is not None:
        config = Path(folder, "autoscaling.json")
        config.write_text(json.dumps(autoscaling(f"127.0.0.1:{ports['port']}", n_cpus, grows_by)))
        words.append(f"--autoscaling-config={config}")
        environment |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    env |= {"RAY_TMPDIR": folder, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", **environment}
    log = Path(folder, "head.log")
    with log.open("w") as out:
        head = subprocess.Popen(
            [f"{bin_}/ray", "start", *words], env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_for(lambda: answers(address, head, log), START_DEADLINE_S, "the head")
        yield Head(address, f"127.0.0.1:{ports['port']}", ports["metrics-export-port"], folder)
    finally:
        stop(head)
        shutil.rmtree(folder, ignore_errors=True)


def autoscaling(gcs_address, n_cpus, grows_by):
    """Return the config of an autoscaler whose groups of nodes are at zero and may have one each."""
    nothing = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands")
    nothing += ("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files")
    return {
        "cluster_name": "growing",
        "max_workers": len(grows_by),
        "idle_timeout_minutes": 60,
        "provider": {"type": "fake_multinode", "gcs_address": gcs_address, "disable_node_updaters": True},
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": n_cpus}, "node_config": {}, "max_workers": 0},
            **{
                f"group{number}": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 1}
                for number, resources in enumerate(grows_by)
            },
        },
        **{name: [] for name in nothing},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
    }


PORTS = (
    "port",
    "dashboard-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
    "node-manager-port",
    "object-manager-port",
    "ray-client-server-port",
)


def answers(address, head, log):
    """Say whether the Jobs API answers, be it that it wants a token."""
    assert head.poll() is None, log.read_text()
    try:
        urllib.request.urlopen(f"{address}/api/jobs/", timeout=10).close()
    except urllib.error.HTTPError as error:
        with error:
            return error.code == 401
    except OSError:
        return False
    return True


def stop(head):
    """End a head and all that it has started."""
    processes = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
    head.terminate()
    psutil.wait_procs(processes, timeout=3)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    head.wait(timeout=20)


def wait_for(what, seconds, name):
    """Wait until something is there, and return it."""
    ends = time.monotonic() + seconds
    while not (result := what()):
        assert time.monotonic() < ends, f"{name} did not arrive within {seconds} s"
        time.sleep(0.1)
    return result


def free_ports(n):
    """Return ports that nobody listens on."""
    with ExitStack() as held:
        listeners = [held.enter_context(socket.socket()) for _ in range(n)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in listeners]
