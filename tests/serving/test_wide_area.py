"""An edge and its cloud, a process each, under load over a link that is slow, breaks connections and is cut."""

import json
import os
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest
import synthetic
from asking import Command, http, infer, outputs_of, until
from fleet_source import Key, Source, with_fleet
from link import Link
from runs import python_model, saved_model, write_pool

import cauc_ray
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

# The full size: CAUC_CUTS=4 CAUC_CUT_S=60.
N_CUTS, CUT_S = int(os.environ.get("CAUC_CUTS", "2")), float(os.environ.get("CAUC_CUT_S", "15"))
# Between cuts, at random.
WHOLE_S = (12.0, 18.0)
TIMEOUT_S = 5.0
# 200 ms each way, 1 Mbit/s, and a fault on 30 % of connections.
LINK = {"delay_s": 0.2, "bytes_per_s": 125_000, "stall_share": 0.15, "reset_share": 0.15}
N_CLIENTS, PAUSE_S, N_ROWS = 4, 0.25, 3
SEED = 20


@dataclass(frozen=True)
class Asked:
    """A request: its rows, when it was made, how long it took, and what came."""

    rows: np.ndarray
    at_s: float
    took_s: float
    status: int
    content: dict


class Deployment:
    """A table of three models: the edge has the first two, the cloud the last, with a canary."""

    def __init__(self, folder, shell):
        longest_s = N_CUTS * CUT_S + (N_CUTS + 1) * WHOLE_S[1] + 30
        chains = synthetic.write_table(folder / "LOGITS", n=int(longest_s * N_CLIENTS / PAUSE_S * N_ROWS))
        self.folder, self.shell, self.test = folder, shell, chains["test"]
        self.ids = np.array([f"test-{example}" for example in self.test.example_ids])
        part = {name: synthetic.rows_of(chains[name], np.arange(1000)) for name in ("calibration", "validation")}
        self.policy = fit_rf(part["calibration"], part["validation"], ThresholdRule(threshold=0.8))
        self.expected, self.computed = replay(self.policy, self.test), folder / "computed"
        stops = list(islice(synthetic.steps(self.policy, self.test.logits), 2))
        self.alone = np.where(stops[0].accepted, stops[0].predictions, stops[1].predictions)
        self.computed.touch()

    def cloud(self):
        folder = self.folder / "cloud"
        folder.mkdir()
        large = cauc_ray.fit(self.folder / "LOGITS", models=["m2"], threshold=0.5)
        large.save(folder / "policy.json")
        large.with_threshold(0.4).save(folder / "canary.json")
        table = {"logits": str(self.folder / "LOGITS" / "model=m2" / "split=test"), "log": str(self.computed)}
        stage = {"name": "m2", "model": python_model("saved_and_logged", **table), "batch_size": 64}
        serving = {"policies": [{"file": "canary.json", "share": 0.3}]}
        inputs = {"example_id": {"datatype": "BYTES"}}
        write_pool(folder, [stage], task="classification", inputs=inputs, serving=serving)
        return self.started(folder, "--name", "large", *self.shell)

    def edge(self, url, source, key):
        folder = self.folder / "edge"
        folder.mkdir()
        self.policy.save(folder / "policy.json")
        models = {name: saved_model(name, logits=self.folder / "LOGITS") for name in ("m0", "m1")}
        models["m2"] = {"kind": "remote", "url": url, "model": "large"}
        serving = {"batch_size": 16, "timeout_s": TIMEOUT_S}
        stages = [{"name": name, "model": model, "serving": serving} for name, model in models.items()]
        fleet = {"policy": f"{source}/policy.json", "public_key": key, "report": f"{url}/v2/models/large/fleet"}
        with_fleet(write_pool(folder, stages, on_failure="degrade"), **fleet, every_s=2.0)
        return self.started(folder, "--name", "edge", "--local")

    def started(self, folder, *arguments):
        with open(folder / "log", "w") as log:
            return Command(folder, "--port", "0", *arguments, errors=log)


class Clients:
    """Ask a service steadily, each client its next rows a moment after it has its answer."""

    def __init__(self, url, ids):
        self.asked = []
        self._url, self._ids, self._ends = url, ids, threading.Event()
        self._rows, self._lock = iter(np.arange(len(ids)).reshape(-1, N_ROWS)), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(N_CLIENTS)]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error):
        self._ends.set()
        for thread in self._threads:
            thread.join(6 * TIMEOUT_S)
        assert not any(thread.is_alive() for thread in self._threads)

    def _run(self, number):
        time.sleep(number * PAUSE_S / N_CLIENTS)
        while not self._ends.wait(PAUSE_S):
            with self._lock:
                rows = next(self._rows)
            at_s = time.monotonic()
            columns, outputs = (
                {"example_id": self._ids[rows].tolist()},
                ("prediction", "stage", "confidence", "degraded"),
            )
            status, content = infer(self._url, "edge", columns, outputs)
            self.asked.append(Asked(rows, at_s, time.monotonic() - at_s, status, content))


def keys_by_row(sent):
    """Return the idempotency keys of the requests that had a row and have come through a link."""
    keys = defaultdict(set)
    for connection in sent:
        for request in re.split(rb"(?=POST /v2/models/large/infer)", bytes(connection)):
            for row in set(re.findall(rb"test-\d-\d{5}", request)):
                keys[row.decode()].add(re.search(rb"(?i)idempotency-key: (\w+)", request)[1])
    return keys


def answered_by_stage(url):
    """Return how many rows each stage has answered, by what has become of them."""
    text = http("GET", f"{url}/metrics")[1].decode()
    found = Counter()
    for labels, n in re.findall(r"^cauc_serve_rows_total\{(.*?)\} (\S+)$", text, re.MULTILINE):
        own = dict(re.findall(r'(\w+)="(.*?)"', labels))
        found[own["stage"], own["outcome"]] += int(float(n))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300 + 2 * N_CUTS * (CUT_S + WHOLE_S[1]))
@pytest.mark.parametrize("shell", [["--local"], []], ids=["local", "ray"])
def test_whatever_the_link_does_each_row_is_answered_once_in_time_and_right(tmp_path, shell):
    rng, own = np.random.default_rng(SEED), Deployment(tmp_path, shell)
    source, key = Source(), Key(tmp_path)
    source.files = key.signed(own.policy)
    cuts, processes = [], [own.cloud()]
    try:
        port = int(processes[0].url.rsplit(":", 1)[1])
        source_port = source.server.server_address[1]
        with Link(port, **LINK, seed=SEED, records=True) as link, Link(source_port, **LINK, seed=SEED) as other:
            processes.append(edge := own.edge(link.url, other.url, key.public_file))
            with Clients(edge.url, own.ids) as clients:
                for _ in range(N_CUTS):
                    time.sleep(rng.uniform(*WHOLE_S))
                    began = time.monotonic()
                    link.cut(), other.cut()
                    time.sleep(CUT_S)
                    link.restore(), other.restore()
                    cuts.append((began, time.monotonic()))
                time.sleep(WHOLE_S[0])
            n_rows = N_ROWS * len(clients.asked)
            by_stage = answered_by_stage(edge.url)
            fleet = f"{processes[0].url}/v2/models/large/fleet"
            until(lambda: json.loads(http("GET", fleet)[1])["edges"], 60)
        assert edge.process.poll() is None
        code, *_ = edge.ended(signal.SIGTERM)
    finally:
        for process in processes:
            process.kill()
        source.close()
    assert code == 0
    log = (tmp_path / "edge" / "log").read_text()
    assert "loaded again" not in log
    assert "drifted" not in log  # an outage is none

    # Each row is answered, as the replay does or as the edge alone, and none is computed twice for one call.
    assert {one.status for one in clients.asked} == {200}
    assert by_stage["m0", "accepted"] + by_stage["m0", "deferred"] == n_rows
    rows = np.concatenate([one.rows for one in clients.asked])
    answers = {
        name: np.concatenate([outputs_of(one.content)[name] for one in clients.asked])
        for name in ("prediction", "stage", "confidence", "degraded")
    }
    degraded, expected = answers["degraded"].astype(bool), own.expected
    whole = rows[~degraded]
    assert np.array_equal(answers["prediction"][~degraded], expected.predictions[whole])
    assert np.array_equal(answers["stage"][~degraded], expected.stages[whole])
    assert np.array_equal(answers["confidence"][~degraded], expected.confidences[whole].astype(np.float32))
    assert (expected.stages[rows[degraded]] == 2).all()
    assert (answers["stage"][degraded] == 1).all()
    assert np.array_equal(answers["prediction"][degraded], own.alone[rows[degraded]])
    computed = Counter(row for line in own.computed.read_text().splitlines() for row in json.loads(line))
    keys = keys_by_row(link.sent)
    assert all(n <= len(keys[row]) for row, n in computed.items())
    assert set(own.ids[whole[expected.stages[whole] == 2]]) <= set(computed)

    # In time, whole while the link works, and soon after it works again.
    at_s, took_s = (np.array([getattr(one, name) for one in clients.asked]) for name in ("at_s", "took_s"))
    assert np.quantile(took_s, 0.99) < TIMEOUT_S + 0.5
    reached = np.array([bool((expected.stages[one.rows] == 2).any()) for one in clients.asked])
    is_degraded = np.array([one.content["parameters"]["degraded"] for one in clients.asked])
    away = np.array([any(began - TIMEOUT_S < at < ended + TIMEOUT_S for began, ended in cuts) for at in at_s])
    back_s = [float((at_s + took_s)[reached & ~is_degraded & (at_s > ended)].min() - ended) for _, ended in cuts]
    late_s = [
        max([float(at - ended) for at in at_s[is_degraded] if ended < at < ended + WHOLE_S[0]], default=0.0)
        for _, ended in cuts
    ]
    found = {
        "requests": len(at_s),
        "rows": n_rows,
        "rows_reaching_the_cloud": len(set(computed)),
        "rows_computed": sum(computed.values()),
        "most_keys_of_a_row": max(map(len, keys.values())),
        "connections": link.n_connections,
        "degraded_share_while_whole": float(is_degraded[reached & ~away].mean()),
        "quantiles_s": np.quantile(took_s, [0.5, 0.9, 0.99, 1.0]).round(3).tolist(),
        "quantiles_s_while_cut": np.quantile(
            took_s[[any(began < at < ended for began, ended in cuts) for at in at_s]], [0.5, 0.99, 1.0]
        )
        .round(3)
        .tolist(),
        "first_whole_answer_s_after_a_cut": back_s,
        "last_degraded_request_s_after_a_cut": late_s,
    }
    (tmp_path / "found.json").write_text(json.dumps(found, indent=1))  # for people
    assert found["degraded_share_while_whole"] < 0.2
    assert max(back_s) < WHOLE_S[0]
