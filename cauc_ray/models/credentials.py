"""How a client of an HTTP server identifies itself."""

from __future__ import annotations

import os
import re
import ssl
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeAlias

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.kind import KindSpec

# A password or key in the address would appear in tables and messages.
ServerUrl: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")]

# Headers whose values are secrets, which a file must not hold.
SECRET_HEADERS = re.compile(r"auth|key|token|secret|cookie|password", re.I)


@dataclass(frozen=True, slots=True)
class Access:
    """How a client reaches a server, and how each identifies itself.

    Attributes:
        url: Beginning of every URL.
        name: The model and its server, for messages.
        settings: What to check if the server rejects every request, for messages.
        headers: Headers of every request.
        secrets: Texts that no message may contain.
        tls: How the server is verified; True verifies by the system's certificates.
    """

    url: str
    name: str
    settings: str
    headers: Mapping[str, str]
    secrets: Sequence[str]
    tls: ssl.SSLContext | bool = True


class ServerSpec(KindSpec):
    """A model behind a server.

    Attributes:
        model: Name of the model.
        headers: Headers of every request. A value of $NAME is that of the environment variable NAME; secrets must be
            given so.
    """

    ENFORCES_OWN_TIMEOUT: ClassVar[bool] = True
    model: str = Field(min_length=1)
    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _headers_can_be_sent(self) -> ServerSpec:
        for name, value in self.headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not _is_text(value):
                raise ValueError(f"headers: {name!r} cannot be sent; names and values are printable ASCII")
            if SECRET_HEADERS.search(name) and not value.startswith("$"):
                raise ValueError(f"headers: {name} is a secret; write $NAME, and set the environment variable NAME")
        return self

    @abstractmethod
    def server(self) -> Access:
        """Return how the server is reached. Raises ConfigError if a secret or a certificate is missing."""

    def check(self, local: bool) -> None:
        """Raise ConfigError if a secret or a certificate is missing."""
        if local:
            self.server()

    def access(self, url: str, settings: str, token: str | None, tls: ssl.SSLContext | bool = True) -> Access:
        """Return how a server is reached.

        Args:
            url: Beginning of every URL.
            settings: What to check if the server rejects every request.
            token: Sent as a bearer token, unless headers have an authorization.
            tls: How the server is verified.

        Raises:
            ConfigError: The environment variable of a header is missing.
        """
        owner = f"model {self.model!r}"
        headers, secrets = dict(self.headers), []
        for name, value in self.headers.items():
            if value.startswith("$"):
                headers[name] = required_secret(value[1:], owner)
                secrets.append(headers[name])
        if token is not None:
            secrets.append(token)
            if not any(name.lower() == "authorization" for name in headers):
                headers["Authorization"] = f"Bearer {token}"
        return Access(url.rstrip("/"), f"{owner} at {url}", settings, headers, secrets, tls)


def environment_secret(name: str, owner: str) -> str | None:
    """Return the secret in an environment variable, None if it is not set. Raises ConfigError if it cannot be sent."""
    value = os.environ.get(name, "").strip()
    if not _is_text(value):  # a client's own message would show it
        raise ConfigError(f"{owner}: the environment variable {name} has no token, but other characters; set it again")
    return value or None


def required_secret(name: str, owner: str) -> str:
    """Return the secret in an environment variable. Raises ConfigError if it is missing or cannot be sent."""
    value = environment_secret(name, owner)
    if value is None:
        raise ConfigError(f"{owner}: the environment variable {name} has no token; set it where this runs")
    return value


def _is_text(value: str) -> bool:
    return value.isascii() and value.isprintable()
