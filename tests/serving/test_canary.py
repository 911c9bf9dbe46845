"""A candidate policy on a share of requests: which policy answers, changes by hand, and decisions by rule."""

import json
import os
import re
import signal
from contextlib import contextmanager

import pytest
from asking import (
    FEEDBACK,
    answered,
    asked,
    clients,
    http,
    outputs_of,
    put_policy,
    refused,
    require_replay,
    send_labels,
    until,
)
from canaries import Canaries, policies, seeded
from replicas import replicas_of

import cauc_ray
from cauc_ray.errors import PolicyError
from cauc_ray.policies.trace import replay

KINDS = ("rows", "labelled")


@pytest.fixture(scope="module")
def canaries(tmp_path_factory):
    return Canaries(tmp_path_factory.mktemp("canaries"))


@pytest.fixture(scope="module")
def by_hand(canaries):
    """Serve with a candidate from the start, on which nobody decides but the tests."""
    canaries.better.save(canaries.folder / "better.json")
    candidate = {"file": "better.json", "share": 0.25}
    with canaries.served(candidate=candidate, canary={"decide": "by-hand"}) as service:
        yield service


@pytest.fixture
def service(canaries, by_hand):
    """Return that service in the state in which it starts."""
    cauc_ray.set_policy(canaries.policy, url=by_hand.url)
    cauc_ray.set_policy(canaries.better, url=by_hand.url, share=0.25)
    return by_hand


def shares(service):
    return policies(service)["shares"]


def test_a_candidate_of_the_pool_has_its_share_and_versions_are_policies(canaries, by_hand):
    active, candidate = canaries.policy, canaries.better
    assert shares(by_hand) == {active.id: 0.75, candidate.id: 0.25}
    n_answers = canaries.traffic(by_hand, seeded(0), n_requests=200, size=2, labelled=False)
    assert set(n_answers) == {active.id, candidate.id}
    assert 20 <= n_answers[candidate.id] <= 80  # of 200 at 0.25: this far off once in a million
    metadata = json.loads(http("GET", f"{by_hand.url}/v2/models/six")[1])
    assert metadata["versions"] == [active.id, candidate.id]
    for policy in (active, candidate):
        expected, columns = replay(policy, canaries.test), {"example_id": canaries.ids[:50]}
        content = answered(by_hand.url, f"six/versions/{policy.id}", columns, ("stage", "prediction"))
        assert (content["model_version"], content["parameters"]["policy_id"]) == (policy.id, policy.id)
        require_replay(outputs_of(content), expected, slice(50))
        about = json.loads(http("GET", f"{by_hand.url}/v2/models/six/versions/{policy.id}")[1])
        assert about["parameters"]["policy_id"] == policy.id
    status, error = refused(by_hand, b"{}", path="/v2/models/six/versions/0123456789ab/infer")
    assert (status, active.id in error) == (404, True)


def test_a_session_keeps_its_policy(canaries, service):
    def policy_of(session):
        return asked(service, canaries.ids[:1], {"session": session})[1]["parameters"]["policy_id"]

    first = {f"user {number}": policy_of(f"user {number}") for number in range(40)}
    assert set(first.values()) == {canaries.policy.id, canaries.better.id}
    assert {session: policy_of(session) for session in first} == first
    assert asked(service, canaries.ids[:1], {"session": 3})[0] == 400


def test_changes_by_hand_and_their_receipts(canaries, service):
    active, better, worse = canaries.policy, canaries.better, canaries.worse
    start = policies(service)["version"]
    assert cauc_ray.set_policy(url=service.url, share=0.5)["shares"] == {active.id: 0.5, better.id: 0.5}
    report = cauc_ray.set_policy(url=service.url, rollback=True)
    assert (report["policy_id"], report["shares"]) == (active.id, {active.id: 1.0})
    assert cauc_ray.set_policy(worse, url=service.url, share=0.25)["shares"][active.id] == 0.75
    report = cauc_ray.set_policy(url=service.url, promote=True)
    assert (report["policy_id"], report["previous"], report["shares"]) == (worse.id, active.id, {worse.id: 1.0})
    content = policies(service)
    assert content["candidate"] is None
    names = ("version", "decision", "policy_id", "by", "rule")
    assert [tuple(receipt[name] for name in names) for receipt in content["receipts"][-4:]] == [
        (start + 1, "share", better.id, "hand", None),
        (start + 2, "rollback", better.id, "hand", None),
        (start + 3, "start", worse.id, "hand", None),
        (start + 4, "promote", worse.id, "hand", None),
    ]
    assert content["receipts"][-1]["evidence"]["candidate"].keys() == {"rows", "cost", "labelled", "accuracy"}
    # The status of a version that has ended, and the tag of one that was changed meanwhile.
    assert refused(service, b"{}", path=f"/v2/models/six/versions/{better.id}/infer")[0] == 404
    assert put_policy(service, {"share": 0.1}, **{"If-Match": '"0-0"'})[0] == 412
    assert cauc_ray.set_policy(url=service.url, threshold=0.5, share=0.1)["shares"][worse.id] == 0.9
    assert cauc_ray.set_policy(url=service.url, share=0.0)["shares"] == {worse.id: 1.0}


def changed(policy, **fields):
    """Return a policy's content with fields set, `kind` in all stages."""
    content = policy.model_dump(mode="json")
    if kind := fields.pop("kind", None):
        content |= {"logit_kind": kind, "stages": [{**stage, "logit_kind": kind} for stage in content["stages"]]}
    return content | fields


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({}, 400, "a policy, a threshold or a budget"),
        ({"policies": "x"}, 400, "unknown key 'policies'"),
        (["policy"], 400, "should be an object"),
        ({"threshold": 0.5, "budget": 3.0}, 400, "not both"),
        ({"threshold": "high"}, 400, "threshold"),
        ({"threshold": -1.0}, 409, "threshold"),
        ({"budget": 0.1}, 409, "cheapest operating point"),
        ({"policy": "nowhere.json"}, 400, "policy"),
        ({"policy": {"format": "cauc-policy/2"}}, 409, "cauc-policy/1"),
        ({"policy": {"cost_unit": "USD"}}, 409, "costs in USD"),
        ({"policy": {"logit_kind": "other"}}, 409, "logit_kind 'other'"),
        ({"policy": {"kind": "surrogate"}}, 409, "of kind 'surrogate'"),
        ({"share": 1.0, "threshold": 0.5}, 400, "share"),
        ({"promote": True, "rollback": True}, 400, "one change"),
        ({"share": 0.0, "threshold": 0.51}, 409, "no such candidate"),
    ],
)
def test_an_invalid_change_is_refused_in_one_line(canaries, service, change, status, reason):
    with pytest.raises(PolicyError, match="gives the same answers"):
        cauc_ray.set_policy(canaries.policy, url=service.url, share=0.1)
    before = policies(service)["version"]
    if isinstance(change, dict) and isinstance(change.get("policy"), dict):
        change = {"policy": changed(canaries.policy, **change["policy"])}
    answered, content, _ = put_policy(service, change)
    assert (answered, reason in content["error"], "\n" in content["error"]) == (status, True, False), content
    assert policies(service)["version"] == before


def test_feedback_and_costs_are_evidence_but_for_answers_whose_policy_was_chosen(canaries, service):
    rng = seeded(3)
    n_answers = canaries.traffic(service, rng, n_requests=100, size=10)
    pinned = {"example_id": canaries.ids[:50]}
    content = answered(service.url, f"six/versions/{canaries.better.id}", pinned, FEEDBACK)
    send_labels(service.url, "six", content, canaries.test.labels[:50])
    roles = {"candidate": canaries.better, "incumbent": canaries.policy}

    def all_count():
        # Rows of one policy count once there are some of the other.
        n_answers.update(canaries.traffic(service, rng, n_requests=1, size=10))
        n_rows = {role: 10 * n_answers[policy.id] for role, policy in roles.items()}
        evidence = policies(service)["candidate"]["evidence"]
        return all({role: evidence[role][name] for role in roles} == n_rows for name in ("rows", "labelled"))

    until(all_count)  # what a router has seen reaches the others a moment later
    evidence = policies(service)["candidate"]["evidence"]
    for role, policy in roles.items():
        assert abs(evidence[role]["accuracy"] - canaries.accuracy(policy)) < 0.2
    assert evidence["candidate"]["cost"] > evidence["incumbent"]["cost"]


def test_shares_and_rows_of_each_policy_are_metrics(canaries, service):
    canaries.traffic(service, seeded(4), n_requests=40, size=1)

    def series(name):
        text = http("GET", f"{service.url}/metrics")[1].decode()
        return dict(re.findall(rf'^cauc_serve_{name}{{[^}}]*(?:policy|role)="(\w+)"}} (.*)$', text, re.M))

    active, candidate = canaries.policy.id, canaries.better.id
    assert series("policy") == {active: "0.75", candidate: "0.25"}
    assert set(series("policy_rows_total")) == {"incumbent", "candidate"}
    put_policy(service, {"promote": True})
    until(lambda: series("policy") == {candidate: "1.0"})  # no series of a policy outlives it


@contextmanager
def checked_clients(canaries, service):
    """Ask all the time; afterwards, hold each answer against the replay of the policy that it names."""
    policies = (canaries.policy, canaries.better, canaries.worse)
    expected = {policy.id: replay(policy, canaries.test) for policy in policies}

    def asks(rng):
        rows = rng.integers(len(canaries.ids), size=20)
        return rows, *asked(service, [canaries.ids[row] for row in rows])

    with clients(asks, 2) as answers:
        yield
        until(lambda: len(answers) > 20)
    for rows, status, content in answers:
        assert status == 200, content
        require_replay(outputs_of(content), expected[content["parameters"]["policy_id"]], rows)


@pytest.mark.parametrize("evidence", ["feedback", pytest.param("shadow", marks=pytest.mark.soak("full"))])
def test_a_bad_policy_is_rolled_back_and_a_good_one_promoted_without_a_wrong_answer(canaries, evidence):
    canary = {"cost_margin": 3.0, "evidence": evidence}
    with canaries.served(shadow=0.3, canary=canary) as service, checked_clients(canaries, service):
        for seed, (policy, decision) in enumerate(((canaries.worse, "rollback"), (canaries.better, "promote"))):
            cauc_ray.set_policy(policy, url=service.url, share=0.3)
            receipt = canaries.decision(service, seeded(seed), labelled=evidence == "feedback")
            assert (receipt["decision"], receipt["policy_id"]) == (decision, policy.id)
            cauc_ray.set_policy(url=service.url, threshold=canaries.policy.threshold)


@pytest.mark.soak("faults")
def test_two_routers_add_up_their_evidence_and_switch_together(canaries, ray_session):
    router, rng = {"replicas": {"min": 2}, "resources": {"num_cpus": 0.5}}, seeded(7)
    with canaries.served(local=False, router=router, canary={"cost_margin": 3.0, "min_rows": 2000}) as service:
        near = canaries.policy.with_threshold(canaries.policy.threshold + 0.01)  # not to be promoted so soon
        cauc_ray.set_policy(near, url=service.url, share=0.5)
        n_answers = canaries.traffic(service, rng, n_requests=60)

        def all_counted():
            """Each router adds its evidence every second; a few rows wait there for rows of the other policy."""
            n_answers.update(canaries.traffic(service, rng, n_requests=2))
            evidence = policies(service)["candidate"]["evidence"]
            roles = (("candidate", near), ("incumbent", canaries.policy))
            counts = [(evidence[role][what], 40 * n_answers[policy.id]) for role, policy in roles for what in KINDS]
            assert all(counted <= sent for counted, sent in counts)
            return all(counted >= 0.9 * sent for counted, sent in counts)  # one router alone has about half

        until(all_counted)
        cauc_ray.set_policy(url=service.url, rollback=True)

        cauc_ray.set_policy(canaries.better, url=service.url, share=0.3)
        killed = replicas_of("Router")[0]
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(set(replicas_of("Router")) - {killed}) == 2)
        receipt = canaries.decision(service, rng)
        assert (receipt["decision"], receipt["policy_id"]) == ("promote", canaries.better.id)
        n_answers = canaries.traffic(service, rng, n_requests=40, size=1, labelled=False)
        assert n_answers == {canaries.better.id: 40}
        decisions = [receipt["decision"] for receipt in policies(service)["receipts"]]
        assert decisions == ["start", "rollback", "start", "promote"]
