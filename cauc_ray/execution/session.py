"""Ray sessions: joined when there is one, started and ended when there is none; what models print in them."""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError

from cauc_ray.errors import ConfigError, ExecutionError, first_line

REACH_DEADLINE_S = 10.0
# For a task that asks whether the nodes of a cluster use tokens.
ASK_DEADLINE_S = 60.0
# A session of this machine claims so many logical CPUs for each core at most: every replica is a process.
MOST_CPUS_PER_CORE = 128
# What models print takes so long to arrive.
OUTPUT_S = 0.3
_HOST_AND_PORT = re.compile(r"[^/\s]+:[0-9]+")
# Has what models print, as INFO: a line begins with its stage.
logger = logging.getLogger("cauc_ray.output")
# What the names of stages' workers begin with on Ray, and what Serve makes of its replicas' names.
STAGE = "stage "
_SERVED = re.compile(r"ServeReplica:.*:stage:(.+)")
# What Serve logs for its own log files; warnings and errors are reported here too.
_SERVE_LOG = re.compile(r"(INFO|DEBUG) \d{4}-\d\d-\d\d ")


def runs_here(address: str | None) -> bool:
    """Return whether `ray_session` would start a session of this machine's own."""
    return not ray.is_initialized() and _address(address) == "local"


def _address(address: str | None) -> str:
    """Return the address of the session to use. Raises ConfigError for one of another kind, as ray:// and http://."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address in ("local", "auto") or _HOST_AND_PORT.fullmatch(address):
        return address
    raise ConfigError(
        f"address {address!r} is not that of a Ray cluster: give HOST:PORT of its head node, auto for the cluster of "
        "this machine, or local for a new session"
    )


@contextmanager
def ray_session(address: str | None, n_cpus: float) -> Iterator[None]:
    """Use the Ray session of this process, or connect one for the length of the block.

    address: of a cluster; without it the one that RAY_ADDRESS names (as Ray jobs set it), else a session of
    this machine's own, whose count of logical CPUs is n_cpus if that is more than it has, within reason.
    Raises ConfigError when this process is connected to another cluster, or when the cluster's tokens and this
    process's do not agree; ExecutionError when the cluster cannot be reached.
    """
    if ray.is_initialized():
        _require_same(address)
        yield
        return
    address = _address(address)
    options: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.ERROR}
    if address == "local":
        # Ray 2.60 shows every GPU to actors that asked for none by default.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        keep_store_free()
        n_cores = os.cpu_count() or 1
        claimed = min(max(n_cores, math.ceil(n_cpus)), MOST_CPUS_PER_CORE * n_cores)
        options |= {"num_cpus": claimed, "include_dashboard": False}
    else:
        _require_reachable(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **options)
    except Exception as error:  # of many types: a node that is late raises Exception itself
        what = "Ray does not start on this machine" if address == "local" else f"no Ray cluster at {address!r}"
        remedy = "; a busy machine can be too slow for Ray: try again" if "timed out" in str(error) else ""
        raise ExecutionError(f"{what}: {first_line(error).rstrip('.')}{remedy}") from error
    if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own prints a stack and ends all processes at once
    try:
        if address != "local":
            _require_tokens_there(address)
        with model_output():
            yield
            time.sleep(OUTPUT_S)
    finally:
        ray.shutdown()


def _require_same(address: str | None) -> None:
    """Raise ConfigError if an address is not that of the session that this process has."""
    if address in (None, "local", "auto"):
        return
    joined = ray.get_runtime_context().gcs_address
    if _resolved(address) & _resolved(joined):
        return
    raise ConfigError(
        f"this process is connected to the Ray cluster at {joined!r}, not to {address!r}: call ray.shutdown() first, "
        "or leave out the address"
    )


def _resolved(address: str) -> set[tuple[str, str]]:
    """Return the IP addresses that a host has, each with the port; this machine's own also stand for its loopback."""
    host, _, port = address.rpartition(":")
    try:
        hosts = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), None)}
    except (OSError, UnicodeError):
        hosts = {host}
    if hosts & {"127.0.0.1", "::1"}:
        hosts |= {"127.0.0.1", "::1", ray.util.get_node_ip_address()}
    return {(name, port) for name in hosts}


def keep_store_free() -> None:
    """Have a Ray session that this process starts drop unneeded objects within a tenth of a second.

    Ray's second lets a small store fill with what is already released, and spill it to disk.
    """
    os.environ.setdefault("RAY_free_objects_period_milliseconds", "100")


def _require_reachable(address: str) -> None:
    """Raise ExecutionError where nothing listens: Ray would end the whole process after a long wait.

    Raises ConfigError where tokens do not agree.
    """
    if address == "auto":
        return  # Ray looks for a cluster of this machine and raises if there is none
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_DEADLINE_S).close()
    except (OSError, UnicodeError) as error:
        raise ExecutionError(f"no Ray cluster at {address!r}: {getattr(error, 'strerror', None) or error}") from error
    if _sends_token() and not _has_token():
        raise ConfigError(
            "RAY_AUTH_MODE is token, but no token is set: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to its file; or "
            "RAY_AUTH_MODE=disabled for a cluster without tokens"
        )
    if _refuses_token(address):
        remedy = "set RAY_AUTH_TOKEN to the cluster's own, or RAY_AUTH_TOKEN_PATH to its file"
        if _sends_token():
            raise ConfigError(f"the Ray cluster at {address!r} refuses this token: {remedy}")
        remedy = "" if _has_token() else f", and {remedy}"
        raise ConfigError(f"the Ray cluster at {address!r} asks for a token: set RAY_AUTH_MODE=token{remedy}")


def _sends_token() -> bool:
    """Return whether this process sends Ray's token: Ray itself sets the variable where it turns tokens on."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _has_token() -> bool:
    """Return whether Ray finds a token, in the order in which it looks for one."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_ENABLE_K8S_TOKEN_AUTH"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return (Path(path) if path else Path.home() / ".ray" / "auth_token").is_file()


def _refuses_token(address: str) -> bool:
    """Return whether a cluster's head refuses this process for its token, or because it sends none.

    Ray 2.60 would try for twenty seconds, with a line of log for each try, and then not name the cause. It has no
    public question for this: its client is given the id of no cluster, which the head refuses after the token.
    """
    try:
        ray._raylet.GcsClient(address=address, cluster_id="00" * 28).check_alive([], timeout=REACH_DEADLINE_S)
    except AuthenticationError as error:
        return "InvalidAuthToken" in str(error)
    except Exception:  # another Ray may have no such client, or the head another fault: ray.init reports it
        return False
    return False


def _require_tokens_there(address: str) -> None:
    """Raise ConfigError where this process uses tokens and the cluster's nodes use none.

    The head takes such a process, but the actors that it starts die: they cannot answer it.
    """
    if not _sends_token():
        return
    try:
        mode = ray.get(ray.remote(num_cpus=0)(os.getenv).remote("RAY_AUTH_MODE"), timeout=ASK_DEADLINE_S)
    except GetTimeoutError:
        return  # no node has started a process yet; nothing is known
    except RayError as error:
        raise ExecutionError(f"the Ray cluster at {address!r} runs no task for this process: {error}") from error
    if (mode or "").lower() != "token":
        raise ConfigError(
            f"the Ray cluster at {address!r} uses no tokens, but RAY_AUTH_MODE is token here: set "
            "RAY_AUTH_MODE=disabled"
        )


@contextmanager
def model_output() -> Iterator[None]:
    """Log what models print on the current Ray session, which must send it to its driver, in place of Ray's own print.

    Ray 2.60 writes what replicas print to standard output, which is for results, with process ids.
    """
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler(logger.name, log_output)
    try:
        yield
    finally:
        dispatcher.remove_handler(logger.name)


def log_output(batch: Mapping[str, Any]) -> None:
    """Log the lines of a batch as Ray sends it if a stage printed them; progress bars are left out."""
    name = batch.get("actor_name") or ""
    if served := _SERVED.fullmatch(name):
        name = f"{STAGE}{served[1]!r}"
    if not name.startswith(STAGE):
        return
    for line in batch["lines"]:
        if line.strip() and "\r" not in line and not (served and _SERVE_LOG.match(line)):
            logger.info("%s: %s", name, _plain(line))


def _plain(line: str) -> str:
    """Return a line without colours and other terminal control sequences."""
    return "".join(sign for sign in re.sub(r"\x1b\[[\d;]*[A-Za-z]", "", line) if sign.isprintable() or sign == "\t")
