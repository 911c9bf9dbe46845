import copy
import json
import re
import tomllib
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from pydantic import BaseModel

from cauc_ray.serving import ServingArgs

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = ROOT / "deployments"
SCHEMAS = ROOT.parent / "shared" / "kuberay"
TOKENS = {"CAUC_TOKEN", "CAUC_POLICY_TOKEN"}
CLUSTERS = {"rayjob": "rayClusterSpec", "rayservice": "rayClusterConfig"}


def load(name):
    return yaml.safe_load((DEPLOYMENTS / f"{name}.yaml").read_text())


def groups(name):
    cluster = load(name)["spec"][CLUSTERS[name]]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(name):
    return [container for group in groups(name) for container in group["template"]["spec"]["containers"]]


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
    for place in ([], ["workerGroupSpecs", 0], ["headGroupSpec", "template", "spec", "containers", 0]):
        broken = copy.deepcopy(manifest)
        section = broken["spec"][CLUSTERS[name]]
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
    for deployment in application["deployments"]:
        assert deployment["name"] == "Router" or re.fullmatch("stage:.+", deployment["name"])


@pytest.mark.parametrize(
    "place",
    [
        "",
        "http_options",
        "applications.0",
        "applications.0.deployments.0",
        "applications.0.deployments.1.autoscaling_config",
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
def test_clusters_ask_for_a_token_and_have_a_tier_for_every_group(name):
    assert load(name)["spec"][CLUSTERS[name]]["authOptions"] == {"mode": "token"}
    head, *workers = groups(name)
    assert head["resources"] == {"CPU": "0"}
    assert {group["labels"]["tier"] for group in workers} == {"edge", "cloud"}
    for container in containers(name):
        assert container["resources"]["requests"] == container["resources"]["limits"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_versions_agree(name):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (ray,) = re.findall(r"ray\[default\]==([\d.]+)", (DEPLOYMENTS / "Dockerfile").read_text())
    assert load(name)["spec"][CLUSTERS[name]]["rayVersion"] == ray
    assert {container["image"] for container in containers(name)} == {f"cauc-ray:{package}"}


def test_prometheus_reads_the_list_of_nodes_that_ray_writes():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    (job,) = load("prometheus")["scrape_configs"]
    (files,) = job["file_sd_configs"]
    assert [Path(path).name for path in files["files"]] == [PROMETHEUS_SERVICE_DISCOVERY_FILE]
