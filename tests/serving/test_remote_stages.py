"""A service as a stage of another, the edge's: what the edge answers, whatever the link to the cloud does."""

import datetime
import ipaddress
import json
import ssl
import threading

import numpy as np
import openai
import pytest
from asking import Chain, answered, outputs_of, require_replay, until
from batches import question_batch
from completion_server import chat_answer, scripted_server
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from link import Link
from runs import MODELS, saved_model, write_pool
from runs import pool_of as pool_path

import cauc_ray
from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.pool import load_pool, pool_of


class Deployed:
    """Saved logits of three models: the cloud has the last one, an edge the others.   port: of the cloud."""

    def __init__(self, folder):
        chain = Chain(folder)
        self.folder, self.test, self.ids = folder, chain.test, chain.ids.astype(object)
        self.policy, self.expected = chain.policies["rf"], chain.expected("rf")
        self.alone = cauc_ray.fit(folder / "LOGITS", models=["m2"], threshold=0.5)
        self.pool = load_pool(chain.pool)

    def cloud(self, port=0):
        return cauc_ray.serve(self.pool, self.alone, port=port, name="large", local=True)

    def remote(self, url, **settings):
        return {"kind": "remote", "url": url, "model": "large", **settings}

    def edge(self, url, on_failure="degrade", **settings):
        models = {name: saved_model(name) for name in MODELS[:2]} | {"m2": self.remote(url, **settings)}
        serving = {"batch_size": 16, "batch_wait_s": 0.0, "timeout_s": settings.get("timeout_s", 20.0) / 0.8}
        stages = [{"name": name, "model": model, "serving": serving} for name, model in models.items()]
        path = write_pool(self.folder, stages, on_failure=on_failure)
        return cauc_ray.serve(path, self.policy, port=0, name="edge", local=True)

    def model(self, url, **settings):
        stage = {"name": "m2", "model": self.remote(url, **settings)}
        content = {"name": "p", "task": "multiple-choice", "stages": [stage]}
        return pool_of(content, self.folder).stages[0].load()

    def ask(self, service, **parameters):
        """Return the outputs of all rows by name, and the response's parameters."""
        outputs = ("prediction", "stage", "confidence", "cost")
        content = answered(service.url, "edge", {"example_id": self.ids.tolist()}, outputs, parameters)
        return outputs_of(content), content["parameters"]


def port_of(service):
    return int(service.url.rsplit(":", 1)[1])


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    return Deployed(tmp_path_factory.mktemp("deployed"))


@pytest.fixture(scope="module")
def cloud(deployed):
    with deployed.cloud() as service:
        yield service


def require_logits(deployed, answers):
    assert not answers.failures
    assert np.array_equal(answers.logits, deployed.test.logits[2])
    assert answers.n_options.tolist() == np.isfinite(deployed.test.logits[2]).sum(axis=1).tolist()


def is_whole(deployed, edge):
    return not deployed.ask(edge)[1]["degraded"]


def test_an_edge_answers_as_the_replay_but_for_degraded_answers_while_its_link_is_cut(deployed, cloud):
    expected = deployed.expected
    with (
        Link(port_of(cloud), delay_s=0.02) as link,
        deployed.edge(link.url, max_rows=7, timeout_s=3.0) as edge,
    ):
        cheap, _ = deployed.ask(edge, max_stage=1)
        until(lambda: is_whole(deployed, edge))
        link.cut()
        for _ in range(3):
            outputs, parameters = deployed.ask(edge)
            assert parameters["degraded"] is True
            assert np.array_equal(outputs["prediction"], cheap["prediction"])
            assert np.array_equal(outputs["stage"], np.minimum(expected.stages, 1))
        link.restore()
        until(lambda: is_whole(deployed, edge))
        outputs, _ = deployed.ask(edge)
    assert 0 < (expected.stages == 2).sum() < len(deployed.ids)
    require_replay(outputs, expected)


def test_an_edge_starts_without_its_cloud_and_a_restart_of_the_cloud_goes_unnoticed(deployed):
    with deployed.cloud() as service:
        model, port = deployed.model(service.url, retries=0), port_of(service)
        require_logits(deployed, model({"example_id": deployed.ids}))
    with deployed.edge(f"http://127.0.0.1:{port}", timeout_s=5.0) as edge:
        assert not is_whole(deployed, edge)
        with deployed.cloud(port):
            require_logits(deployed, model({"example_id": deployed.ids}))
            until(lambda: is_whole(deployed, edge))


def test_rows_that_the_cloud_cannot_answer_fail_and_no_others(deployed, cloud):
    ids = deployed.ids.copy()
    ids[[3, 50]] = "nobody"
    answers = deployed.model(cloud.url, max_rows=16)({"example_id": ids})
    assert sorted(answers.failures) == [3, 50]
    assert all("'nobody' is not in" in why for why in answers.failures.values())


def policy_of_m():
    logits = np.log([[0.7, 0.3], [0.2, 0.8]] * 20)
    fitted = {"costs": {"m": 1}, "threshold": 0.5, "logit_kind": "log-probabilities"}
    return cauc_ray.fit({"m": logits}, np.array([0, 1, 1, 1] * 10), **fitted)


def test_questions_are_answered_as_a_remote_stage_and_as_decisions(tmp_path):
    def by_length(prompt, before):
        return chat_answer({"A": 1 / len(prompt), "B": 0.25, "C": 0.5})

    batch = question_batch(("é?", ["x", "y"]), ("b?", ["x", "y", "z"], "seen in May"), ("c?", ["u", "v", "w"]))
    with scripted_server(by_length) as server:
        path = pool_path(tmp_path, {"m": {"kind": "openai", "model": "m", "base_url": server.url}})
        direct = load_pool(path).stages[0].load()(batch)
        with cauc_ray.serve(path, policy_of_m(), port=0, name="large", local=True) as service:
            model = {"kind": "remote", "url": service.url, "model": "large"}
            for kind in ("raw", "log-probabilities"):
                stages = [{"name": "m", "model": {**model, "logit_kind": kind}}]
                stage = pool_of({"name": "p", "task": "multiple-choice", "stages": stages}, None).stages[0]
                if kind == "raw":
                    with pytest.raises(ConfigError, match="of kind log-probabilities, not raw; check logit_kind"):
                        stage.load()(batch)
            answers = stage.load()(batch)
            choices = [{"value": value} for value in ("u", "v", "w")]
            questions = [{"type": "choice", "instructions": "c?", "choices": choices}]
            with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
                (decision,) = client.decisions.create(model="large", input="text", questions=questions).answers
    assert decision.choice == "w"
    assert sum(option.probability for option in decision.probabilities) == pytest.approx(1)
    assert not answers.failures
    assert np.array_equal(answers.logits, direct.logits)
    assert answers.n_options.tolist() == direct.n_options.tolist() == [2, 3, 3]
    assert len({row[0] for row in answers.logits.tolist()}) == 3  # each prompt was another


def test_calls_of_an_endpoint_overlap_as_in_runs(tmp_path):
    both = threading.Barrier(2)

    def script(prompt, before):
        if "first" not in prompt:  # a replica has one call until it has answered one
            both.wait(10)  # the other call's request is there
        return chat_answer({"A": 0.5, "B": 0.5})

    with scripted_server(script, hold_s=1.5) as server:
        path = pool_path(tmp_path, {"m": {"kind": "openai", "model": "m", "base_url": server.url}}, batch_size=1)
        with cauc_ray.serve(path, policy_of_m(), port=0, name="m", local=True) as service:
            for texts in (["first?"], ["b?", "c?"]):
                questions = [json.dumps({"question": text, "choices": ["x", "y"]}) for text in texts]
                answered(service.url, "m", {"question": questions})


def test_reset_connections_lose_no_row(deployed, cloud):
    with Link(port_of(cloud), reset_share=0.3, seed=1) as link:
        model = deployed.model(link.url, timeout_s=40, retries=40, max_rows=4)
        for _ in range(3):
            require_logits(deployed, model({"example_id": deployed.ids}))
            link.reset()
        assert link.n_connections > 6


# TLS.


def certificate(folder, name):
    """Write a certificate that is its own authority, and its key; return their paths."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    builder = x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(days=1))
    builder = builder.not_valid_after(now + datetime.timedelta(days=1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    paths[0].write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return str(paths[0]), str(paths[1])


def test_mutual_tls_and_a_token_are_required_and_faults_told_in_one_line(deployed, tmp_path, monkeypatch):
    names = ("cloud", "edge", "stranger")
    of_cloud, (cert, key), (stranger, stranger_key) = (certificate(tmp_path, name) for name in names)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*of_cloud)
    tls.load_verify_locations(cert)
    tls.verify_mode = ssl.CERT_REQUIRED
    right = {"ca": of_cloud[0], "cert": cert, "key": key, "token_env": "EDGE_TOKEN"}
    monkeypatch.setenv("CAUC_TOKEN", "s3cret")
    monkeypatch.setenv("EDGE_TOKEN", "s3cret")
    batch = {"example_id": deployed.ids}
    with deployed.cloud() as service, Link(port_of(service), tls=tls) as inner, Link(inner.port) as outer:
        url = f"https://127.0.0.1:{outer.port}"
        model = deployed.model(url, compress=True, **right)
        wires = []
        for _ in range(2):
            answers = model(batch)
            require_logits(deployed, answers)
            wires.append(answers.wire)
        # Without those of TLS.
        assert sum(wire.bytes_out for wire in wires) == inner.bytes_out < outer.bytes_out
        assert sum(wire.bytes_in for wire in wires) == inner.bytes_in < outer.bytes_in
        monkeypatch.setenv("OTHER_TOKEN", "guess")
        for change, reason in (
            ({"ca": None}, "is not trusted"),
            ({"ca": stranger}, "is not trusted"),
            ({"cert": None, "key": None}, "cert and key"),  # whether the server says why is up to it
            ({"cert": stranger, "key": stranger_key}, "cert and key"),
            ({"token_env": "OTHER_TOKEN"}, "401"),
            ({"token_env": None}, "rejects requests"),
        ):
            settings = {name: value for name, value in {**right, **change}.items() if value is not None}
            with pytest.raises((ConfigError, ExecutionError)) as raised:
                deployed.model(url, **settings)(batch)
            assert reason in str(raised.value)
            assert "\n" not in str(raised.value)
        with pytest.raises(ConfigError, match="cannot be used as ca, cert and key"):
            deployed.model(url, **{**right, "ca": str(tmp_path / "none.pem")})
