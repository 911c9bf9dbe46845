"""A saved chain that is served with several policies, and clients that report which answers were right."""

import json
import time
from contextlib import contextmanager

import numpy as np
import synthetic
import yaml
from asking import ask, http
from runs import saved_pool

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

N = 4000
DEADLINE_S = 90.0
# Of an answer, as feedback wants them.
OUTPUTS = ("prediction", "confidence", "stage")


class Canaries:
    """A pool of a chain, its rows, and policies: in force, clearly better at a higher cost, and clearly worse."""

    def __init__(self, folder):
        self.folder, self.test = folder, synthetic.chain(21, N)
        self.ids = [f"row-{row}" for row in range(N)]
        for stage, model in enumerate(self.test.models):
            logits = list(self.test.logits[stage])
            own = {"example_ids": self.ids, "labels": self.test.labels, "logits": logits, "costs": None}
            write_logits(folder / "LOGITS", model, "test", **own)
        rule = ThresholdRule(budget=6.0)
        self.policy = fit_rf(synthetic.chain(22, 1500), synthetic.chain(22, 1500, shift=1), rule)
        self.better, self.worse = self.policy.with_threshold(0.9), self.policy.with_threshold(0.0)

    def pool(self, **serving):
        path = saved_pool(self.folder, serving={"batch_size": 64, "timeout_s": 20})
        content = yaml.safe_load(path.read_text())
        content["serving"] = serving
        path.write_text(yaml.safe_dump(content))
        return path

    @contextmanager
    def served(self, *, local=True, **serving):
        """Serve the policy in force; serving: of the pool."""
        with cauc_ray.serve(self.pool(**serving), self.policy, port=0, name="six", local=local) as service:
            yield service

    def accuracy(self, policy):
        found = replay(policy, self.test)
        return float((found.predictions == self.test.labels).mean())

    def traffic(self, service, rng, *, n_requests=10, size=40, labelled=True):
        """Ask for rows drawn at random, report their labels, and return the ids of the policies that answered."""
        had = []
        for _ in range(n_requests):
            rows = rng.integers(N, size=size)
            outputs, parameters = ask(
                service, [self.ids[row] for row in rows], None, ("prediction", "confidence", "stage")
            )
            had.append(parameters["policy_id"])
            if labelled:
                own = {name: parameters[name] for name in ("policy_id", "answer_id")}
                said = {name: values.tolist() for name, values in outputs.items()}
                body = {**own, **said, "label": self.test.labels[rows].tolist()}
                status, content, _ = http("POST", f"{service.url}/v2/models/six/feedback", body)
                assert status == 200, content
        return had

    def until_decided(self, service, rng, **options):
        """Send traffic until there is a decision by rule; return its receipt, and how many rows were sent."""
        deadline, n = time.monotonic() + DEADLINE_S, 0
        while True:
            n += 40 * len(self.traffic(service, rng, **options))
            if (found := policies(service)["receipts"]) and found[-1]["by"] == "rule":
                return found[-1], n
            assert time.monotonic() < deadline, policies(service)["candidates"]


def policies(service):
    """Return what the service says of its policies, but for their content."""
    content = json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1])
    del content["policy"]
    for candidate in content["candidates"]:
        del candidate["policy"]
    return content


def seeded(seed):
    return np.random.default_rng([9, seed])
