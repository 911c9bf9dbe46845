"""The table of ports in deployments/README.md is what the chart and the launcher's file open, and to whom."""

import re
from pathlib import Path

import pytest
import yaml
from chart import KINDS, groups_of, of_kind, rendered

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
# Words of the table's last column by what a network policy selects.
CLIENTS = {
    "monitoring": "Prometheus",
    "ingress-nginx": "ingress",
    "kuberay-operator": "operator",
    "RayJob": "submitter",
}


def table_of_ports():
    """Return (ports, who may reach them) by each option that sets them."""
    text = (DEPLOYMENTS / "README.md").read_text()
    rows = {}
    for line in re.search(r"^  \| port \|.*?\n\n", text, re.S | re.M)[0].strip().splitlines()[2:]:
        port, _, set_by, _, _, clients = (cell.strip() for cell in line.strip().strip("|").split(" | "))
        bounds = [re.findall(r"\d+", part) for part in port.split(",")]
        ports = {number for ends in bounds if ends for number in range(int(ends[0]), int(ends[-1]) + 1)}
        rows |= dict.fromkeys(re.findall(r"`([^`]+)`", set_by), (ports, clients))
    return rows


TABLE = table_of_ports()


def clients_of(port):
    """Return who may reach a port, which exactly one row of the table covers."""
    (clients,) = {clients for ports, clients in TABLE.values() if port in ports}
    return clients


@pytest.mark.parametrize("kind", KINDS)
def test_chart_declares_the_ports_of_the_table(kind):
    head, *_ = groups = groups_of(kind)
    options = {option: int(port) for group in groups for option, port in group["rayStartParams"].items()}
    assert options
    assert all(TABLE[f"--{option}"][0] == {port} for option, port in options.items())
    declared = {port["name"]: port["containerPort"] for port in head["template"]["spec"]["containers"][0]["ports"]}
    assert all(clients_of(port) for port in declared.values())
    by_kuberays_names = {"gcs-server": "--port", "dashboard": "--dashboard-port", "metrics": "--metrics-export-port"}
    assert all(TABLE[option][0] == {declared[name]} for name, option in by_kuberays_names.items())


def test_launcher_starts_nodes_on_the_ports_of_the_table():
    cluster = yaml.safe_load((DEPLOYMENTS / "cluster.yaml").read_text())
    for kind in ("head", "worker"):
        (start,) = [line for line in cluster[f"{kind}_start_ray_commands"] if "ray start" in line]
        ports = {option: int(port) for option, port in re.findall(r"(--[a-z-]*port)=(\d+)", start)}
        assert all(TABLE[option][0] == {port} for option, port in ports.items())
        # Ray would take any free port for these.
        assert {"--node-manager-port", "--object-manager-port", "--runtime-env-agent-port"} <= ports.keys()
        assert {"--dashboard-agent-grpc-port", "--metrics-export-port"} <= ports.keys()
        assert "RAY_AUTH_MODE=token" in start
    assert "--dashboard-host=127.0.0.1" in cluster["head_start_ray_commands"][-1]


@pytest.mark.parametrize("values", [{}, {"kind": "cluster"}, {"service": {"grpc": True}}], ids=str)
def test_network_policies_admit_the_clients_of_the_table_only(values):
    objects = rendered(**values)
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind(objects, "NetworkPolicy")}
    nodes, *rules = policies["cauc-nodes"]["ingress"]
    assert nodes == {"from": [{"podSelector": policies["cauc-nodes"]["podSelector"]}]}
    ports = {}
    for rule in [*rules, *policies["cauc-head"]["ingress"]]:
        (peer,) = rule["from"]
        (selected,) = peer.get("namespaceSelector", peer.get("podSelector"))["matchLabels"].values()
        for port in (port["port"] for port in rule["ports"]):
            assert CLIENTS[selected] in clients_of(port)
            ports.setdefault(CLIENTS[selected], set()).add(port)
    assert (9000 in ports["ingress"]) == ("service" in values)
    metrics = set().union(*(ports for ports, clients in TABLE.values() if clients == "Prometheus"))
    assert ports["Prometheus"] == metrics
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "cauc-metrics"]
    assert {port["port"] for port in service["spec"]["ports"]} == metrics
