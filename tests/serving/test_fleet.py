"""Edges of a fleet: which policies they take from a web server, what they keep, and what they report."""

import gc
import json
import random
import re
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest
from asking import Command, http, infer, until
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from fleet_source import Key, Source, with_fleet
from runs import python_pool
from synthetic import chain

import cauc_ray
from cauc_ray.errors import ConfigError
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.serving import fleet

DATA = [replace(chain(31, 300, 2, (1.0, 2.0), shift=shift), models=("small", "large")) for shift in (0, 1)]
# Of one chain; all but the first are for the edge to take.
GIVEN, FIRST, SECOND = (fit_rf(*DATA, ThresholdRule(threshold=at)) for at in (0.7, 0.8, 0.6))
OTHER_CHAIN = fit_rf(replace(DATA[0], models=("tiny", "huge")), rule=ThresholdRule(threshold=0.7))


@pytest.fixture
def source():
    running = Source()
    yield running
    running.close()


@pytest.fixture
def key(tmp_path):
    return Key(tmp_path)


@pytest.fixture
def pool(tmp_path, source, key, monkeypatch):
    """Return a pool file whose edge follows the source."""
    monkeypatch.setattr(fleet, "RETRY_S", 0.005)
    return with_fleet(python_pool(tmp_path), policy=f"{source.url}/policy.json", public_key="public.pem")


def edge_of(pool, policy=GIVEN):
    return cauc_ray.serve(pool, policy, port=0, name="test", local=True)


def active(service):
    return json.loads(http("GET", f"{service.url}/v2/models/test/policy")[1])


def counted(service, name):
    """Return the sums of a metric by its labels but the model."""
    text = http("GET", f"{service.url}/metrics")[1].decode()
    lines = re.findall(rf"^cauc_serve_{name}\{{(.*?)\}} (\S+)$", text, re.MULTILINE)
    named = [(re.findall(r'(\w+)="(.*?)"', labels), float(value)) for labels, value in lines]
    return {",".join(text for label, text in labels if label != "model"): value for labels, value in named}


def changes(service, outcome):
    return counted(service, "policy_changes_total").get(outcome, 0)


def until_active(service, policy):
    until(lambda: active(service)["policy_id"] == policy.id, 20)


def flipped(content, at=100):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_an_edge_takes_what_is_signed_and_refuses_all_else(source, key, pool, tmp_path, caplog):
    other = Key(tmp_path, "other")
    good = key.signed(FIRST)
    newer = key.signed(SECOND, 60)
    not_a_policy = b'{"format": "cauc-policy/1"}'
    refused = {
        "tampered policy": (flipped(newer[0]), newer[1]),
        "tampered signature": (newer[0], flipped(newer[1], 10)),
        "signature of another policy": (newer[0], good[1]),
        "truncated policy": (newer[0][:-20], newer[1]),
        "truncated signature": (newer[0], newer[1][:40]),
        "empty policy": (b"", newer[1]),
        "empty signature": (newer[0], b""),
        "long signature": (newer[0], newer[1] + b"\n"),
        "another key": other.signed(SECOND, 60),
        "expired": key.signed(SECOND, 60, expires_in_s=-1),
        "older": key.signed(SECOND, -60),
        "without a date": key.signed(SECOND, issued_at=None),
        "of another chain": key.signed(OTHER_CHAIN, 60),
        "not a policy": (not_a_policy, key.private.sign(not_a_policy)),
        "not JSON": (b"\xff", key.private.sign(b"\xff")),
        "too large": (newer[0] + b" " * 1_000_000, newer[1]),
    }
    source.files = good
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
        for what, files in refused.items():
            source.files = good
            until(lambda: source.asked[-1] == ("/policy.json", 304), 20)
            caplog.clear()
            source.files, before = files, changes(edge, "refused")
            until(lambda n=before: changes(edge, "refused") >= n + 2, 20)
            assert active(edge)["policy_id"] == FIRST.id, what
            warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
            assert len(warnings) == 1, (what, warnings)  # once, not every time
            assert "\n" not in warnings[0]
        for files in ((None, None), (newer[0], None)):
            source.files, before = files, changes(edge, "unreachable")
            until(lambda n=before: changes(edge, "unreachable") >= n + 2, 20)
            assert active(edge)["policy_id"] == FIRST.id
        source.files = newer
        until_active(edge, SECOND)
        assert infer(edge.url, "test", {"x": [9.0]})[0] == 200


def test_a_policy_that_does_not_change_is_not_sent_again(source, key, pool):
    source.files = key.signed(FIRST)
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
        until(lambda: source.asked[-2:] == [("/policy.json", 304)] * 2)
        assert source.asked[:2] == [("/policy.json", 200), ("/policy.json.sig", 200)]
        assert {status for _, status in source.asked[2:]} == {304}
        assert active(edge)["version"] == 1


def test_files_that_are_replaced_between_two_requests_are_asked_for_again(source, key, pool):
    source.files, newer = key.signed(FIRST), key.signed(SECOND, 1)

    def replaced(path):
        source.files, source.after_get = newer, lambda path: None

    source.after_get = replaced
    with edge_of(pool) as edge:
        until_active(edge, SECOND)
        assert (changes(edge, "refused"), changes(edge, "unreachable")) == (0, 0)


def test_an_older_policy_comes_back_only_where_it_is_signed_again(source, key, pool):
    first = source.files = key.signed(FIRST)
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
        source.files = key.signed(SECOND)
        until_active(edge, SECOND)
        source.files = first
        until(lambda: changes(edge, "refused") >= 2)
        assert active(edge)["policy_id"] == SECOND.id
        source.files = key.signed(FIRST)
        until_active(edge, FIRST)


def test_the_last_good_policy_is_used_at_the_next_start_without_the_cloud(source, key, pool, caplog):
    source.files = key.signed(FIRST)
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
    source.close()
    with edge_of(pool) as edge:
        assert edge.policy_id == FIRST.id == active(edge)["policy_id"]
        assert infer(edge.url, "test", {"x": [9.0]})[1]["parameters"]["policy_id"] == FIRST.id
        until(lambda: changes(edge, "unreachable"))
    # It is verified again: a file that was changed on the disk is not used.
    (kept,) = (path for path in (pool.parent / "state").iterdir() if FIRST.method.encode() in path.read_bytes())
    kept.write_bytes(flipped(kept.read_bytes(), 500))
    with edge_of(pool) as edge:
        assert edge.policy_id == GIVEN.id
    assert any("signature" in one.getMessage() for one in caplog.records)


def test_a_given_policy_that_was_signed_later_is_not_replaced_by_the_kept_one(source, key, pool, tmp_path):
    source.files = key.signed(FIRST)
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
    SECOND.save(tmp_path / "second.json")
    newer = cauc_ray.sign_policy(tmp_path / "second.json", key=key.private_file)
    with edge_of(pool, newer) as edge:
        until(lambda: changes(edge, "refused"))
        assert active(edge)["policy_id"] == SECOND.id


def test_an_active_policy_that_expires_answers_on_and_is_reported(source, key, pool, caplog):
    def renewed(path="/policy.json.sig"):
        if path.endswith(".sig"):
            source.files = key.signed(FIRST, expires_in_s=2.0)

    renewed()
    source.after_get = renewed  # so that a slow machine finds one in time
    with edge_of(pool) as edge:
        until_active(edge, FIRST)
        until(lambda: counted(edge, "policy_expired") == {"": 0})
        source.after_get = lambda path: None
        until(lambda: counted(edge, "policy_expired") == {"": 1})
        assert infer(edge.url, "test", {"x": [9.0]})[1]["parameters"]["policy_id"] == FIRST.id
    with edge_of(pool) as edge:  # and from the start
        assert edge.policy_id == FIRST.id
        until(lambda: counted(edge, "policy_expired") == {"": 1})
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len([one for one in warnings if FIRST.id in one and "expired" in one]) == 2


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_writes_leaves_a_good_policy(source, key, pool, tmp_path):
    """Every pull finds a new policy, so that the process writes nearly all of the time."""
    GIVEN.save(tmp_path / "policy.json")
    with_fleet(pool, policy=f"{source.url}/policy.json", public_key="public.pem", every_s=0.001)
    rng, thresholds = random.Random(7), iter(range(1, 10**6))

    def renew():
        content, _ = key.signed(FIRST.with_threshold(0.5 + next(thresholds) / 10**7))
        source.files = content, key.private.sign(content)

    renew()
    source.after_get = lambda path: renew() if path.endswith(".sig") or rng.random() < 0.2 else None
    began = []
    for _ in range(4):
        command = Command(tmp_path, "--port", "0", "--local")
        began.append(command.said["policy_id"])
        until(lambda c=command: active(c)["version"] > 3)
        time.sleep(rng.uniform(0, 0.1))
        command.kill()
    with edge_of(pool) as edge:
        began.append(edge.policy_id)
    assert began[0] == GIVEN.id
    assert GIVEN.id not in began[1:]
    assert not list((tmp_path / "state").glob(".*"))


class Cloud:
    """A service that edges report to through a source, which forwards what is posted and may lose the answers."""

    def __init__(self, folder, source, policy):
        folder.mkdir()
        self.service = cauc_ray.serve(python_pool(folder), policy, port=0, name="test", local=True)
        self.source, self.loses = source, lambda: False
        source.on_post = self.forward

    def forward(self, body):
        if self.loses() == "before":
            return None
        status, _, _ = http("POST", f"{self.service.url}/v2/models/test/fleet", body)
        assert status == 200
        return None if self.loses() else status

    def edges(self):
        return json.loads(http("GET", f"{self.service.url}/v2/models/test/fleet")[1])["edges"]

    def n_labelled(self):
        return json.loads(http("GET", f"{self.service.url}/v2/models/test/watch")[1])["n_labelled"]


@pytest.fixture
def cloud(tmp_path, source):
    running = Cloud(tmp_path / "cloud", source, GIVEN)
    yield running
    running.service.stop()


@pytest.fixture
def reporting(tmp_path, source):
    """Return a pool file whose edge reports to the source."""
    return with_fleet(python_pool(tmp_path), report=f"{source.url}/reports")


def with_feedback(edge, n_requests, size=3):
    """Ask an edge for rows and tell their labels; return the number of rows."""
    for _ in range(n_requests):
        status, content = infer(edge.url, "test", {"x": [9.0] * size}, ("prediction", "confidence", "stage"))
        assert status == 200
        about = {name: content["parameters"][name] for name in ("policy_id", "answer_id")}
        rows = {output["name"]: output["data"] for output in content["outputs"]}
        told = {**about, **rows, "label": rows["prediction"]}
        status, content, _ = http("POST", f"{edge.url}/v2/models/test/feedback", told)
        assert (status, json.loads(content)["counted"]) == (200, size)
    return n_requests * size


def waiting(pool):
    return list((pool.parent / "state" / "feedback").iterdir())


def test_counts_drift_and_feedback_reach_the_cloud_once_whatever_is_lost(source, cloud, reporting):
    rng = random.Random(3)
    cloud.loses = lambda: rng.choice([False, "before", "after"])
    with edge_of(reporting) as edge:
        n = sum(with_feedback(edge, 4) for _ in range(5))
        until(lambda: not waiting(reporting) and cloud.edges()["shop-17"]["counters"]["requests"] == {"200": 20}, 30)
        until(lambda: cloud.n_labelled() == n == cloud.edges()["shop-17"]["watch"]["n_labelled"], 30)
        seen = cloud.edges()["shop-17"]
        assert seen["policy_id"] == GIVEN.id
        assert sum(seen["counters"]["rows"]["small"].values()) == n
        assert seen["counters"]["cost"]["small"]
    rows = counted(cloud.service, "edge_rows")
    assert rows == {f"shop-17,{how},{at}": n for at, of in seen["counters"]["rows"].items() for how, n in of.items()}
    assert counted(cloud.service, "edge_holds") == {"shop-17": float(seen["watch"]["holds"])}
    told = [one["sequence"] for one in source.posted]
    assert told == sorted(set(told))  # each report has a number of its own, but batches come again
    batches = [one["feedback"]["id"] for one in source.posted if one["feedback"]]
    assert len(set(batches)) < len(batches)


def test_feedback_of_an_edge_that_starts_again_is_counted_once(source, cloud, reporting):
    """It arrives, but no answer does; then the edge ends, and another begins with what it has left."""
    cloud.loses = lambda: "after"
    with edge_of(reporting) as edge:
        n = with_feedback(edge, 4)
        until(lambda: cloud.n_labelled() > 0)
    assert waiting(reporting)
    cloud.loses = lambda: False
    with edge_of(reporting) as edge:
        until(lambda: not waiting(reporting))
        n += with_feedback(edge, 2)
        until(lambda: not waiting(reporting) and cloud.n_labelled() >= n)
        until(lambda: cloud.edges()["shop-17"]["counters"].get("requests") == {"200": 2})  # of its new life
    assert cloud.n_labelled() == n
    assert len({one["life"] for one in source.posted}) == 2


def test_feedback_that_finds_no_cloud_waits_up_to_a_bound_and_the_oldest_is_dropped(tmp_path, source):
    source.on_post = lambda body: 503
    pool = with_fleet(python_pool(tmp_path, batch_size=4096), report=f"{source.url}/reports", queue_mb=1.0)
    with edge_of(pool) as edge:
        most = 0
        while "dropped" not in (outcomes := counted(edge, "feedback_rows_total")):
            with_feedback(edge, 2, size=4000)
            most = max(most, sum(path.stat().st_size for path in waiting(pool)))
        assert 0.5e6 < most <= 1e6
        until(lambda: 0 < counted(edge, "feedback_queued_bytes")[""] <= 1e6)  # as of the next report
        kept = [json.loads(line) for path in sorted(waiting(pool)) for line in path.read_text().splitlines()]
        assert sum(len(one["label"]) for one in kept) + outcomes["dropped"] == outcomes["counted"]


def test_a_report_is_taken_once_and_refused_where_it_makes_no_sense(cloud):
    url = f"{cloud.service.url}/v2/models/test/fleet"
    report = {"edge": "a", "life": "0" * 32, "sequence": 5, "policy_id": "x", "counters": {"requests": {"200": 7}}}

    def post(**changes):
        status, content, _ = http("POST", url, {**report, **changes})
        return status, json.loads(content)

    message = {"policy_id": GIVEN.id, "prediction": [1], "confidence": [0.9], "stage": [1], "label": [1]}
    batch = {"id": "1-a", "messages": [message, {**message, "stage": [9]}, {"no": "feedback"}]}
    assert post(feedback=batch)[1] == {"edge": "a", "sequence": 5, "new": True, "counted": 1}
    assert post(feedback=batch, sequence=6, later_key=1)[1] == {**post()[1], "sequence": 6, "new": True}
    assert post(counters={}, sequence=3)[1]["new"] is False  # one that was late
    assert cloud.edges()["a"]["sequence"] == 6
    assert post(life="1" * 32, sequence=0)[1]["new"] is True
    assert cloud.n_labelled() == 1
    for wrong in (
        {"edge": "../a"},
        {"edge": ""},
        {"sequence": -1},
        {"life": None},
        {"counters": {"rows": 1}},
        {"sequence": "1"},
    ):
        status, content = post(**wrong)
        assert (status, list(content)) == (400, ["error"])
    assert http("POST", url, b'{"edge": NaN}')[0] == 400
    assert http("POST", url.replace("test", "other"), report)[0] == 404


def test_the_token_goes_to_the_host_of_the_report_only(tmp_path, source, key, monkeypatch):
    monkeypatch.setenv("FLEET_TOKEN", "secret\n")
    elsewhere = Source()
    source.files = key.signed(FIRST)
    where = {"policy": f"{source.url}/policy.json", "public_key": "public.pem", "report": f"{elsewhere.url}/reports"}
    with edge_of(with_fleet(python_pool(tmp_path), **where, token_env="FLEET_TOKEN")) as edge:
        until_active(edge, FIRST)
        until(lambda: elsewhere.posted)
    elsewhere.close()
    assert {headers.get("Authorization") for headers in elsewhere.headers} == {"Bearer secret"}
    assert {headers.get("Authorization") for headers in source.headers} == {None}


def test_the_cloud_asks_edges_for_its_token(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUC_TOKEN", "secret")
    with cauc_ray.serve(python_pool(tmp_path), GIVEN, port=0, name="test", local=True) as service:
        url, report = f"{service.url}/v2/models/test/fleet", {"edge": "a", "life": "0", "sequence": 0, "policy_id": "x"}
        assert (http("GET", url)[0], http("POST", url, report)[0]) == (401, 401)
        token = {"Authorization": "Bearer secret"}
        assert (http("POST", url, report, **token)[0], http("GET", url, **token)[0]) == (200, 200)


def certificate(folder, name, issuer=None):
    """Write a certificate of 127.0.0.1 and its key, signed by an issuer or itself; return both."""
    private, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    by, signing = (subject, private) if issuer is None else (issuer[0].subject, issuer[1])
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(by).public_key(private.public_key())
    made = made.serial_number(x509.random_serial_number()).not_valid_before(now - timedelta(days=1))
    made = made.not_valid_after(now + timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), False)
    made = made.add_extension(x509.BasicConstraints(issuer is None, None), True).sign(signing, hashes.SHA256())
    (folder / f"{name}.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / f"{name}.key").write_bytes(private.private_bytes(serialization.Encoding.PEM, form, plain))
    return made, private


def test_edge_and_cloud_check_each_other_s_certificate(tmp_path, key):
    authority = certificate(tmp_path, "authority")
    for name in ("cloud", "edge"):
        certificate(tmp_path, name, authority)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "authority.pem"))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(tmp_path / "cloud.pem", tmp_path / "cloud.key")
    source = Source(tls)
    source.files = key.signed(FIRST)
    where = {"policy": f"{source.url}/policy.json", "public_key": "public.pem"}
    own = {"ca": "authority.pem", "cert": "edge.pem", "key": "edge.key"}
    try:
        for fewer in ({"ca": "authority.pem"}, {"cert": "edge.pem", "key": "edge.key"}):
            with edge_of(with_fleet(python_pool(tmp_path), **where, **fewer)) as edge:
                until(lambda at=edge: changes(at, "unreachable"))
                assert active(edge)["policy_id"] == GIVEN.id
        with edge_of(with_fleet(python_pool(tmp_path), **where, **own)) as edge:
            until_active(edge, FIRST)
    finally:
        source.close()


def test_an_edge_that_stops_closes_a_connection_that_it_was_making(tmp_path, key):
    """An unclosed connection is a warning, which fails a test here."""
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        never_answers.settimeout(20)
        url = f"https://127.0.0.1:{never_answers.getsockname()[1]}/policy.json"
        with edge_of(with_fleet(python_pool(tmp_path), policy=url, public_key="public.pem")):
            connection, _ = never_answers.accept()
            assert connection.recv(1)  # of the TLS handshake
        with connection:
            connection.settimeout(20)
            while connection.recv(4096):
                pass
    gc.collect()


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "policy, report or both"),
        ({"policy": "http://a/policy.json"}, "public_key"),
        ({"policy": "policy.json", "public_key": "public.pem"}, "policy"),
        ({"policy": "http://user:secret@a/policy.json", "public_key": "public.pem"}, "policy"),
        ({"policy": "http://a/policy.json", "public_key": "pool.yaml"}, "Ed25519 public key"),
        ({"policy": "http://a/policy.json", "public_key": "public-private.pem"}, "Ed25519 public key"),
        ({"policy": "http://a/policy.json", "public_key": "nowhere.pem"}, "nowhere.pem"),
        ({"report": "https://a/b", "key": "public.pem"}, "cert"),
        ({"report": "http://a/b", "ca": "nowhere.pem"}, "nowhere.pem"),
        ({"report": "http://a/b", "token_env": "CAUC_NO_SUCH_TOKEN"}, "CAUC_NO_SUCH_TOKEN"),
        ({"report": "http://a/b", "state": "pool.yaml"}, "pool.yaml"),
        ({"report": "http://a/b", "name": "a b"}, "name"),
        ({"report": "http://a/b", "every_s": 0}, "every_s"),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_line(tmp_path, key, wrong, says):
    with pytest.raises(ConfigError) as error, edge_of(with_fleet(python_pool(tmp_path), **wrong)):
        pass
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_fleet_is_for_local_services(reporting):
    with pytest.raises(ConfigError, match="--local"):
        cauc_ray.serve(reporting, GIVEN, port=0)


@pytest.mark.slow
def test_a_fleet_adds_no_heavy_package_to_the_service():
    code = "import sys, cauc_ray.serving.local; a = set(sys.modules); import cauc_ray.serving.fleet; "
    code += "print(*sorted({name.split('.')[0] for name in set(sys.modules) - a}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "cauc_ray" in done.stdout
    assert not {"ray", "pyarrow", "scipy", "torch", "pandas"} & set(done.stdout.split())
