"""A saved chain that is served with several policies, and clients that report which answers were right."""

import json
from collections import Counter
from contextlib import contextmanager

import numpy as np
import synthetic
import yaml
from asking import FEEDBACK, asked, http, send_labels, until
from runs import saved_pool

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

N = 4000


class Canaries:
    """A pool of a chain, its rows, and policies: in force, clearly better at a higher cost, and clearly worse."""

    def __init__(self, folder):
        self.folder, self.test = folder, synthetic.chain(21, N)
        self.ids = [f"row-{row}" for row in range(N)]
        for stage, model in enumerate(self.test.models):
            table = {"example_ids": self.ids, "labels": self.test.labels, "logits": list(self.test.logits[stage])}
            write_logits(folder / "LOGITS", model, "test", **table, costs=None)
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
        return float((replay(policy, self.test).predictions == self.test.labels).mean())

    def traffic(self, service, rng, *, n_requests=10, size=40, labelled=True):
        """Ask for rows drawn at random, report their labels, and count the answers of each policy by its id."""
        n_answers = Counter()
        for _ in range(n_requests):
            rows = rng.integers(N, size=size)
            status, content = asked(service, [self.ids[row] for row in rows], None, FEEDBACK)
            assert status == 200, content
            n_answers[content["parameters"]["policy_id"]] += 1
            if labelled:
                send_labels(service.url, "six", content, self.test.labels[rows])
        return n_answers

    def decision(self, service, rng, **options):
        """Send traffic until there is a decision by rule; return its receipt."""
        receipts = []

        def decided():
            nonlocal receipts
            self.traffic(service, rng, **options)
            receipts = policies(service)["receipts"]
            return receipts and receipts[-1]["by"] == "rule"

        until(decided)
        return receipts[-1]


def policies(service):
    """Return what the service says of its policies without their content."""
    content = json.loads(http("GET", f"{service.url}/v2/models/six/policy")[1])
    del content["policy"]
    if content["candidate"] is not None:
        del content["candidate"]["policy"]
    return content


def seeded(seed):
    return np.random.default_rng([9, seed])
