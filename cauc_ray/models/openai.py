"""Any OpenAI-compatible server that returns log-probabilities as a stage, for multiple-choice questions."""

from __future__ import annotations

import os
from typing import ClassVar, Literal

from pydantic import Field

from cauc_ray.errors import ConfigError
from cauc_ray.models import questions
from cauc_ray.models.answers import Model
from cauc_ray.models.kind import KindSpec, require
from cauc_ray.models.section import Section
from cauc_ray.numbers.logits import LogitKind

OPENAI_URL = "https://api.openai.com/v1"
# A placeholder for servers without keys, since the client requires one.
NO_KEY = "no-key-needed"


class Prices(Section):
    """USD per million tokens, of the prompt and of the answer. Discounts for cached tokens are not known."""

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)


class OpenAISpec(KindSpec):
    """`{kind: openai, model: gpt-4o-mini, prices: {input: 0.15, output: 0.60}}`.

    base_url: of another server than OpenAI's, up to and with its /v1.   api_key_env: the environment variable
    that holds the key, which is stored nowhere else; servers other than OpenAI's may need none.   prices: of
    tokens, so that each call reports its own cost.   top_logprobs: how many of the likeliest first tokens
    to ask for.   max_concurrency: requests at a time within one call.   timeout_s: of one attempt.
    max_retries: further attempts after a rate limit, a fault of the server or of the connection.
    endpoint: completions gives the bare prompt to a model, chat goes through the model's own template.
    """

    HOW: ClassVar[frozenset[str]] = frozenset({"api_key_env", "max_concurrency", "timeout_s", "max_retries"})
    GIVES_UP: ClassVar[bool] = True
    NEEDS: ClassVar[frozenset[str]] = questions.NEEDED
    READS: ClassVar[frozenset[str] | None] = questions.READ
    kind: Literal["openai"]
    model: str = Field(min_length=1)
    # A password or key in the address would appear in tables and messages.
    base_url: str | None = Field(default=None, pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")
    api_key_env: str = Field(default="OPENAI_API_KEY", min_length=1)
    prices: Prices | None = None
    top_logprobs: int = Field(default=20, ge=1, le=20)
    max_concurrency: int = Field(default=8, ge=1, le=1000)
    timeout_s: float = Field(default=60, gt=0, allow_inf_nan=False)
    max_retries: int = Field(default=5, ge=0, le=100)
    endpoint: Literal["chat", "completions"] = "chat"

    @property
    def url(self) -> str:
        """Return where the server is."""
        return self.base_url or OPENAI_URL

    @property
    def source(self) -> str:
        """Return in one phrase what answers."""
        return f"openai {self.model} at {self.url} ({self.endpoint}), letter log-probabilities"

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return "log-probabilities"

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of what each call costs, None where no prices are given."""
        return "USD" if self.prices else None

    def load(self) -> Model:
        """Return a model that asks the server; nothing is sent before the first question.

        Raises ConfigError when the package openai is missing, or the key that OpenAI's own server needs.
        """
        require("openai", "openai")
        from cauc_ray.models.completions import OpenAIModel

        key = os.environ.get(self.api_key_env)
        if not key and self.base_url is None:
            raise ConfigError(
                f"model {self.model!r}: the environment variable {self.api_key_env} has no key for {self.url}; "
                "set it on the nodes of the stage, or give base_url for a server that needs no key"
            )
        return OpenAIModel(self, key or NO_KEY)
