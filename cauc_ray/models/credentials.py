"""How a client of an HTTP server proves who it is, and whom it trusts: settings of remote stages and of fleets."""

from __future__ import annotations

import os
import ssl

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.kind import LocalFile, Section


class Credentials(Section):
    """Settings of a client.

    token_env: the environment variable that holds the token, which is stored nowhere else.   ca: PEM file of
    certificates to trust instead of the system's.   cert, key: PEM files of the client's own certificate, where the
    server asks for one.
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

    def token(self, whose: str) -> str | None:
        """Return the token, None without token_env. Raises ConfigError if it is missing.   whose: for messages."""
        if self.token_env is None:
            return None
        token = os.environ.get(self.token_env, "").strip()
        if not (token and token.isascii() and token.isprintable()):
            raise ConfigError(
                f"{whose}: the environment variable {self.token_env} has no token; set it where this runs"
            )
        return token

    def trust(self, whose: str) -> ssl.SSLContext:
        """Return how servers are checked, and the client's own certificate. Raises ConfigError for unusable files."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # Of a key with a passphrase, OpenSSL would ask on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{whose}: {files} cannot be used as ca, cert and key: {error}") from error
        return context
