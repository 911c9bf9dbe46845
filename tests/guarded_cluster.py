"""A head and a node of Ray in processes of their own, with a token, TLS and Serve, and what they listen on."""

import datetime
import ipaddress
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
from port_table import ROWS

DEADLINE_S = 90
N_NODES = 2


def free_ports(n):
    """Return n ports of the system's choice, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(n)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def free_range(n):
    """Return the first of n ports below the system's own range that nobody listens on."""
    taken = {each.laddr.port for each in psutil.net_connections("tcp") if each.laddr}
    starts = [s for s in range(24100, 32000, n) if not taken & set(range(s, s + n))]
    return secrets.choice(starts)


def certificate(folder, addresses):
    """Write a key and a certificate that signs itself for these addresses, with the days that a test needs."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ray")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
    made = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(secret)
    (folder / "certificate.pem").write_bytes(made.public_bytes(pem))


class Guarded:
    """A head and a node with a token, TLS and Serve, each port chosen by what the table says sets it."""

    def __init__(self, folder: Path) -> None:
        from ray.util import get_node_ip_address

        self.address = get_node_ip_address()
        self.folder = folder
        self.token = secrets.token_hex(32)
        (folder / "token").write_text(self.token)
        certificate(folder, {"127.0.0.1", self.address})
        metrics = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
        self.shared = dict(zip([*metrics, "http_options.port"], free_ports(3), strict=True))
        self.environment = {
            **os.environ,
            **{name: str(self.shared[name]) for name in metrics},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
            "RAY_TMPDIR": str(folder),
            "RAY_USE_TLS": "1",
            "RAY_TLS_SERVER_CERT": str(folder / "certificate.pem"),
            "RAY_TLS_SERVER_KEY": str(folder / "key.pem"),
            "RAY_TLS_CA_CERT": str(folder / "certificate.pem"),
        }
        self.environment.pop("RAY_ADDRESS", None)
        self.processes: list[subprocess.Popen] = []
        self.ports: dict[str, dict[str, tuple[int, int]]] = {}  # node -> what sets it -> (first, last)

    def start(self):
        only_heads = {"--port", "--dashboard-port", "--ray-client-server-port"}
        options = [name for row in ROWS.values() for name in row.options if name != "--max-worker-port"]
        self._node("head", options, "--head", "--dashboard-host=127.0.0.1")
        gcs = self.ports["head"]["--port"][0]
        self._until(lambda: self._answers(self.ports["head"]["--dashboard-port"][0]))
        self._node("node", [name for name in options if name not in only_heads], f"--address={self.address}:{gcs}")
        self._serve()

    def _node(self, name, options, *more):
        self.ports[name] = {
            option: (port, port) for option, port in zip(options, free_ports(len(options)), strict=True)
        }
        first = free_range(50)
        self.ports[name]["--min-worker-port"] = (first, first + 49)
        chosen = [f"{option}={ports[0]}" for option, ports in self.ports[name].items()]
        fixed = [f"--max-worker-port={first + 49}", f"--node-ip-address={self.address}", "--num-cpus=2", "--block"]
        self._run(name, "-m", "ray.scripts.scripts", "start", *more, *chosen, *fixed)

    def _run(self, name, *arguments):
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, *map(str, arguments)]
            how = {"env": self.environment, "cwd": self.folder, "stdin": subprocess.PIPE, "stdout": log, "stderr": log}
            self.processes.append(subprocess.Popen(command, **how))

    def _serve(self):
        client, http = self.ports["head"]["--ray-client-server-port"][0], self.shared["http_options.port"]
        ready = self.folder / "ready"
        self._run("serve", Path(__file__).with_name("serve_something.py"), client, http, N_NODES, ready)
        self._until(ready.is_file)

    def _until(self, happens):
        deadline = time.monotonic() + DEADLINE_S
        while not happens():
            ended = [one.args[1:4] for one in self.processes if one.poll() is not None]
            if ended or time.monotonic() > deadline:
                told = [*self.folder.glob("*.log"), *self.folder.glob("ray/session_2*/logs/*.err")]
                logs = "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in told if path.stat().st_size)
                raise AssertionError(f"ended: {ended}\n{logs}")
            time.sleep(0.2)

    def _answers(self, port):
        try:
            return self.http(port, "/api/version", token=True) == 200
        except OSError:
            return False

    def http(self, port, path, *, token, host="127.0.0.1", data=None):
        headers = {"Authorization": f"Bearer {self.token}"} if token else {}
        request = urllib.request.Request(f"http://{host}:{port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    def grpc(self, port, method, *, token, certified=True):
        """Return the status's name of a call with nothing in it."""
        import grpc

        root, key = ((self.folder / name).read_bytes() for name in ("certificate.pem", "key.pem"))
        own = {"private_key": key, "certificate_chain": root} if certified else {}
        metadata = [("authorization", f"Bearer {self.token}")] if token else []
        with grpc.secure_channel(f"127.0.0.1:{port}", grpc.ssl_channel_credentials(root, **own)) as channel:
            try:
                channel.unary_unary(method)(b"", timeout=10, metadata=metadata)
            except grpc.RpcError as error:
                return error.code().name
        return "OK"

    def listening(self):
        """Return (node, port, process title) of every port that the cluster's processes listen on."""
        found = set()
        for name, process in zip(self.ports, self.processes, strict=False):
            for child in psutil.Process(process.pid).children(recursive=True):
                try:
                    title = (child.cmdline() or [""])[0]
                    found |= {(name, c.laddr.port, title) for c in child.net_connections("tcp") if c.status == "LISTEN"}
                except psutil.NoSuchProcess:
                    continue
        return found

    def named(self, node, port, title):
        """Return what the table says sets a port; None where it names no such port."""
        known = {**self.ports[node], **{name: (each, each) for name, each in self.shared.items()}}
        known["Ray"] = ROWS["Ray"].ranges[0]
        for name, (first, last) in known.items():
            if first <= port <= last and name in ROWS:
                return name
        return "the system" if title.startswith("ray::ServeReplica") and "the system" in ROWS else None

    def stop(self):
        """End every process of the cluster; a graceful end takes Ray half a minute."""
        parents = [psutil.Process(one.pid) for one in self.processes if one.poll() is None]
        family = [*parents, *(child for one in parents for child in one.children(recursive=True))]
        for each in family:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self.processes:
            process.stdin.close()
            process.wait(20)
        psutil.wait_procs(family, timeout=20)
