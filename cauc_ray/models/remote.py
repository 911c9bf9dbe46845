"""Models behind any server of the Open Inference Protocol v2 as stages: another service of cauc-ray, Triton, KServe."""

from __future__ import annotations

import re
import ssl
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.credentials import Access, ServerSpec, ServerUrl, required_secret
from cauc_ray.models.kind import InputColumns, LocalFile
from cauc_ray.models.words import WordsSpec
from cauc_ray.numbers.answer_arrays import ANSWER

LOOPBACK = re.compile(r"http://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?(/|$)")


class RemoteSpec(WordsSpec, ServerSpec):
    """`{kind: remote, url: https://cloud:8000, model: NAME}`: a model of another server.

    Attributes:
        url: Address of the server.
        token_env: The environment variable that holds the token, which is stored nowhere else.
        ca: PEM file of certificates to trust instead of the system's.
        cert: PEM file of the client's own certificate, if the server asks for one.
        key: PEM file of the key of that certificate.
        inputs: Tensors of the model by the columns that fill them; without them each input is filled from the column
            of its name.
        output: The output that has the logits, rows by options; with words the answers, by default `answer`.
        words: Of a model that answers in words, such as a cascade of those: its rule, and the outputs that have its
            confidences, one number for each row, as `confidence` of a cascade.
        timeout_s: Seconds of a call, all attempts together. An attempt has half of what is left, the last one all.
        retries: Further attempts of a request after a fault of the connection, or if the server is busy or down.
        compress: Whether bodies are sent gzipped.
        max_rows: Rows in one request; fewer once the server has rejected as many.
        max_concurrency: Requests at a time.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.inference_client:RemoteModel"
    PACKAGES: ClassVar[tuple[str, ...]] = ("remote", "httpx2")
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = WordsSpec.EXCLUDED_FROM_IDENTITY | {
        *("token_env", "headers", "ca", "cert", "key", "timeout_s", "retries", "compress", "max_rows"),
        "max_concurrency",
    }
    REMOTE: ClassVar[bool] = True
    kind: Literal["remote"]
    token_env: str | None = Field(default=None, min_length=1)
    ca: LocalFile | None = None
    cert: LocalFile | None = None
    key: LocalFile | None = None
    url: ServerUrl
    model: str = Field(pattern=r"^[^/?#%\s]+$")
    inputs: dict[str, str] = Field(default_factory=dict)
    output: str = Field(default="logits", min_length=1)
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
        has_secret = self.token_env or any(value.startswith("$") for value in self.headers.values())
        if self.url.startswith("http:") and has_secret and not LOOPBACK.match(self.url):
            raise ValueError("a token would be sent in clear text; use a url with https, or leave the token out")
        if len(set(self.inputs.values())) < len(self.inputs):
            raise ValueError("two columns fill the same tensor")
        return self

    @property
    def answer_output(self) -> str:
        """Return the output that has the logits or the answers."""
        return self.output if self.words is None or "output" in self.model_fields_set else ANSWER

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns that are sent; all of the input if the settings do not name them."""
        return InputColumns(frozenset(self.inputs), frozenset() if self.inputs else None)

    @property
    def source(self) -> str:
        """Return the model and its server as a phrase."""
        return f"{self.model} at {self.url}"

    def server(self) -> Access:
        """Return how the server is reached. Raises ConfigError if a secret or a certificate is missing."""
        owner = f"model {self.model!r}"
        token = None if self.token_env is None else required_secret(self.token_env, owner)
        settings = "url, model, inputs, compress, token_env and headers in the stage's model"
        if self.url.startswith("http:"):
            return self.access(self.url, settings, token)
        try:
            tls = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                # Without this, OpenSSL would ask for a key's passphrase on the terminal.
                tls.load_cert_chain(self.cert, self.key, password=lambda: b"")
        except (OSError, ValueError) as error:
            files = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise ConfigError(f"{owner}: {files} cannot be used as ca, cert and key: {error}") from error
        return self.access(self.url, settings, token, tls)
