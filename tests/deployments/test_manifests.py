import copy
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cauc_ray.cli.command import main
from cauc_ray.models.pool import load_pool
from cauc_ray.serving import ServingArgs

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
SCHEMAS = ROOT.parent / "shared" / "kuberay"
TOKENS = {"CAUC_TOKEN", "CAUC_POLICY_TOKEN"}
CLUSTERS = {"raycluster": None, "rayjob": "rayClusterSpec", "rayservice": "rayClusterConfig"}
TIERS = {"edge", "small-gpu", "large-gpu"}


def load(name):
    return yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text())


def cluster_of(name, manifest=None):
    spec = (manifest or load(name))["spec"]
    return spec[CLUSTERS[name]] if CLUSTERS[name] else spec


def groups(name):
    cluster = cluster_of(name)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pods(name):
    submitter = load(name)["spec"].get("submitterPodTemplate")
    return [one["spec"] for one in [*(group["template"] for group in groups(name)), submitter] if one]


def containers(name):
    return [container for pod in pods(name) for container in pod["containers"]]


def strict(schema):
    """Return a schema that refuses the keys it does not name, which KubeRay's own silently drops."""
    if isinstance(schema, dict):
        strictened = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            strictened.setdefault("additionalProperties", False)
        return strictened
    return [strict(item) for item in schema] if isinstance(schema, list) else schema


def models_in(annotation):
    """Return the pydantic models that an annotation allows, however deep in unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def unknown_keys(model, content, place=""):
    """Return the keys that a model does not name, at any depth: Serve drops them without a word."""
    unknown = []
    for key, value in content.items():
        field = model.model_fields.get(key)
        if field is None:
            unknown.append(f"{place}{key}")
            continue
        inner = models_in(field.annotation)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and inner:
                found = [unknown_keys(one, item, f"{place}{key}.") for one in inner]
                unknown += min(found, key=len)
    return unknown


@pytest.fixture(scope="module")
def serve_schema():
    from ray.serve.schema import ServeDeploySchema

    return ServeDeploySchema


def serve_configs():
    return {"serve": load("serve"), "rayservice": yaml.safe_load(load("rayservice")["spec"]["serveConfigV2"])}


@pytest.mark.parametrize("name", CLUSTERS)
def test_manifests_fit_kuberays_schema(name):
    path = SCHEMAS / f"{name}s.v1.schema.json"
    if not path.is_file():
        pytest.skip("KubeRay's schemas (../shared/kuberay) are not here")
    schema = jsonschema.Draft202012Validator(strict(json.loads(path.read_text())))
    manifest = load(name)
    schema.validate(manifest)
    for place in (
        [],
        ["autoscalerOptions", "securityContext"],
        ["workerGroupSpecs", 0],
        ["workerGroupSpecs", 2, "template", "spec"],
        ["workerGroupSpecs", 2, "template", "spec", "tolerations", 0],
        ["workerGroupSpecs", 1, "template", "spec", "volumes", 0, "persistentVolumeClaim"],
        ["headGroupSpec", "template", "spec", "securityContext", "seccompProfile"],
        ["headGroupSpec", "template", "spec", "containers", 0],
        ["headGroupSpec", "template", "spec", "containers", 0, "ports", 0],
    ):
        broken = copy.deepcopy(manifest)
        section = cluster_of(name, broken)
        for step in place:
            section = section[step]
        section["labelz"] = {}
        with pytest.raises(jsonschema.ValidationError, match="labelz"):
            schema.validate(broken)


@pytest.mark.parametrize("name", ["serve", "rayservice"])
def test_serve_configs_hold_what_serve_knows_and_nothing_else(name, serve_schema):
    config = serve_configs()[name]
    serve_schema.model_validate(config)
    assert unknown_keys(serve_schema, config) == []
    (application,) = config["applications"]
    assert application["import_path"] == "cauc_ray.serving:build_app"
    ServingArgs.model_validate(application["args"])
    for deployment in application.get("deployments", []):
        assert deployment["name"] == "Router" or re.fullmatch("stage:.+", deployment["name"])


@pytest.mark.parametrize(
    "place",
    [
        "",
        "http_options",
        "applications.0",
        "applications.0.deployments.0",
        "applications.0.deployments.0.autoscaling_config",
    ],
)
def test_keys_that_serve_would_drop_are_found_at_any_depth(place, serve_schema):
    config = load("serve")
    section = config
    for step in filter(None, place.split(".")):
        section = section[int(step) if step.isdigit() else step]
    section["num_replica"] = 2
    (found,) = unknown_keys(serve_schema, config)
    assert found.split(".") == [*re.findall("[a-z_]+", place), "num_replica"]


def test_what_is_applied_by_hand_listens_on_loopback_only():
    assert load("serve")["http_options"]["host"] == "127.0.0.1"


def test_every_node_of_the_service_has_both_tokens_from_a_secret():
    for container in containers("rayservice"):
        secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"]}
        assert set(secrets) == TOKENS
        assert not any(secret.get("optional") for secret in secrets.values())  # a missing key must not leave it open
        assert len({secret["key"] for secret in secrets.values()}) == len(TOKENS)


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_ask_for_a_token_and_have_a_group_for_every_tier(name):
    cluster = cluster_of(name)
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"]
    head, *workers = groups(name)
    assert head["resources"] == {"CPU": "0"}
    assert head["labels"] == {"tier": "head"}
    assert {group["groupName"]: group["labels"] for group in workers} == {tier: {"tier": tier} for tier in TIERS}
    for group in workers:
        assert 1 <= group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        n_gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert (n_gpus != "0") == group["groupName"].endswith("gpu")


@pytest.mark.parametrize("name", CLUSTERS)
def test_no_pod_runs_as_root_or_gains_privileges(name):
    for pod in pods(name):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000  # the image's
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    bare = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all(container["securityContext"] == bare for container in containers(name))
    assert cluster_of(name)["autoscalerOptions"]["securityContext"] == bare
    head, *others = pods(name)
    assert "automountServiceAccountToken" not in head  # its autoscaler speaks to Kubernetes
    assert all(pod["automountServiceAccountToken"] is False for pod in others)
    for container in containers(name):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def node_types(name):
    """Return what Ray's autoscaler makes of a cluster's groups: by tier, labels and resources."""
    if name == "cluster":
        return load(name)["available_node_types"]
    metadata = {"name": name, "namespace": "default"}
    config = _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": cluster_of(name)})
    return {kind["labels"]["tier"]: kind for kind in config["available_node_types"].values()}


@pytest.mark.parametrize("name", CLUSTERS)
def test_rays_autoscaler_sees_the_same_kinds_of_nodes_everywhere(name):
    launched = node_types("cluster")
    kinds = node_types(name)
    assert set(kinds) == set(launched) == {"head", *TIERS}
    for tier, kind in kinds.items():
        assert kind["labels"] == launched[tier]["labels"]
        assert {unit: kind["resources"].get(unit) for unit in ("CPU", "GPU")} == {
            unit: launched[tier]["resources"].get(unit) for unit in ("CPU", "GPU")
        }
        assert [kind.get(limit) for limit in ("min_workers", "max_workers") if tier != "head"] == [
            launched[tier][limit] for limit in ("min_workers", "max_workers") if tier != "head"
        ]


@pytest.mark.parametrize("name", [*CLUSTERS, "cluster"])
def test_every_stage_of_the_pool_finds_nodes_in_every_cluster(name):
    pool = load_pool(DEPLOYMENTS / "pool.yaml")
    kinds = node_types(name)
    needs = {stage.name: stage.resources for stage in pool.stages} | {"router": pool.serving.router.resources}
    chosen = {}
    for which, need in needs.items():
        # By the first labels alone: each stage has nodes of its own, wherever else it may stand.
        own = need.model_copy(update={"fallback": ()})
        (chosen[which],) = [tier for tier, kind in kinds.items() if own.met_by(kind["labels"])]
        (_, *elsewhere) = [tier for tier, kind in kinds.items() if need.met_by(kind["labels"])]
        assert len(elsewhere) == len(need.fallback)
        for tier in (chosen[which], *elsewhere):
            there = kinds[tier]["resources"]
            assert all(amount <= there.get(unit, 0) for unit, amount in need.amounts.items())
    assert chosen == {"mnasnet": "edge", "resnet50": "small-gpu", "convnext": "large-gpu", "router": "edge"}


def test_what_the_readme_shows_of_the_pool_stands_in_it():
    pool = load("pool")
    shown = re.findall(r"^\| `([a-z-]+)` \|.*`(resources: .*?)`", (DEPLOYMENTS / "README.md").read_text(), re.M)
    assert {tier: yaml.safe_load(text)["resources"] for tier, text in shown} == {
        stage["resources"]["labels"]["tier"]: stage["resources"] for stage in pool["stages"]
    }


def test_the_job_calls_the_command_as_it_is(capsys):
    words = shlex.split(load("rayjob")["spec"]["entrypoint"])
    assert words[0] == "cauc"
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 2
    assert "/data/p" in capsys.readouterr().err  # its files are all that it misses here


@pytest.mark.parametrize("name", [*CLUSTERS, "cluster"])
def test_versions_agree(name):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if name == "cluster":
        assert load(name)["docker"]["image"].endswith(f"/cauc-ray:{package}")
        return
    (ray,) = re.findall(r"^ray==([\d.]+)", (DEPLOYMENTS / "requirements.txt").read_text(), re.M)
    assert cluster_of(name)["rayVersion"] == ray
    assert {container["image"] for container in containers(name)} == {f"cauc-ray:{package}"}


def test_network_policies_fit_kubernetes_schema():
    path = SCHEMAS / "rayclusters.v1.schema.json"
    if not path.is_file():
        pytest.skip("KubeRay's schemas (../shared/kuberay) are not here")
    spec = json.loads(path.read_text())["properties"]["spec"]["properties"]
    # KubeRay's own policies hold Kubernetes' rules, and its pods Kubernetes' selectors.
    rules = spec["networkPolicy"]["properties"]["head"]["properties"]["ingressRules"]
    schema = jsonschema.Draft202012Validator(strict(rules))
    policies = list(yaml.safe_load_all((DEPLOYMENTS / "networkpolicy.yaml").read_text()))
    assert len(policies) == 2
    for policy in policies:
        assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
        assert set(policy["spec"]) == {"podSelector", "policyTypes", "ingress"}
        assert set(policy["spec"]["podSelector"]) == {"matchLabels"}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        schema.validate(policy["spec"]["ingress"])
        broken = copy.deepcopy(policy["spec"]["ingress"])
        broken[0]["form"] = broken[0].pop("from")
        with pytest.raises(jsonschema.ValidationError, match="form"):
            schema.validate(broken)


def test_prometheus_reads_the_list_of_nodes_that_ray_writes():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = load("prometheus")["scrape_configs"]
    (files,) = job["file_sd_configs"]
    assert [Path(path).name for path in files["files"]] == [PROMETHEUS_SERVICE_DISCOVERY_FILE]
