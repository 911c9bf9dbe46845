"""An edge and its cloud, a process each, under load over a link that is slow, breaks connections and is cut."""

import json
import os
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from itertools import islice

import numpy as np
import pytest
import synthetic
from asking import Command, clients, infer, outputs_of, require_replay, until, until_answered
from link import Link
from runs import python_model, saved_model, write_pool

import cauc_ray
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

# The full size: CAUC_CUTS=4 CAUC_CUT_S=60.
N_CUTS, CUT_S = int(os.environ.get("CAUC_CUTS", "2")), float(os.environ.get("CAUC_CUT_S", "15"))
TIMEOUT_S = 5.0
# 200 ms each way, 1 Mbit/s, and a fault on 30 % of connections.
LINK = {"delay_s": 0.2, "bytes_per_s": 125_000, "stall_share": 0.15, "reset_share": 0.15}
# Requests before, between and after cuts.
N_CLIENTS, PAUSE_S, N_ROWS, N_BETWEEN = 4, 0.25, 3, 150
SEED = 20
OUTPUTS = ("prediction", "stage", "confidence", "degraded")


class Deployment:
    """A table of three models: the edge has the first two, the cloud the last, with a canary."""

    def __init__(self, folder, shell):
        n_rows = N_ROWS * ((N_CUTS + 1) * N_BETWEEN + int(3 * N_CUTS * CUT_S * N_CLIENTS / PAUSE_S))
        chains = synthetic.write_table(folder / "LOGITS", n=n_rows)
        self.folder, self.shell, self.test = folder, shell, chains["test"]
        self.ids = np.array([f"test-{example}" for example in self.test.example_ids])
        part = {name: synthetic.rows_of(chains[name], np.arange(1000)) for name in ("calibration", "validation")}
        self.policy = fit_rf(part["calibration"], part["validation"], ThresholdRule(threshold=0.8))
        self.expected, self.computed = replay(self.policy, self.test), folder / "computed"
        first, second = islice(synthetic.steps(self.policy, self.test.logits), 2)
        self.without_cloud = np.where(first.accepted, first.predictions, second.predictions)
        self.computed.touch()

    def cloud(self):
        folder = self.folder / "cloud"
        folder.mkdir()
        large = cauc_ray.fit(self.folder / "LOGITS", models=["m2"], threshold=0.5)
        large.save(folder / "policy.json")
        large.with_threshold(0.4).save(folder / "canary.json")
        table = {"logits": str(self.folder / "LOGITS" / "model=m2" / "split=test"), "log": str(self.computed)}
        stage = {"name": "m2", "model": python_model("saved_and_logged", **table), "batch_size": 64}
        serving = {"candidate": {"file": "canary.json", "share": 0.3}}
        inputs = {"example_id": {"datatype": "BYTES"}}
        write_pool(folder, [stage], task="classification", inputs=inputs, serving=serving)
        return self.started(folder, "--name", "large", *self.shell)

    def edge(self, url):
        folder = self.folder / "edge"
        folder.mkdir()
        self.policy.save(folder / "policy.json")
        models = {name: saved_model(name, logits=self.folder / "LOGITS") for name in ("m0", "m1")}
        models["m2"] = {"kind": "remote", "url": url, "model": "large"}
        serving = {"batch_size": 16, "timeout_s": TIMEOUT_S}
        stages = [{"name": name, "model": model, "serving": serving} for name, model in models.items()]
        write_pool(folder, stages, on_failure="degrade")
        return self.started(folder, "--name", "edge", "--local")

    def started(self, folder, *arguments):
        with open(folder / "log", "w") as log:
            return Command(folder, "--port", "0", *arguments, errors=log)


def asks_of(url, ids):
    """Return what asks for the next rows, a moment after the answer before: when, which, and what came."""
    next_rows, lock = iter(np.arange(len(ids)).reshape(-1, N_ROWS)), threading.Lock()

    def asks(rng):
        time.sleep(PAUSE_S)
        with lock:
            rows = next(next_rows)
        sent_at_s = time.monotonic()
        return sent_at_s, rows, *infer(url, "edge", {"example_id": ids[rows].tolist()}, OUTPUTS)

    return asks


@pytest.mark.soak("links")
@pytest.mark.timeout(600 + 4 * N_CUTS * CUT_S)
@pytest.mark.parametrize("shell", [["--local"], []], ids=["local", "ray"])
def test_whatever_the_link_does_every_row_is_answered_once_and_right(tmp_path, shell):
    deployed = Deployment(tmp_path, shell)
    expected = deployed.expected

    def cloud_answers(after_s):
        """Say whether a request that was sent after a time needed the cloud and had it."""
        return any(
            sent_at_s > after_s and (expected.stages[rows] == 2).any() and not content["parameters"]["degraded"]
            for sent_at_s, rows, _, content in list(answers)
        )

    with ExitStack() as ending:
        cloud = deployed.cloud()
        ending.callback(cloud.close)
        port = int(cloud.url.rsplit(":", 1)[1])
        with Link(port, **LINK, seed=SEED) as link:
            edge = deployed.edge(link.url)
            ending.callback(edge.close)
            with clients(asks_of(edge.url, deployed.ids), N_CLIENTS) as answers:
                for _ in range(N_CUTS):
                    until_answered(answers, N_BETWEEN)
                    link.cut()
                    time.sleep(CUT_S)
                    link.restore()
                    until(partial(cloud_answers, time.monotonic()))
                until_answered(answers, N_BETWEEN)
        assert edge.process.poll() is None
        code, *_ = edge.ended(signal.SIGTERM)
    assert code == 0
    log = (tmp_path / "edge" / "log").read_text()
    assert "loaded again" not in log
    assert "drifted" not in log  # an outage is none

    # Every row is answered, as the replay does or as the edge without its cloud.
    assert {status for _, _, status, _ in answers} == {200}
    rows = np.concatenate([rows for _, rows, *_ in answers])
    outputs = {name: np.concatenate([outputs_of(content)[name] for *_, content in answers]) for name in OUTPUTS}
    degraded = outputs["degraded"].astype(bool)
    whole = rows[~degraded]
    require_replay({name: values[~degraded] for name, values in outputs.items()}, expected, whole)
    assert (expected.stages[rows[degraded]] == 2).all()
    assert (outputs["stage"][degraded] == 1).all()
    assert np.array_equal(outputs["prediction"][degraded], deployed.without_cloud[rows[degraded]])
    computed = Counter(row for line in deployed.computed.read_text().splitlines() for row in json.loads(line))
    assert set(deployed.ids[whole[expected.stages[whole] == 2]]) <= set(computed)
