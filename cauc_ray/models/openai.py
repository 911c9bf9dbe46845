"""Models behind OpenAI-compatible servers as stages: log-probabilities of one token, or decisions."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Model
from cauc_ray.models.kind import IN_TIME, Placement, Section
from cauc_ray.models.prompts import LanguageSpec, OptionsAs, Prompts
from cauc_ray.numbers.logits import LogitKind

OPENAI_URL = "https://api.openai.com/v1"
# A placeholder for servers without keys, since the client requires one.
NO_KEY = "no-key-needed"


class Prices(Section):
    """USD per million tokens, of the prompt and of the answer. Discounts for cached tokens are not known."""

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)


class EndpointSpec(LanguageSpec):
    """A language model behind a server.

    base_url: of another server than OpenAI's, up to and with its /v1.   api_key_env: the environment variable
    that holds the key, which is stored nowhere else; servers other than OpenAI's may need none.   prices: of
    tokens, so that each call reports its own cost.   max_usd: what a replica may spend before it asks no more.
    max_concurrency: requests at a time within one call.   timeout_s: of one attempt.   max_retries: further attempts
    after a rate limit, a fault of the server or of the connection.
    """

    PACKAGES: ClassVar[tuple[str, ...]] = ("openai", "openai")
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset(
        {"api_key_env", "max_concurrency", "timeout_s", "max_retries", "max_usd", "prices"}
    )
    ENFORCES_OWN_TIMEOUT: ClassVar[bool] = True
    model: str = Field(min_length=1)
    # A password or key in the address would appear in tables and messages.
    base_url: str | None = Field(default=None, pattern=r"^https?://[^/@?#\s]+(/[^?#\s]*)?$")
    api_key_env: str = Field(default="OPENAI_API_KEY", min_length=1)
    prices: Prices | None = None
    max_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_concurrency: int = Field(default=32, ge=1, le=1000)
    timeout_s: float = Field(default=60, gt=0, allow_inf_nan=False)
    max_retries: int = Field(default=5, ge=0, le=100)

    @model_validator(mode="after")
    def _budget_has_prices(self) -> EndpointSpec:
        if self.max_usd is not None and self.prices is None:
            raise ValueError("max_usd needs prices")
        return self

    @property
    def url(self) -> str:
        """Return where the server is."""
        return self.base_url or OPENAI_URL

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of what each call costs, None where no prices are given."""
        return "USD" if self.prices else None

    @property
    def key(self) -> str | None:
        """Return the key for the server, None if its variable is not set."""
        return os.environ.get(self.api_key_env)

    def check(self, local: bool) -> None:
        """Raise ConfigError where the package openai is missing, or the key that OpenAI's own server needs."""
        if not local:
            return
        self.require(*self.PACKAGES)
        if not self.key and self.base_url is None:
            raise ConfigError(
                f"model {self.model!r}: the environment variable {self.api_key_env} has no key for {self.url}; "
                "set it on the nodes of the stage, or give base_url for a server that needs no key"
            )


class OpenAISpec(EndpointSpec):
    """`{kind: openai, model: gpt-4o-mini, prices: {input: 0.15, output: 0.60}}`: a server with log-probabilities.

    top_logprobs: how many of the likeliest first tokens to ask for, where the server does not score given tokens.
    endpoint: completions gives the bare prompt to a model, chat goes through the model's own template.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.openai:load_completions"
    kind: Literal["openai"]
    top_logprobs: int = Field(default=20, ge=1, le=20)
    endpoint: Literal["chat", "completions"] = "chat"

    @model_validator(mode="after")
    def _can_be_asked(self) -> OpenAISpec:
        if self.base_url is None and self.answers_with != "letter":
            raise ValueError(f"options: {self.answers_with} needs a server that scores given tokens, such as vLLM's")
        return self


class DecisionsSpec(EndpointSpec):
    """`{kind: decisions, model: NAME, base_url: URL}`: a server that returns a probability for every option.

    It is asked POST /v1/decisions, with the prompt as input.   instructions: of the question.   question: "choice"
    among the options; "score", where these are levels in their order; or "predicate", for two options of which the
    second says that the statement in instructions is true.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.openai:load_decisions"
    kind: Literal["decisions"]
    instructions: str = "Choose the right option."
    question: Literal["choice", "score", "predicate"] = "choice"

    @model_validator(mode="after")
    def _can_be_asked(self) -> DecisionsSpec:
        if self.options is not None:
            raise ValueError("options are for models that are asked by prompt; a decision lists its own")
        if self.question == "predicate" and len(self.labels or ()) != 2:
            raise ValueError("a predicate needs two labels: that it is false, and that it is true")
        return self

    @property
    def answers_with(self) -> OptionsAs:
        """Return that the prompt does not list the options: the question does."""
        return "text"

    @property
    def shown(self) -> str:
        """Return the prompt and the question that is asked about it as one text."""
        prompt, question = Prompts(self, chat=True), self.asked(self.label_names or ())
        return f"{prompt.head}{self.template.rstrip()}\n\n{json.dumps(question, ensure_ascii=False)}"

    def asked(self, options: Sequence[str]) -> dict[str, Any]:
        """Return the question about a row with these options, as the protocol has it."""
        question = {"type": self.question, "instructions": self.instructions}
        if self.question == "predicate":
            return question
        about = self.descriptions
        name, listed = ("value", "choices") if self.question == "choice" else ("label", "levels")
        more = [{"description": about[option]} if option in about else {} for option in options]
        return {**question, listed: [{name: option, **own} for option, own in zip(options, more, strict=True)]}

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return "probabilities"


def load_completions(spec: OpenAISpec, placement: Placement) -> Model:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    from cauc_ray.models.completions import CompletionsModel

    spec.check(local=True)
    return CompletionsModel(spec, spec.key or NO_KEY, IN_TIME * placement.call_timeout_s)


def load_decisions(spec: DecisionsSpec, placement: Placement) -> Model:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    from cauc_ray.models.endpoint import DecisionsModel

    spec.check(local=True)
    source = f"decisions of {spec.model} at {spec.url}"
    return DecisionsModel(spec, spec.key or NO_KEY, IN_TIME * placement.call_timeout_s, source)
