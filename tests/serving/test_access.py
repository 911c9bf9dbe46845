"""Who may ask: tokens as environments hold them and as headers bear them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from cauc_ray.serving.access import authorize, token_of
from cauc_ray.serving.faults import RequestError

tokens = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)


def asked_with(value):
    """Return headers as a server reads them from bytes."""
    return Headers(raw=[(b"authorization", value)])


def in_environment(token):
    os.environ["CAUC_TEST_TOKEN"] = token
    try:
        return token_of("CAUC_TEST_TOKEN")
    finally:
        del os.environ["CAUC_TEST_TOKEN"]


@given(tokens, tokens)
def test_the_token_and_no_other_is_let_in(token, other):
    wanted = in_environment(token)
    sent = os.fsencode(token).strip()
    if sent:
        authorize(asked_with(b"Bearer " + sent), wanted)
        authorize(asked_with(b"bearer  " + sent), None, b"another", wanted)
    if sent != os.fsencode(other).strip():
        with pytest.raises(RequestError) as refused:
            authorize(asked_with(b"Bearer " + os.fsencode(other)), wanted)
        assert refused.value.status == 401
        with pytest.raises(RequestError) as elsewhere:
            authorize(asked_with(b"Bearer x"), b"y")
        assert refused.value.message == elsewhere.value.message  # it tells nothing of either token


@given(tokens, st.binary(max_size=12))
def test_what_bears_no_token_is_refused(token, scheme):
    wanted = in_environment(token)
    for value in (b"", b"Bearer", b"Bearer ", b"Bearer \t", scheme, b"Basic " + os.fsencode(token)):
        with pytest.raises(RequestError):
            authorize(asked_with(value), wanted)
    with pytest.raises(RequestError):
        authorize(Headers(raw=[]), wanted)


def test_a_blank_token_lets_nobody_in_and_none_everybody(monkeypatch):
    monkeypatch.setenv("CAUC_TEST_TOKEN", " \n")
    for value in (b"Bearer", b"Bearer ", b"Bearer  \n"):
        with pytest.raises(RequestError):
            authorize(asked_with(value), token_of("CAUC_TEST_TOKEN"))
    monkeypatch.setenv("CAUC_TEST_TOKEN", "")
    authorize(Headers(raw=[]), token_of("CAUC_TEST_TOKEN"))
    authorize(Headers(raw=[]), token_of("CAUC_TEST_NO_TOKEN"))


def test_a_token_need_not_be_utf_8(monkeypatch):
    monkeypatch.setenv("CAUC_TEST_TOKEN", os.fsdecode(b"\xff\xfe"))
    authorize(asked_with(b"Bearer \xff\xfe"), token_of("CAUC_TEST_TOKEN"))
