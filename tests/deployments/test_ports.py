"""The table of ports in deployments/README.md: against the manifests, and against what a cluster listens on."""

import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from chart import KINDS, groups_of, of_kind, rendered
from guarded_cluster import DEADLINE_S, Guarded
from port_table import ROWS

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"


def manifest(name):
    return list(yaml.safe_load_all((DEPLOYMENTS / f"{name}.yaml").read_text()))


def in_table(port):
    return [name for name, row in ROWS.items() if any(first <= port <= last for first, last in row.ranges)]


# --- the manifests ---


@pytest.mark.parametrize("kind", KINDS)
def test_kuberays_nodes_listen_where_the_table_says(kind):
    head, *_ = groups = groups_of(kind)
    for group in groups:
        for option, port in group["rayStartParams"].items():
            assert ROWS[f"--{option}"].ranges == ((int(port), int(port)),)
    declared = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert all(len(in_table(port)) == 1 for port in declared.values())
    # Where KubeRay says nothing else these are its own, by its own names.
    assert declared["gcs-server"] == ROWS["--port"].ranges[0][0]
    assert declared["dashboard"] == ROWS["--dashboard-port"].ranges[0][0]
    assert declared["metrics"] == ROWS["--metrics-export-port"].ranges[0][0]


def test_the_launchers_nodes_listen_where_the_table_says():
    (cluster,) = manifest("cluster")
    for kind in ("head", "worker"):
        (start,) = [line for line in cluster[f"{kind}_start_ray_commands"] if "ray start" in line]
        ports = dict(re.findall(r"(--[a-z-]*port)=(\d+)", start))
        assert all(ROWS[option].ranges == ((int(port), int(port)),) for option, port in ports.items())
        chosen_freely = {"--node-manager-port", "--object-manager-port", "--runtime-env-agent-port"}
        assert chosen_freely | {"--dashboard-agent-grpc-port", "--metrics-export-port"} <= set(ports)
        assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]


def test_rays_own_defaults_are_those_of_the_table():
    from ray.scripts.scripts import start
    from ray.util.client.server import proxier

    defaults = {option.opts[0]: option.default for option in start.params}
    assert ROWS["--min-worker-port"].ranges == ((defaults["--min-worker-port"], defaults["--max-worker-port"]),)
    for option in ("--dashboard-port", "--dashboard-agent-listen-port"):
        assert ROWS[option].ranges[0][0] == defaults[option]
    loopback = (proxier.MIN_SPECIFIC_SERVER_PORT, proxier.MAX_SPECIFIC_SERVER_PORT - 1)
    assert ROWS["Ray"].ranges == (loopback,)
    opened = set(defaults) & {name for row in ROWS.values() for name in row.options}
    listening = {name for name in defaults if name.endswith("-port") or name == "--port"}
    assert opened == listening - {"--redis-shard-ports"}


@pytest.mark.parametrize("values", [{}, {"kind": "cluster"}, {"service": {"grpc": True}}], ids=str)
def test_policies_let_in_whom_the_table_names_and_no_other(values):
    policies = {one["metadata"]["name"]: one["spec"] for one in of_kind(rendered(**values), "NetworkPolicy")}
    nodes, *others = policies["cauc-nodes"]["ingress"]
    assert nodes == {"from": [{"podSelector": policies["cauc-nodes"]["podSelector"]}]}
    opened = set()
    for rule in [*others, *policies["cauc-head"]["ingress"]]:
        (peer,) = rule["from"]
        place = peer.get("namespaceSelector", peer.get("podSelector"))["matchLabels"]
        word = {
            "monitoring": "Prometheus",
            "ingress-nginx": "ingress",
            "kuberay-operator": "operator",
            "RayJob": "submitter",
        }[next(iter(place.values()))]
        for port in rule["ports"]:
            (name,) = in_table(port["port"])
            assert word in ROWS[name].who
            opened.add(port["port"])
    assert (9000 in opened) == ("service" in values)
    scraped = {port["port"] for rule in others for port in rule["ports"] if "monitoring" in str(rule["from"])}
    assert scraped == {row.ranges[0][0] for row in ROWS.values() if row.who == "Prometheus"}


def test_the_monitor_scrapes_the_ports_that_ask_for_no_token():
    services = {one["metadata"]["name"]: one["spec"]["ports"] for one in of_kind(rendered(), "Service")}
    scraped = {port["port"] for port in services["cauc-metrics"]}
    assert scraped == {row.ranges[0][0] for row in ROWS.values() if row.who == "Prometheus"}


# --- a head and a node ---


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("cryptography")
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as folder:  # short: a socket's path has 107 bytes
        guarded = started(Path(folder))
        try:
            yield guarded
        finally:
            guarded.stop()


def started(folder):
    """Start a head and a node; anew where a busy machine takes longer than the 30 s that Ray waits for a node."""
    for attempt in "12":
        with suppress(AssertionError):
            return one_started(folder / attempt)
    return one_started(folder / "3")


def one_started(folder):
    folder.mkdir()
    guarded = Guarded(folder)
    try:
        guarded.start()
    except BaseException:
        guarded.stop()
        raise
    return guarded


def opened_here():
    """Return what sets the ports of rows that Ray opens unasked, and Serve's."""
    asked_for = {"the machine", "grpc_options.port"}
    return {name for name in ROWS if name not in asked_for and not name.startswith("RAY_SERVE")}


@pytest.mark.slow
def test_every_port_that_a_cluster_listens_on_is_named(cluster):
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found = cluster.listening()
        names = {cluster.named(*each) for each in found}
        if opened_here() <= names or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert [each for each in found if cluster.named(*each) is None] == []
    assert names == opened_here()  # and the table names none that is not there


# What asks each port for something that it gives to those alone who may have it.
CALLS = {
    "--port": "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "--node-manager-port": "/ray.rpc.NodeManagerService/GetNodeStats",
    "--object-manager-port": "/ray.rpc.ObjectManagerService/Pull",
    "--dashboard-agent-grpc-port": "/ray.rpc.ReporterService/GetTraceback",
    "--ray-client-server-port": "/ray.rpc.RayletDriver/ClusterInfo",
    "Ray": "/ray.rpc.RayletDriver/ClusterInfo",
    "--min-worker-port": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "the system": "/ray.serve.ASGIService/HandleRequest",
}
PATHS = {
    "--dashboard-port": "/api/jobs/",
    "--dashboard-agent-listen-port": "/logs",
    "--runtime-env-agent-port": "/get_runtime_envs_info",
    "--metrics-export-port": "/metrics",
    "AUTOSCALER_METRIC_PORT": "/metrics",
    "DASHBOARD_METRIC_PORT": "/metrics",
    "http_options.port": "/",
}
OPEN = {"--dashboard-port": ["/", "/api/gcs_healthz"], "--dashboard-agent-listen-port": ["/api/healthz"]}


def ports_by_name(cluster):
    return {cluster.named(*each): each[1] for each in cluster.listening()}


def test_every_row_is_tried():
    assert opened_here() == {*CALLS, *PATHS}
    assert {name for name in CALLS if ROWS[name].tls != "yes"} == set()
    assert {name for name in PATHS if ROWS[name].tls != "no"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_need_a_token_and_a_certificate(name, cluster):
    port = ports_by_name(cluster)[name]
    assert ROWS[name].token == "yes"
    assert cluster.grpc(port, CALLS[name], token=False) == "UNAUTHENTICATED"
    assert cluster.grpc(port, CALLS[name], token=True, certified=False) == "UNAVAILABLE"
    assert cluster.grpc(port, CALLS[name], token=True) not in {"UNAUTHENTICATED", "UNAVAILABLE", "UNIMPLEMENTED"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATHS)
def test_requests_need_a_token_where_the_table_says_so(name, cluster):
    port = ports_by_name(cluster)[name]
    asks = name == "--runtime-env-agent-port"  # of this node's address alone, by POST
    how = {"host": cluster.address, "data": b""} if asks else {}
    without = cluster.http(port, PATHS[name], token=False, **how)
    if ROWS[name].token.startswith("yes"):
        assert without == 401
        assert cluster.http(port, PATHS[name], token=True, **how) not in {401, 403, 404}
    else:
        assert ROWS[name].token.startswith("**no**")
        assert without == 200
    assert bool(OPEN.get(name)) == ("but for" in ROWS[name].token)
    for path in OPEN.get(name, []):
        assert cluster.http(port, path, token=False) == 200
