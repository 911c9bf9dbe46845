"""How a client of an HTTP server identifies itself, and which servers it trusts."""

from __future__ import annotations

import os
import re
import ssl

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.kind import LocalFile, Section

# Headers whose values are secrets, which a file must not hold.
SECRET_HEADERS = re.compile(r"auth|key|token|secret|cookie|password", re.I)
LOOPBACK = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)")


class HeaderSettings(Section):
    """Headers of a client's requests.

    Attributes:
        headers: Headers of every request. A value of $NAME is that of the environment variable NAME; secrets must be
            given so.
    """

    headers: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _headers_can_be_sent(self) -> HeaderSettings:
        for name, value in self.headers.items():
            if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not _is_text(value):
                raise ValueError(f"headers: {name!r} cannot be sent; names and values are printable ASCII")
            if SECRET_HEADERS.search(name) and not value.startswith("$"):
                raise ValueError(f"headers: {name} is a secret; write $NAME, and set the environment variable NAME")
        return self

    def http_headers(self, owner: str) -> tuple[dict[str, str], list[str]]:
        """Return the headers to send, and those values that come from the environment.

        Args:
            owner: Whose headers they are, for messages.

        Raises:
            ConfigError: An environment variable is missing.
        """
        secrets = {name: _required(value[1:], owner) for name, value in self.headers.items() if value.startswith("$")}
        return {**self.headers, **secrets}, [*secrets.values()]


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
        return None if self.token_env is None else _required(self.token_env, owner)

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


def _required(name: str, owner: str) -> str:
    value = environment_secret(name, owner)
    if value is None:
        raise ConfigError(f"{owner}: the environment variable {name} has no token; set it where this runs")
    return value


def _is_text(value: str) -> bool:
    return value.isascii() and value.isprintable()
