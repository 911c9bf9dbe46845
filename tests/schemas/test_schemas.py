"""JSON schemas of the files that people write and programs read."""

import json

import jsonschema
import pytest

from cauc_ray.cli.command import VERBS
from cauc_ray.schemas import SCHEMAS, schema_path

FILES = sorted(SCHEMAS.keys() - {"openapi"})


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schemas_in_the_package_are_those_of_the_code(name):
    assert json.loads(schema_path(name).read_text()) == SCHEMAS[name](), "run: python -m cauc_ray.schemas"


def test_every_verb_has_a_schema_of_its_config():
    assert set(FILES) == {"policy", "pool", *VERBS}
    assert {path.name for path in schema_path("pool").parent.glob("*.json")} == {schema_path(n).name for n in FILES}


def undescribed_keys(schema):
    """Yield the keys of all objects of a schema that have no description."""
    if isinstance(schema, dict):
        yield from (key for key, value in schema.get("properties", {}).items() if not value.get("description"))
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from undescribed_keys(part)


@pytest.mark.parametrize("name", FILES)
def test_a_schema_names_its_dialect_and_itself_and_describes_all_keys(name):
    schema = SCHEMAS[name]()
    assert jsonschema.validators.validator_for(schema, default=None) is jsonschema.Draft202012Validator
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:cauc-ray:{name.replace(' ', '-')}"
    assert list(undescribed_keys(schema)) == []
    assert "Attributes:\n" not in "".join(
        definition.get("description", "")
        for definition in (schema, *schema.get("$defs", {}).values())
        if "properties" in definition
    )


def test_an_inherited_key_has_its_parents_description():
    stages = SCHEMAS["policy"]()["$defs"]
    assert stages["BaseStage"]["properties"]["temperature"] == stages["Stage"]["properties"]["temperature"]
