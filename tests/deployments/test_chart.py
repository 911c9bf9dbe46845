"""The chart's objects, against the schemas of KubeRay and Kubernetes, and the files of Serve and Ray's launcher."""

import copy
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import get_args

import jsonschema
import kubernetes_validate
import pytest
import yaml
from chart import CHART, KINDS, cluster_of, groups_of, of_kind, ray_object, rendered
from pydantic import BaseModel
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from cauc_ray.cli.command import main
from cauc_ray.models.pool import load_pool
from cauc_ray.serving import ServingArgs

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
SCHEMAS = ROOT.parent / "shared" / "kuberay"
TOKENS = {"CAUC_TOKEN", "CAUC_POLICY_TOKEN"}
# What a release may turn on.
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
KUBERNETES = "1.34"
TIERS = {"edge", "small-gpu", "large-gpu"}


def load(name):
    return yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text())


def pods(kind):
    """Return the specs of a release's pods, the head's first."""
    submitter = ray_object(kind)["spec"].get("submitterPodTemplate")
    return [one["spec"] for one in [*(group["template"] for group in groups_of(kind)), submitter] if one]


def containers(kind):
    return [container for pod in pods(kind) for container in pod["containers"]]


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
    charts = {"chart": {}, "chart with everything": EVERYTHING}
    charts = {name: ray_object("service", **values)["spec"]["serveConfigV2"] for name, values in charts.items()}
    return {"serve": load("serve"), **{name: yaml.safe_load(text) for name, text in charts.items()}}


@pytest.mark.parametrize("kind", KINDS)
def test_rays_objects_fit_kuberays_schema(kind):
    path = SCHEMAS / f"{KINDS[kind][0].lower()}s.v1.schema.json"
    if not path.is_file():
        pytest.skip("KubeRay's schemas (../shared/kuberay) are not here")
    schema = jsonschema.Draft202012Validator(strict(json.loads(path.read_text())))
    schema.validate(ray_object(kind))
    manifest = ray_object(kind, **EVERYTHING)
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
        section = cluster_of(kind, broken)
        for step in place:
            section = section[step]
        section["labelz"] = {}
        with pytest.raises(jsonschema.ValidationError, match="labelz"):
            schema.validate(broken)


# Of operators whose schemas are not here; what they hold is looked at one by one.
OTHERS = {"RayService", "RayJob", "RayCluster", "ServiceMonitor", "PrometheusRule"}


@pytest.mark.parametrize("kind", KINDS)
def test_all_other_objects_and_every_pod_fit_kubernetes_schemas(kind):
    objects = [one for one in rendered(kind=kind, **EVERYTHING) if one["kind"] not in OTHERS]
    cluster = cluster_of(kind, ray_object(kind, **EVERYTHING))
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        template = group["template"]
        own = {"metadata": {"name": "one", **template["metadata"]}, "spec": template["spec"]}
        objects.append({"apiVersion": "v1", "kind": "Pod", **own})
    assert {"Pod", "Service", "NetworkPolicy", "PersistentVolumeClaim"} <= {one["kind"] for one in objects}
    for one in objects:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    broken = {**one, "spec": {**one["spec"], "labelz": {}}}
    with pytest.raises(kubernetes_validate.ValidationError, match="labelz"):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_values_that_the_chart_does_not_know_are_refused():
    import helm_python as helm

    for wrong in (
        {"kind": "deployment"},
        {"replicas": 2},
        {"service": {"gprc": True}},
        {"groups": {"edge": {"min": -1}}},
        {"groups": {"edge": {"cpus": 2}}},
        {"service": {"upgrade": {"stepSizePercent": 0}}},
        {"rayVersion": 2.6},
        {"disruption": {"minAvailable": "50%"}},
    ):
        with pytest.raises(helm.HelmError):
            rendered(**wrong)


def test_every_value_has_a_schema_and_lint_finds_nothing():
    import helm_python as helm

    described = json.loads((CHART / "values.schema.json").read_text())

    def check(values, schema, place):
        for name, value in values.items():
            assert name in schema["properties"], f"{place}{name}"
            inner = schema["properties"][name]
            if isinstance(value, dict) and "properties" in inner:
                check(value, inner, f"{place}{name}.")

    check(yaml.safe_load((CHART / "values.yaml").read_text()), described, "")
    assert helm.lint(CHART)["errors"] == []


def test_upgrades_take_over_step_by_step_where_there_is_a_gateway():
    assert ray_object("service")["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
    strategy = ray_object("service", **EVERYTHING)["spec"]["upgradeStrategy"]
    assert strategy["type"] == "NewClusterWithIncrementalUpgrade"
    options = strategy["clusterUpgradeOptions"]
    assert options["gatewayClassName"] == "istio"
    assert 0 < options["stepSizePercent"] <= options["maxSurgePercent"] <= 100  # as KubeRay wants them


def test_the_state_may_stand_outside_of_the_head():
    for kind in KINDS:
        assert "gcsFaultToleranceOptions" not in cluster_of(kind, ray_object(kind))
        options = cluster_of(kind, ray_object(kind, **EVERYTHING))["gcsFaultToleranceOptions"]
        assert options["redisAddress"] == "redis:6379"
        assert options["redisPassword"] == {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}


def matched(selector, labels):
    return selector["matchLabels"].items() <= labels.items()


def node_labels(group, number):
    """Return a pod's labels: the template's, and those that KubeRay adds."""
    node_type = "worker" if number else "head"
    return {**group["template"]["metadata"]["labels"], "ray.io/is-ray-node": "yes", "ray.io/node-type": node_type}


def test_selectors_find_the_pods_and_the_services_that_they_mean():
    objects = rendered(kind="service", **EVERYTHING)
    pods = [node_labels(group, at) for at, group in enumerate(groups_of("service"))]
    (budget,) = of_kind(objects, "PodDisruptionBudget")
    assert [matched(budget["spec"]["selector"], one) for one in pods] == [False, True, True, True]
    assert budget["spec"]["minAvailable"] == len(TIERS) - 1
    services = {one["metadata"]["name"]: one for one in of_kind(objects, "Service")}
    chosen = {
        name: [matched({"matchLabels": one["spec"]["selector"]}, pod) for pod in pods] for name, one in services.items()
    }
    assert chosen == {"cauc-metrics": [True] * 4, "cauc-grpc": [False, True, True, True]}
    (monitor,) = of_kind(objects, "ServiceMonitor")
    assert [
        name for name, one in services.items() if matched(monitor["spec"]["selector"], one["metadata"]["labels"])
    ] == ["cauc-metrics"]
    for policy in of_kind(objects, "NetworkPolicy"):
        assert matched(policy["spec"]["podSelector"], pods[0])
    assert of_kind(rendered(kind="job"), "PodDisruptionBudget") == []


def test_weights_are_kept_on_a_claim_that_every_node_mounts():
    (claim,) = of_kind(rendered(), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for kind in KINDS:
        for group in groups_of(kind):
            pod = group["template"]["spec"]
            (container,) = pod["containers"]
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            volumes = {one["name"]: one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"]}
            assert mounts == {"data": "/data", "cache": "/cache"}
            assert volumes == {"data": "cauc-data", "cache": claim["metadata"]["name"]}
            homes = {one["name"]: one.get("value") for one in container["env"] if one["name"].endswith("_HOME")}
            assert set(homes) == {"TORCH_HOME", "HF_HOME"}
            assert all(path.startswith(mounts["cache"]) for path in homes.values())
    assert of_kind(rendered(cache={"claim": "mine"}), "PersistentVolumeClaim") == []
    assert of_kind(rendered(cache={"enabled": False}), "PersistentVolumeClaim") == []


def test_the_rule_holds_the_alerts_and_the_monitor_all_ports_of_metrics(tmp_path):
    objects = rendered()
    (rule,) = of_kind(objects, "PrometheusRule")
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["spec"] == yaml.safe_load((CHART / "alerts.yaml").read_text())
    if promtool := shutil.which("promtool"):
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
        subprocess.run([promtool, "check", "rules", tmp_path / "rules.yaml"], check=True, timeout=60)
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (service,) = [one for one in of_kind(objects, "Service") if one["metadata"]["name"] == "cauc-metrics"]
    assert set(monitor["spec"]) == {"selector", "podTargetLabels", "endpoints"}
    assert [one["port"] for one in monitor["spec"]["endpoints"]] == [one["name"] for one in service["spec"]["ports"]]
    assert service["spec"]["publishNotReadyAddresses"]  # nodes without a replica of Serve have metrics, too
    declared = {one["name"]: one["containerPort"] for one in containers("service")[0]["ports"]}
    for port in service["spec"]["ports"]:
        assert port["targetPort"] in (declared[port["name"]], port["name"])
        assert port["port"] == declared[port["name"]]
    left_out = rendered(monitoring={"enabled": False}, networkPolicy={"enabled": False})
    assert {one["kind"] for one in left_out} == {"RayService", "PodDisruptionBudget", "PersistentVolumeClaim"}


@pytest.mark.parametrize("name", ["serve", "chart", "chart with everything"])
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
    for container in containers("service"):
        secrets = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in container["env"] if "valueFrom" in one}
        assert set(secrets) == TOKENS
        assert not any(secret.get("optional") for secret in secrets.values())  # a missing key must not leave it open
        assert len({secret["key"] for secret in secrets.values()}) == len(TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_ask_for_a_token_and_have_a_group_for_every_tier(kind):
    cluster = cluster_of(kind, ray_object(kind))
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"]
    head, *workers = groups_of(kind)
    assert head["resources"] == {"CPU": "0"}
    assert head["labels"] == {"tier": "head"}
    assert {group["groupName"]: group["labels"] for group in workers} == {tier: {"tier": tier} for tier in TIERS}
    for group in workers:
        assert 1 <= group["minReplicas"] <= group["replicas"] < group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        n_gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert (n_gpus != "0") == group["groupName"].endswith("gpu")


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_runs_as_root_or_gains_privileges(kind):
    for pod in pods(kind):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 1000  # the image's
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    bare = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert all(container["securityContext"] == bare for container in containers(kind))
    assert cluster_of(kind, ray_object(kind))["autoscalerOptions"]["securityContext"] == bare
    head, *others = pods(kind)
    assert "automountServiceAccountToken" not in head  # its autoscaler speaks to Kubernetes
    assert all(pod["automountServiceAccountToken"] is False for pod in others)
    for container in containers(kind):
        assert container["resources"]["requests"] == container["resources"]["limits"]


def node_types(kind):
    """Return what Ray's autoscaler makes of a cluster's groups: by tier, labels and resources."""
    if kind == "launcher":
        return load("cluster")["available_node_types"]
    metadata = {"name": kind, "namespace": "default"}
    config = _derive_autoscaling_config_from_ray_cr({"metadata": metadata, "spec": cluster_of(kind, ray_object(kind))})
    return {kind["labels"]["tier"]: kind for kind in config["available_node_types"].values()}


@pytest.mark.parametrize("kind", KINDS)
def test_rays_autoscaler_sees_the_same_kinds_of_nodes_everywhere(kind):
    launched = node_types("launcher")
    kinds = node_types(kind)
    assert set(kinds) == set(launched) == {"head", *TIERS}
    for tier, kind in kinds.items():
        assert kind["labels"] == launched[tier]["labels"]
        assert {unit: kind["resources"].get(unit) for unit in ("CPU", "GPU")} == {
            unit: launched[tier]["resources"].get(unit) for unit in ("CPU", "GPU")
        }
        assert [kind.get(limit) for limit in ("min_workers", "max_workers") if tier != "head"] == [
            launched[tier][limit] for limit in ("min_workers", "max_workers") if tier != "head"
        ]


@pytest.mark.parametrize("kind", [*KINDS, "launcher"])
def test_every_stage_of_the_pool_finds_nodes_in_every_cluster(kind):
    pool = load_pool(DEPLOYMENTS / "pool.yaml")
    kinds = node_types(kind)
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
    words = shlex.split(ray_object("job")["spec"]["entrypoint"])
    assert words[0] == "cauc"
    with pytest.raises(SystemExit) as ended:
        main(words[1:])
    assert ended.value.code == 2
    assert "/data/p" in capsys.readouterr().err  # its files are all that it misses here


@pytest.mark.parametrize("kind", [*KINDS, "launcher"])
def test_versions_agree(kind):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if kind == "launcher":
        assert load("cluster")["docker"]["image"].endswith(f"/cauc-ray:{package}")
        return
    (ray,) = re.findall(r"^ray==([\d.]+)", (DEPLOYMENTS / "requirements.txt").read_text(), re.M)
    assert cluster_of(kind, ray_object(kind))["rayVersion"] == ray
    assert {container["image"] for container in containers(kind)} == {f"cauc-ray:{package}"}


def test_prometheus_reads_the_list_of_nodes_that_ray_writes():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    job, _ = load("prometheus")["scrape_configs"]
    (files,) = job["file_sd_configs"]
    assert [Path(path).name for path in files["files"]] == [PROMETHEUS_SERVICE_DISCOVERY_FILE]
