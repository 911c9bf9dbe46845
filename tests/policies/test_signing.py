"""Signed policies: `cauc policy sign` and openssl read each other's files, and any change of a byte is detected."""

import json
import subprocess
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain

import cauc_ray
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.signing import SignatureError, public_key, verified

DATA = chain(4)
POLICY = fit_rf(DATA, DATA)


def openssl(folder, words):
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a key pair and a policy that is signed with it."""
    folder = tmp_path_factory.mktemp("signed")
    openssl(folder, "genpkey -algorithm ed25519 -out private.pem")
    openssl(folder, "pkey -in private.pem -pubout -out public.pem")
    POLICY.save(folder / "policy.json")
    cauc_ray.sign_policy(folder / "policy.json", key=folder / "private.pem", days=30)
    return folder


def test_a_signed_policy_has_dates_and_the_same_id_and_answers(home):
    openssl(home, "pkeyutl -verify -pubin -inkey public.pem -rawin -in policy.json -sigfile policy.json.sig")
    policy = Policy.load(home / "policy.json")
    assert policy.model_copy(update={"issued_at": None, "expires_at": None}) == POLICY
    assert policy.id == POLICY.id
    assert policy.expires_at - policy.issued_at == timedelta(days=30)
    assert policy.with_threshold(0.9).issued_at is policy.with_threshold(0.9).expires_at is None  # was not signed


@given(st.data())
def test_any_change_of_a_byte_and_any_truncation_is_detected(home, data):
    content, signature = (home / "policy.json").read_bytes(), (home / "policy.json.sig").read_bytes()
    key = public_key(home / "public.pem")
    assert verified(content, signature, key, "it").issued_at is not None
    whole = signature + content
    at, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    changed = whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :]
    for damaged in (changed, whole[:at]):
        with pytest.raises(SignatureError):
            verified(damaged[64:], damaged[:64], key, "it")


def test_the_command_signs_shows_and_refuses_in_one_line(home, tmp_path, command):
    policy = tmp_path / "policy.json"
    POLICY.save(policy)
    code, out, _ = command("policy", "sign", policy, "--key", home / "private.pem", "--json")
    assert (code, json.loads(out)["policy_id"]) == (0, POLICY.id)
    assert command("show", policy, "--key", home / "public.pem")[0] == 0
    policy.write_bytes(policy.read_bytes() + b" ")
    refused = [("show", policy, "--key", home / "public.pem")]
    openssl(tmp_path, "genpkey -algorithm x25519 -out other.pem")
    openssl(tmp_path, f"pkey -in {home}/private.pem -aes256 -passout pass:abcd -out locked.pem")
    for key in (tmp_path / "other.pem", tmp_path / "locked.pem", tmp_path / "nowhere.pem", home / "public.pem"):
        refused.append(("policy", "sign", policy, "--key", key))
    for words in refused:
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (2, 1)
