"""A saved chain that is served with several policies, and clients that report which answers were right."""

import json
from collections import Counter
from contextlib import contextmanager

import numpy as np
import synthetic
from asking import FEEDBACK, asked, edit_pool, http, send_labels, until
from runs import saved_pool

import cauc_ray
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

N = 4000


class SavedRows:
    """Rows of chains, which saved models answer.   labels: of all rows, in their order."""

    def __init__(self, folder, *chains):
        self.folder, self.labels = folder, np.concatenate([chain.labels for chain in chains])
        self.ids = [f"row-{row}" for row in range(len(self.labels))]
        for stage, model in enumerate(chains[0].models):
            logits = [row for chain in chains for row in chain.logits[stage]]
            table = {"example_ids": self.ids, "labels": self.labels, "logits": logits, "costs": None}
            write_logits(folder / "LOGITS", model, "test", **table)

    def pool(self, **serving):
        path = saved_pool(self.folder, serving={"batch_size": 64, "timeout_s": 20})
        return edit_pool(path, serving=serving)

    def send(self, service, rows, *, labelled=True):
        """Ask for rows and report their labels; return the response, and what the service says of the labels."""
        status, content = asked(service, [self.ids[row] for row in rows], None, FEEDBACK)
        assert status == 200, content
        return content, send_labels(service.url, "six", content, self.labels[rows]) if labelled else None


class Canaries(SavedRows):
    """A pool of a chain, its rows, and policies: in force, clearly better at a higher cost, and clearly worse."""

    def __init__(self, folder):
        self.test = synthetic.chain(21, N)
        super().__init__(folder, self.test)
        rule = ThresholdRule(budget=6.0)
        self.policy = fit_rf(synthetic.chain(22, 1500), synthetic.chain(22, 1500, shift=1), rule)
        self.better, self.worse = self.policy.with_threshold(0.9), self.policy.with_threshold(0.0)

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
            content, _ = self.send(service, rng.integers(N, size=size), labelled=labelled)
            n_answers[content["parameters"]["policy_id"]] += 1
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
