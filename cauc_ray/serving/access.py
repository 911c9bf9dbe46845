"""Who may ask, and the log of who asked what."""

from __future__ import annotations

import hmac
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from cauc_ray.serving.faults import RequestError

# How Serve's handlers know a line of an access log.
_ACCESS = {"serve_access_log": True, "log_to_stderr": False}


def token_of(variable: str) -> bytes | None:
    """Return the token in a variable of the environment, None where there is none.

    Surrounding white space, such as the line break of a file, is removed, since no header can carry it. A token of
    white space alone matches no request.
    """
    value = os.environ.get(variable)
    return os.fsencode(value).strip() if value else None


def authorize(headers: Mapping[str, str], *tokens: bytes | None) -> None:
    """Raise RequestError (401) unless a request bears one of the tokens; None asks for none."""
    wanted = [token for token in tokens if token is not None]
    if not wanted:
        return
    scheme, _, text = headers.get("authorization", "").partition(" ")
    # The header's bytes as they came; stripped as bytes, since a letter of UTF-8 may end in what Latin-1 calls a space.
    given = text.encode("latin-1").strip()
    # All are compared, each in constant time, so that the duration reveals nothing.
    same = [hmac.compare_digest(given, token) for token in wanted]
    if scheme.lower() != "bearer" or not given or not any(same):
        raise RequestError("the header 'Authorization: Bearer TOKEN' with a valid token is required", 401)


def log_request(logger: logging.Logger, fields: Mapping[str, Any]) -> None:
    """Write one JSON line about a request, as Serve's own access log: where that is off, so is this."""
    logger.info("%s", _Line(fields), extra=_ACCESS)


class _Line:
    """Fields as JSON, which is written only where a handler takes it."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return json.dumps({"event": "infer", **{name: own for name, own in self._fields.items() if own is not None}})
