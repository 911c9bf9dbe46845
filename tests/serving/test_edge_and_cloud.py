import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from synthetic import write_table

from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

SCRIPT = Path(__file__).parent / "edge_and_cloud.py"


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the script has seen, and what the replay of either policy gives."""
    folder = tmp_path_factory.mktemp("edge")
    chains = write_table(folder / "LOGITS", n=120, strengths=(1.0, 2.4))
    policies = {
        "rf": fit_rf(chains["calibration"], rule=ThresholdRule(threshold=0.8)),
        "base": fit_base(chains["calibration"], rule=ThresholdRule(threshold=0.6)),
    }
    for name, policy in policies.items():
        policy.save(folder / f"{name}.json")
    test = chains["test"]
    (folder / "ids.json").write_text(json.dumps([f"test-{example}" for example in test.example_ids]))
    stages = [
        {
            "name": model,
            "model": {"kind": "saved", "logits": "LOGITS", "model": model, "split": "test"},
            "resources": {"num_cpus": 1, "labels": {"tier": tier}},
            "serving": {"timeout_s": 2.0},
        }
        for model, tier in zip(test.models, ("edge", "cloud"), strict=True)
    ]
    router = {"resources": {"num_cpus": 1, "labels": {"tier": "edge"}}}
    content = {"name": "two", "task": "multiple-choice", "on_failure": "degrade", "stages": stages}
    (folder / "pool.yaml").write_text(yaml.safe_dump({**content, "serving": {"router": router}}))
    command = [sys.executable, str(SCRIPT), str(folder), str(free_port()), str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    expected = {name: replay(policies[name], test) for name in ("rf", "base")}
    return json.loads((folder / "found.json").read_text()), policies, expected


def values(answer, name):
    return np.array(next(output["data"] for output in answer["outputs"] if output["name"] == name))


@pytest.mark.slow
def test_stages_run_where_the_pool_places_them_and_answers_are_degraded_while_the_cloud_is_gone(seen):
    found, policies, expected = seen
    edge, cloud = found["nodes"]["edge"], found["nodes"]["cloud"]
    assert found["placement"] == {"Router": [edge], "stage:m0": [edge], "stage:m1": [cloud]}
    for answer, name in ((found["first"], "rf"), (found["changed"], "base"), (found["healed"], "base")):
        assert answer["parameters"]["policy_id"] == policies[name].id
        assert np.array_equal(values(answer, "prediction"), expected[name].predictions)
        assert np.array_equal(values(answer, "stage"), expected[name].stages)
    for seen_while in ("while_changing", "until_degraded", "until_healed"):
        assert set(found[seen_while]) == {200}
    assert np.array_equal(values(found["degraded"], "degraded"), expected["base"].stages == 1)
    assert "m1" in found["degraded"]["parameters"]["reason"]
    statuses, times, degraded = zip(*found["while_gone"], strict=True)
    assert set(statuses) == {200}
    assert all(degraded)
    assert sorted(times)[5] < 1.0  # most do not wait for what is known to be gone
