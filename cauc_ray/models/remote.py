"""Models behind any server of the Open Inference Protocol v2 as stages: another service of cauc-ray, Triton, KServe."""

from __future__ import annotations

import math
import os
import ssl
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Model
from cauc_ray.models.kind import DeclaringSpec, LocalFile

# The share of the time until a stage gives up on a call in which the call ends by itself.
IN_TIME = 0.9


class RemoteSpec(DeclaringSpec):
    """`{kind: remote, url: https://cloud:8000, model: NAME}`: a model of another server.

    inputs: tensors of the model by the columns that they are filled from; without them each of its inputs is filled
    from the column of its name.   output: the one that has the logits, rows by options.   logit_kind: of that output,
    raw unless declared.   token_env: the environment variable that holds the token, which is stored nowhere else.
    ca: certificates to trust instead of the system's.   cert, key: the client's own, where the server asks for one.
    timeout_s: of a call, all attempts together.   retries: further attempts of a request after a fault of the
    connection, or a server that has too much to do or is down.   compress: send bodies gzipped.   max_rows: in one
    request.   max_concurrency: requests at a time.
    """

    HOW: ClassVar[frozenset[str]] = DeclaringSpec.HOW | {
        *("token_env", "ca", "cert", "key", "timeout_s", "retries", "compress", "max_rows", "max_concurrency")
    }
    SPANS_GPUS: ClassVar[bool] = False
    GIVES_UP: ClassVar[bool] = True
    REMOTE: ClassVar[bool] = True
    kind: Literal["remote"]
    # A password in the address would appear in tables and messages.
    url: str = Field(pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")
    model: str = Field(pattern=r"^[^/?#%\s]+$")
    inputs: dict[str, str] = Field(default_factory=dict)
    output: str = Field(default="logits", min_length=1)
    token_env: str | None = Field(default=None, min_length=1)
    ca: LocalFile | None = None
    cert: LocalFile | None = None
    key: LocalFile | None = None
    timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    retries: int = Field(default=3, ge=0, le=100)
    compress: bool = False
    max_rows: int = Field(default=64, ge=1)
    max_concurrency: int = Field(default=4, ge=1, le=1000)

    @model_validator(mode="after")
    def _agrees(self) -> RemoteSpec:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together")
        if self.url.startswith("http:") and (self.ca or self.cert):
            raise ValueError("ca, cert and key need a url with https")
        if len(set(self.inputs.values())) < len(self.inputs):
            raise ValueError("two columns fill the same tensor")
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that are sent, as far as its settings tell."""
        return frozenset(self.inputs)

    @property
    def source(self) -> str:
        """Return in one phrase what answers."""
        return f"{self.model} at {self.url}"

    def load(self) -> Model:
        """Return a model as load_within does, with no other limit than its own."""
        return self.load_within(math.inf)

    def load_within(self, call_timeout_s: float) -> Model:
        """Return a model that asks the server; nothing is sent before the first call, since the server may be away.

        Its calls end a moment before the stage gives up on them. Raises ConfigError where a package, the token or a
        certificate is missing.
        """
        self.require("remote", "anyio", "httpcore2")
        from cauc_ray.models.inference_client import RemoteModel

        token = None if self.token_env is None else os.environ.get(self.token_env, "").strip()
        if token is not None and not (token and token.isascii() and token.isprintable()):
            raise ConfigError(
                f"model {self.model!r}: the environment variable {self.token_env} has no token for {self.url}; "
                "set it on the nodes of the stage"
            )
        return RemoteModel(self, token, self._trust(), min(self.timeout_s, IN_TIME * call_timeout_s))

    def _trust(self) -> ssl.SSLContext | None:
        """Return whom to trust and how to identify; None without TLS. Raises ConfigError for unusable files."""
        if self.url.startswith("http:"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # Of a key with a passphrase, OpenSSL would ask on the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"model {self.model!r}: {files} cannot be used as ca, cert and key: {error}") from error
        return context
