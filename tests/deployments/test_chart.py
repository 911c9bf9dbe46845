"""The chart's objects, and the files of Ray Serve and of Ray's cluster launcher."""

import copy
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart import CHART, KINDS, cluster_of, groups_of, of_kind, ray_object, rendered
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from cauc_ray.models.pool import load_pool
from cauc_ray.serving import ServingArgs

helm = pytest.importorskip("helm_python", reason="Helm (pip install helm-python-sdk) is not installed")

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
SCHEMAS = ROOT.parent / "shared" / "kuberay"
KUBERNETES = "1.34"
TIERS = {"edge", "small-gpu", "large-gpu"}
# All that a release can turn on.
EVERYTHING = {
    "tls": True,
    "image": {"repository": "registry.example.com/cauc-ray", "tag": "7", "pullSecrets": ["pull"]},
    "gcs": {"redisAddress": "redis:6379", "passwordSecret": "redis"},
    "cache": {"storageClassName": "shared"},
    "service": {
        "grpc": True,
        "upgrade": {"gatewayClassName": "istio"},
        "deployments": [{"name": "stage:small", "num_replicas": 2}],
    },
}
CPUS_ONLY = yaml.safe_load((CHART / "cpu.yaml").read_text())
# Kinds of other operators whose schemas are not here.
CUSTOM_KINDS = {"RayService", "RayJob", "RayCluster", "ServiceMonitor", "PrometheusRule"}


def load(name):
    return yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text())


def pods(kind):
    """Return the specs of a release's pods, the head's first."""
    submitter = ray_object(kind)["spec"].get("submitterPodTemplate")
    return [template["spec"] for template in [*(group["template"] for group in groups_of(kind)), submitter] if template]


def containers(kind):
    return [container for pod in pods(kind) for container in pod["containers"]]


def strict(schema):
    """Return a schema that refuses the keys it does not name, which KubeRay would silently drop."""
    if isinstance(schema, dict):
        strict_schema = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict_schema.setdefault("additionalProperties", False)
        return strict_schema
    return [strict(item) for item in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("kind", KINDS)
def test_objects_fit_the_schemas_of_kuberay_and_kubernetes(kind):
    path = SCHEMAS / f"{KINDS[kind][0].lower()}s.v1.schema.json"
    if not path.is_file():
        pytest.skip("KubeRay's schemas (../shared/kuberay) are not here")
    schema = jsonschema.Draft202012Validator(strict(json.loads(path.read_text())))
    for values in ({}, EVERYTHING, CPUS_ONLY):
        schema.validate(ray_object(kind, **values))
    objects = [item for item in rendered(kind=kind, **EVERYTHING) if item["kind"] not in CUSTOM_KINDS]
    assert {"Service", "NetworkPolicy", "PersistentVolumeClaim"} <= {item["kind"] for item in objects}
    for group in groups_of(kind, **EVERYTHING):
        metadata = {"name": "pod", **group["template"]["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": group["template"]["spec"]}
        objects.append(pod)
    for item in objects:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "deployment"},
        {"service": {"gprc": True}},
        {"groups": {"edge": {"min": -1}}},
        {"rayVersion": 2.6},
    ],
    ids=str,
)
def test_chart_refuses_unknown_keys_and_bad_values(values):
    with pytest.raises(helm.HelmError):
        rendered(**values)


@pytest.mark.parametrize("kind", KINDS)
def test_values_for_cpus_ask_for_no_gpu_and_no_cache(kind):
    assert "gpu" in json.dumps(rendered(kind=kind))
    objects = rendered(kind=kind, **CPUS_ONLY)
    assert "gpu" not in json.dumps(objects)
    assert not any(item["kind"] == "PersistentVolumeClaim" for item in objects)
    assert len(groups_of(kind, **CPUS_ONLY)) == 2  # the head and the nodes


def test_chart_passes_lint():
    assert helm.lint(CHART)["errors"] == []


def test_upgrades_are_incremental_with_a_gateway():
    assert ray_object("service")["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
    strategy = ray_object("service", **EVERYTHING)["spec"]["upgradeStrategy"]
    options = strategy["clusterUpgradeOptions"]
    assert (strategy["type"], options["gatewayClassName"]) == ("NewClusterWithIncrementalUpgrade", "istio")
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100  # KubeRay requires it


def selects(match_labels, labels):
    return match_labels.items() <= labels.items()


def test_selectors_match_the_pods_and_services_that_they_are_for():
    objects = rendered(kind="service", **EVERYTHING)
    # KubeRay adds two labels to those of the template.
    labels_of_pods = [
        {**group["template"]["metadata"]["labels"], "ray.io/is-ray-node": "yes", "ray.io/node-type": node_type}
        for group, node_type in zip(groups_of("service"), ["head", *["worker"] * len(TIERS)], strict=True)
    ]
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    workers = budget["spec"]["selector"]["matchLabels"]
    assert [selects(workers, labels) for labels in labels_of_pods] == [False, True, True, True]
    assert budget["spec"]["minAvailable"] == len(TIERS) - 1
    assert of_kind(rendered(kind="job"), "PodDisruptionBudget") == []
    services = {item["metadata"]["name"]: item for item in of_kind(objects, "Service")}
    matches = {
        name: [selects(service["spec"]["selector"], labels) for labels in labels_of_pods]
        for name, service in services.items()
    }
    assert matches == {"cauc-metrics": [True] * 4, "cauc-grpc": [False, True, True, True]}
    (monitor,) = of_kind(objects, "ServiceMonitor")
    monitored = monitor["spec"]["selector"]["matchLabels"]
    assert [name for name, item in services.items() if selects(monitored, item["metadata"]["labels"])] == [
        "cauc-metrics"
    ]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert selects(policy["spec"]["podSelector"]["matchLabels"], labels_of_pods[0])


@pytest.mark.parametrize("kind", KINDS)
def test_every_node_mounts_the_data_and_has_the_weights_in_a_cache_that_all_share(kind):
    (claim,) = of_kind(rendered(), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for pod in (group["template"]["spec"] for group in groups_of(kind)):
        (container,) = pod["containers"]
        claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
        mounts = {claims[mount["name"]]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"cauc-data": "/data", claim["metadata"]["name"]: "/cache"}
        environment = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        assert all(environment[name].startswith("/cache") for name in ("TORCH_HOME", "HF_HOME"))


def test_monitoring_has_the_alerts_and_can_be_turned_off():
    (rule,) = of_kind(rendered(), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "alerts.yaml").read_text())
    without = rendered(monitoring={"enabled": False}, networkPolicy={"enabled": False})
    assert {item["kind"] for item in without} == {"RayService", "PodDisruptionBudget", "PersistentVolumeClaim"}


def test_serve_configs_have_no_key_that_serve_would_drop():
    configs = [yaml.safe_load(ray_object("service", **values)["spec"]["serveConfigV2"]) for values in ({}, EVERYTHING)]
    for config in (load("serve"), *configs):
        assert ServeDeploySchema.model_validate(config).model_dump(exclude_unset=True) == config
        (application,) = config["applications"]
        assert application["import_path"] == "cauc_ray.serving:build_app"
        ServingArgs.model_validate(application["args"])
    assert load("serve")["http_options"]["host"] == "127.0.0.1"


def test_clusters_and_services_require_tokens():
    assert all(cluster_of(kind, ray_object(kind))["authOptions"] == {"mode": "token"} for kind in KINDS)
    for container in containers("service"):
        entries = [entry for entry in container["env"] if "valueFrom" in entry]
        secrets = {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in entries}
        assert secrets.keys() == {"CAUC_TOKEN", "CAUC_POLICY_TOKEN"}
        assert secrets["CAUC_TOKEN"]["key"] != secrets["CAUC_POLICY_TOKEN"]["key"]
        assert not any(secret.get("optional") for secret in secrets.values())  # a missing key must not leave it open


@pytest.mark.parametrize("kind", KINDS)
def test_pods_run_without_root_and_privileges(kind):
    for pod in pods(kind):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000  # the image's
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    unprivileged = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all(container["securityContext"] == unprivileged for container in containers(kind))
    assert cluster_of(kind, ray_object(kind))["autoscalerOptions"]["securityContext"] == unprivileged
    head, *workers = pods(kind)
    assert "automountServiceAccountToken" not in head  # its autoscaler calls Kubernetes
    assert all(pod["automountServiceAccountToken"] is False for pod in workers)


def node_types(kind):
    """Return the node types that Ray's autoscaler makes of a cluster's groups, by tier."""
    if kind == "launcher":
        return load("cluster")["available_node_types"]
    cluster = {"metadata": {"name": kind, "namespace": "default"}, "spec": cluster_of(kind, ray_object(kind))}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"].values()
    return {node_type["labels"]["tier"]: node_type for node_type in types}


@pytest.mark.parametrize("kind", [*KINDS, "launcher"])
def test_every_cluster_has_the_same_groups_where_every_stage_of_the_pool_fits(kind):
    types, launched = node_types(kind), node_types("launcher")
    assert types.keys() == {"head", *TIERS}
    for tier, node_type in types.items():
        assert node_type["labels"] == launched[tier]["labels"] == {"tier": tier}
        amounts = {unit: node_type["resources"].get(unit) for unit in ("CPU", "GPU")}
        assert amounts == {unit: launched[tier]["resources"].get(unit) for unit in ("CPU", "GPU")}
        assert bool(amounts["GPU"]) == tier.endswith("gpu")
        if tier != "head":
            limits = node_type["min_workers"], node_type["max_workers"]
            assert limits == (launched[tier]["min_workers"], launched[tier]["max_workers"])
            assert 1 <= limits[0] < limits[1]
    assert types["head"]["resources"]["CPU"] == 0
    pool, tiers = load_pool(DEPLOYMENTS / "pool.yaml"), {}
    resources = {stage.name: stage.resources for stage in pool.stages}
    for name, needs in {**resources, "router": pool.serving.router.resources}.items():
        preferred = needs.model_copy(update={"fallback": ()})
        (tiers[name],) = [tier for tier in types if preferred.met_by(types[tier]["labels"])]
        candidates = [tier for tier in types if needs.met_by(types[tier]["labels"])]
        assert len(candidates) == 1 + len(needs.fallback)
        for tier in candidates:
            assert all(amount <= types[tier]["resources"].get(unit, 0) for unit, amount in needs.amounts.items())
    assert tiers == {"mnasnet": "edge", "resnet50": "small-gpu", "convnext": "large-gpu", "router": "edge"}


def test_launchers_file_fits_rays_schema_and_guards_its_nodes():
    config = load("cluster")
    validate_config(prepare_config(copy.deepcopy(config)))
    types = config["available_node_types"]
    assert config["head_node_type"] == "head"
    assert sum(types[tier]["max_workers"] for tier in TIERS) == config["max_workers"]
    assert config["file_mounts"] == {"/home/ray/.ray/auth_token": "~/.ray/auth_token"}
    # Without a security group the launcher makes one that opens SSH to the world.
    assert all(node_type["node_config"]["SecurityGroupIds"] for node_type in types.values())
    assert "security_group" not in config["provider"]


def test_readme_shows_the_resources_of_the_pool():
    rows = re.findall(r"^\| `([a-z-]+)` \|.*`(resources: .*?)`", (DEPLOYMENTS / "README.md").read_text(), re.M)
    assert {tier: yaml.safe_load(text)["resources"] for tier, text in rows} == {
        stage["resources"]["labels"]["tier"]: stage["resources"] for stage in load("pool")["stages"]
    }


def test_entrypoint_of_the_job_is_a_command_that_only_lacks_its_files(command):
    program, *words = shlex.split(load("chart/values")["job"]["entrypoint"])
    code, _, err = command(*words)
    assert (program, code) == ("cauc", 2)
    assert "/data/p" in err
    assert "--resume" in words


@pytest.mark.parametrize(("codes", "n_tries"), [([0], 1), ([2, 0], 1), ([4, 4, 5, 0], 3), ([4] * 9, 4)])
def test_job_is_tried_again_after_exit_code_4_alone(tmp_path, codes, n_tries):
    """The entrypoint passes through the shells of KubeRay's submitter and of Ray, and `ray job submit` between them."""
    job = ray_object("job", job={"entrypoint": "cauc run --input '/data/two words' --resume"})["spec"]
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    next_code = 'printf "%s|" "$@" >> tries; echo >> tries; code=$(head -n 1 codes); sed -i 1d codes; exit $code'
    submit = """python -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' "$@" > submitted"""
    for name, text in (("cauc", next_code), ("sleep", "true"), ("submit", submit)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.defpath])}
    options = {"cwd": tmp_path, "env": environment}
    subprocess.run(["bash", "-ce", f"submit {job['entrypoint']} ;"], check=True, **options)
    done = subprocess.run((tmp_path / "submitted").read_text(), shell=True, **options)
    tries = (tmp_path / "tries").read_text().splitlines()
    assert tries == ["run|--input|/data/two words|--resume|"] * n_tries
    assert done.returncode == codes[n_tries - 1]
    assert job["backoffLimit"] == 0  # each would be a new cluster, whatever the exit code


def test_versions_agree():
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (ray,) = re.findall(r"^ray==([\d.]+)", (DEPLOYMENTS / "requirements.txt").read_text(), re.M)
    assert load("cluster")["docker"]["image"].endswith(f"/cauc-ray:{package}")
    for kind in KINDS:
        assert cluster_of(kind, ray_object(kind))["rayVersion"] == ray
        assert {container["image"] for container in containers(kind)} == {f"cauc-ray:{package}"}
