import json
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT.parent / "shared" / "kuberay"


def strict(schema):
    """Return a schema that refuses the keys it does not name, which KubeRay's own silently drops."""
    if isinstance(schema, dict):
        strictened = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            strictened.setdefault("additionalProperties", False)
        return strictened
    return [strict(item) for item in schema] if isinstance(schema, list) else schema


@pytest.fixture(scope="module")
def rayjob_schema():
    path = SCHEMAS / "rayjobs.v1.schema.json"
    if not path.is_file():
        pytest.skip("KubeRay's schemas (../shared/kuberay) are not here")
    return strict(json.loads(path.read_text()))


def test_the_ray_job_fits_kuberays_schema(rayjob_schema):
    manifest = yaml.safe_load((ROOT / "deployments" / "rayjob.yaml").read_text())
    jsonschema.validate(manifest, rayjob_schema)
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["labelz"] = {}
    with pytest.raises(jsonschema.ValidationError, match="labelz"):
        jsonschema.validate(manifest, rayjob_schema)
