import copy
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

PATH = Path(__file__).parents[2] / "deployments" / "cluster.yaml"
TIERS = ("head", "edge", "small-gpu", "large-gpu")


def load():
    return yaml.safe_load(PATH.read_text())


def test_rays_launcher_takes_it():
    config = load()
    validate_config(prepare_config(copy.deepcopy(config)))
    kinds = config["available_node_types"]
    assert {name: kind["labels"] for name, kind in kinds.items()} == {tier: {"tier": tier} for tier in TIERS}
    assert config["head_node_type"] == "head"
    assert kinds["head"]["resources"] == {"CPU": 0}
    workers = [kind for name, kind in kinds.items() if name != "head"]
    assert sum(kind["max_workers"] for kind in workers) == config["max_workers"]
    assert all(1 <= kind["min_workers"] < kind["max_workers"] for kind in workers)


@pytest.mark.parametrize("place", [(), ("docker",), ("available_node_types", "edge")])
def test_keys_that_the_launcher_does_not_know_are_refused(place):
    config = load()
    section = config
    for step in place:
        section = section[step]
    section["lables"] = {}
    with pytest.raises(jsonschema.ValidationError, match="lables"):
        validate_config(prepare_config(config))


def test_nodes_show_the_token_and_stand_in_a_security_group_of_ones_own():
    config = load()
    assert list(config["file_mounts"].items()) == [("/home/ray/.ray/auth_token", "~/.ray/auth_token")]
    # Without one the launcher makes a group that lets all the world in by SSH.
    for kind in config["available_node_types"].values():
        assert kind["node_config"]["SecurityGroupIds"]
    assert "security_group" not in config["provider"]
