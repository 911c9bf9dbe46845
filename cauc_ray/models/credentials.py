"""How a client of an HTTP server identifies itself, and which servers it trusts."""

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
from cauc_ray.models.kind import KindSpec, LocalFile, Section

# A password or key in the address would appear in tables and messages.
ServerUrl: TypeAlias = Annotated[str, Field(pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")]

# Headers whose values are secrets, which a file must not hold.
SECRET_HEADERS = re.compile(r"auth|key|token|secret|cookie|password", re.I)
LOOPBACK = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)")


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


class Credentials(Section):
    """Credentials of a client.

    Attributes:
        token_env: The environment variable that holds the token, which is stored nowhere else.
        ca: PEM file of certificates to trust instead of the system's.
        cert: PEM file of the client's own certificate, if the server asks for one.
        key: PEM file of the key of that certificate.
    """

    token_env: str | None = Field(default=None, min_length=1)
    ca: LocalFile | None = None
    cert: LocalFile | None = None
    key: LocalFile | None = None

    @model_validator(mode="after")
    def _is_a_pair(self) -> Credentials:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together")
        return self

    def token(self, owner: str) -> str | None:
        """Return the token, None without token_env. Raises ConfigError if it is missing.

        Args:
            owner: Whose token it is, for messages.
        """
        return None if self.token_env is None else required_secret(self.token_env, owner)

    def trust(self, owner: str) -> ssl.SSLContext:
        """Return how servers are verified, with the client's own certificate. Raises ConfigError for unusable files.

        Args:
            owner: Whose certificates they are, for messages.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # Without this, OpenSSL would ask for a key's passphrase on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{owner}: {files} cannot be used as ca, cert and key: {error}") from error
        return context


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
