"""Signed policies: what is verified, and what `cauc policy sign` and openssl make of each other's files."""

import json
import subprocess
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain

import cauc_ray
from cauc_ray.cli.command import main
from cauc_ray.errors import ConfigError, PolicyError
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.signing import SignatureError, public_key, verified

DATA = chain(4)
POLICY = fit_rf(DATA, DATA)


def openssl(folder, *words):
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a key pair and a policy that is signed with it."""
    folder = tmp_path_factory.mktemp("signed")
    openssl(folder, "genpkey", "-algorithm", "ed25519", "-out", "private.pem")
    openssl(folder, "pkey", "-in", "private.pem", "-pubout", "-out", "public.pem")
    POLICY.save(folder / "policy.json")
    cauc_ray.sign_policy(folder / "policy.json", key=folder / "private.pem", days=30)
    return folder


def files(folder, name="policy.json"):
    return (folder / name).read_bytes(), (folder / f"{name}.sig").read_bytes()


def test_a_signed_policy_has_dates_and_the_same_id_and_answers(home):
    policy = verified(*files(home), public_key(home / "public.pem"), "it")
    assert policy == Policy.load(home / "policy.json")
    assert policy.id == POLICY.id
    assert policy.model_copy(update={"issued_at": None, "expires_at": None}) == POLICY
    assert timedelta() <= datetime.now(UTC) - policy.issued_at < timedelta(minutes=5)
    assert policy.expires_at - policy.issued_at == timedelta(days=30)
    words = "pkeyutl -verify -pubin -inkey public.pem -rawin -in policy.json -sigfile policy.json.sig"
    openssl(home, *words.split())
    # What is derived from it was not signed.
    assert policy.with_threshold(0.9).issued_at is policy.with_threshold(0.9).expires_at is None


def test_policies_of_earlier_versions_load_without_dates():
    content = POLICY.model_dump(mode="json", exclude={"issued_at", "expires_at"})
    assert Policy.of(content) == POLICY
    with pytest.raises(PolicyError, match="issued_at"):
        Policy.of({**content, "issued_at": "yesterday"})
    with pytest.raises(PolicyError, match="issued_at"):
        Policy.of({**content, "issued_at": "2026-01-01T00:00:00"})  # of which place


@given(st.data())
def test_any_change_of_a_byte_is_found(home, data):
    content, signature = files(home)
    whole = signature + content
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    changed = whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]
    with pytest.raises(SignatureError):
        verified(changed[64:], changed[:64], public_key(home / "public.pem"), "it")


@given(st.integers(0, 10_000), st.integers(0, 64))
def test_no_part_of_a_file_or_signature_is_enough(home, n_content, n_signature):
    content, signature = files(home)
    if n_content < len(content) or n_signature < len(signature):
        with pytest.raises(SignatureError):
            verified(content[:n_content], signature[:n_signature], public_key(home / "public.pem"), "it")


def test_the_command_signs_and_shows(home, tmp_path, capsys):
    policy = tmp_path / "policy.json"
    fit_base(DATA, DATA).save(policy)

    def cauc(*words):
        with pytest.raises(SystemExit) as end:
            main([*map(str, words)])
        return end.value.code, *capsys.readouterr()

    signed = cauc("policy", "sign", policy, "--key", home / "private.pem", "--json")
    content = json.loads(signed[1])
    assert signed[0] == 0
    assert content["policy_id"] == Policy.load(policy).id
    assert content["expires_at"] is None
    code, out, _ = cauc("show", policy, "--key", home / "public.pem")
    assert code == 0
    assert content["issued_at"][:10] in out
    policy.write_bytes(policy.read_bytes() + b" ")
    code, _, err = cauc("show", policy, "--key", home / "public.pem")
    assert (code, err.count("\n")) == (2, 1)
    assert cauc("show", policy)[0] == 0
    (tmp_path / "policy.json.sig").unlink()
    assert cauc("show", policy, "--key", home / "public.pem")[0] == 2
    for wrong in (["--days", "0"], ["--days", "1e9"], ["--key", policy], ["--key", home / "public.pem"]):
        code, _, err = cauc("policy", "sign", policy, "--key", home / "private.pem", *wrong)
        assert (code, err.count("\n")) == (2, 1)


def test_keys_of_other_kinds_are_refused(home, tmp_path):
    openssl(tmp_path, "genpkey", "-algorithm", "x25519", "-out", "other.pem")
    openssl(tmp_path, *f"pkey -in {home}/private.pem -aes256 -passout pass:abcd -out locked.pem".split())
    before = files(home)
    for key in (tmp_path / "other.pem", tmp_path / "locked.pem", home / "public.pem", tmp_path / "nowhere.pem"):
        with pytest.raises(ConfigError, match=key.name):
            cauc_ray.sign_policy(home / "policy.json", key=key)
    assert files(home) == before


def test_files_of_a_store_are_signed_by_uri(home, s3):
    POLICY.save(f"{s3}/policy.json")
    cauc_ray.sign_policy(f"{s3}/policy.json", key=home / "private.pem")
