"""A cascade over two nodes, deployed as a configuration over REST: placement, and the loss of a node."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from asking import Chain, free_port, outputs_of, require_replay
from runs import MODELS, saved_model, write_pool

SCRIPT = Path(__file__).parent / "edge_and_cloud.py"


@pytest.mark.soak("faults")
def test_stages_run_where_the_pool_places_them_and_answers_are_degraded_while_the_cloud_is_gone(tmp_path):
    chain = Chain(tmp_path)
    for name, policy in chain.policies.items():
        policy.save(tmp_path / f"{name}.json")
    (tmp_path / "ids.json").write_text(json.dumps(chain.ids.tolist()))
    stages = [
        {
            "name": model,
            "model": saved_model(model),
            "resources": {"num_cpus": 0.5, "labels": {"tier": tier}},
            "serving": {"timeout_s": 2.0},
        }
        for model, tier in zip(MODELS, ("edge", "edge", "cloud"), strict=True)
    ]
    router = {"resources": {"num_cpus": 0.5, "labels": {"tier": "edge"}}}
    write_pool(tmp_path, stages, on_failure="degrade", serving={"router": router})
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(free_port()), str(free_port())]
    tests = SCRIPT.parents[1]
    path = os.pathsep.join([str(tests.parent), str(tests / "execution"), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=Path.cwd())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]

    report = json.loads((tmp_path / "report.json").read_text())
    edge, cloud = report["nodes"]["edge"], report["nodes"]["cloud"]
    assert report["placement"] == {"Router": [edge], "stage:m0": [edge], "stage:m1": [edge], "stage:m2": [cloud]}
    for answer, name in ((report["first"], "rf"), (report["changed"], "base"), (report["healed"], "base")):
        assert answer["parameters"]["policy_id"] == chain.policies[name].id
        require_replay(outputs_of(answer), chain.expected(name))
    for statuses in ("until_changed", "until_degraded", "until_healed"):
        assert set(report[statuses]) == {200}
    assert np.array_equal(outputs_of(report["degraded"])["degraded"], chain.expected("base").stages == 2)
    assert "m2" in report["degraded"]["parameters"]["reason"]
    assert report["without_cloud"] == [[200, True]] * 2
