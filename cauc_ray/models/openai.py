"""Models behind OpenAI-compatible servers as stages: log-probabilities of options, sampled votes, or decisions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from cauc_ray.models.credentials import Access, ServerSpec, ServerUrl, environment_secret, required_secret
from cauc_ray.models.generating import GeneratingSpec
from cauc_ray.models.kind import Section
from cauc_ray.models.prompts import ImagePromptSpec, OptionsAs, Prompts
from cauc_ray.numbers.logits import LogitKind

OPENAI_URL = "https://api.openai.com/v1"
# Fields of a request that the other settings of a model fill.
RESERVED_FIELDS = frozenset(
    {"model", "messages", "prompt", "input", "state", "questions", "temperature", "n", "logprobs", "top_logprobs"}
    | {"response_format", "chat_template_kwargs", "logprob_token_ids", "return_tokens_as_token_ids"}
    | {"prompt_logprobs", "stream"}
)
# The most options of a question to a decision model.
MAX_DECISION_OPTIONS = 255


class Prices(Section):
    """USD per million tokens, of the prompt and of the answer. Discounts for cached tokens are not known.

    Attributes:
        input: Price of the prompt's tokens.
        output: Price of the answer's tokens.
    """

    input: float = Field(ge=0, allow_inf_nan=False)
    output: float = Field(ge=0, allow_inf_nan=False)


class EndpointSpec(ImagePromptSpec, ServerSpec):
    """A language model behind a server.

    Attributes:
        base_url: Another server than OpenAI's, up to and with its /v1.
        api_key_env: The environment variable that holds the key, which is stored nowhere else; servers other than
            OpenAI's may need none.
        system: A system message before each prompt.
        extra_body: More fields of each request, such as reasoning_effort or service_tier.
        prices: Prices of tokens, so that each call reports its costs. An attempt without an answer in time is billed
            like the one that was answered.
        max_usd: What a replica may spend. Requests in flight count at the costs of the most expensive one so far.
        max_concurrency: Requests of a replica at a time, fewer while the server limits its rate.
        timeout_s: Seconds of one attempt.
        max_retries: Further attempts after a fault of the server or of the connection. Rate limits are waited for
            until the call ends.
    """

    PACKAGES: ClassVar[tuple[str, ...]] = ("openai", "httpx2")
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset(
        {"api_key_env", "headers", "prices", "max_concurrency", "timeout_s", "max_retries", "max_usd"}
    )
    base_url: ServerUrl | None = None
    api_key_env: str = Field(default="OPENAI_API_KEY", min_length=1)
    system: str | None = Field(default=None, min_length=1)
    extra_body: dict[str, Any] = Field(default_factory=dict)
    prices: Prices | None = None
    max_usd: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    max_concurrency: int = Field(default=32, ge=1, le=1000)
    timeout_s: float = Field(default=60, gt=0, allow_inf_nan=False)
    max_retries: int = Field(default=5, ge=0, le=100)

    @model_validator(mode="after")
    def _settings_fit(self) -> EndpointSpec:
        if self.max_usd is not None and self.prices is None:
            raise ValueError("max_usd needs prices")
        if reserved := sorted(self.extra_body.keys() & RESERVED_FIELDS):
            raise ValueError(f"extra_body: {reserved[0]} is set by other settings of the model")
        return self

    @property
    def url(self) -> str:
        """Return where the server is."""
        return self.base_url or OPENAI_URL

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of what each call costs, None if no prices are given."""
        return "USD" if self.prices else None

    @property
    def shown(self) -> str:
        """Return the system message and the prompt as one text."""
        return self._with_system(super().shown)

    def _with_system(self, prompt: str) -> str:
        return prompt if self.system is None else f"{self.system}\n\n{prompt}"

    @property
    def source(self) -> str:
        """Return the model and its server as a phrase."""
        return f"{self.kind} {self.model} at {self.url}"

    @property
    def is_chat(self) -> bool:
        """Return whether a prompt is a message of a conversation."""
        return True

    def server(self) -> Access:
        """Return how the server is reached. Raises ConfigError without a header's variable, or OpenAI's key."""
        secret = required_secret if self.base_url is None else environment_secret
        settings = f"base_url, model, its other settings, and the key in the environment variable {self.api_key_env}"
        return self.access(self.url, settings, secret(self.api_key_env, f"model {self.model!r}"))


class OpenAISpec(GeneratingSpec, EndpointSpec):
    """`{kind: openai, model: gpt-4o-mini, prices: {input: 0.15, output: 0.60}}`: a server with log-probabilities.

    With `generate`, it answers in words.

    Attributes:
        top_logprobs: Number of the likeliest first tokens to ask for, if the server does not score given tokens.
        endpoint: completions gives the bare prompt to a model, chat goes through the model's own template.
        chat_template_kwargs: Variables of that template, such as enable_thinking: false.
        votes: For models without log-probabilities, the number of answers to sample at temperature 1. The shares of
            their votes, with one more vote spread over all options, are the probabilities.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.completions:load"
    kind: Literal["openai"]
    top_logprobs: int = Field(default=20, ge=1, le=20)
    endpoint: Literal["chat", "completions"] = "chat"
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    votes: int | None = Field(default=None, ge=2, le=128)

    @model_validator(mode="after")
    def _can_be_asked(self) -> OpenAISpec:
        if self.endpoint == "completions":
            chat_only = ("system", "image", "chat_template_kwargs", "votes", "generate")
            if unused := next((name for name in chat_only if getattr(self, name)), None):
                raise ValueError(f"{unused} is for endpoint: chat, where the server makes the prompt of a conversation")
        limits = self.extra_body.keys() & {"max_tokens", "max_completion_tokens"}
        if self.generate is not None:
            if limits:
                raise ValueError(f"extra_body: {min(limits)} is max_tokens of generate")
            if wrong := {"votes", "top_logprobs"} & self.model_fields_set:
                raise ValueError(f"{min(wrong)} is for models that choose among options, not with generate")
            return self
        if limits and self.votes is None:
            raise ValueError(f"extra_body: {min(limits)} is for votes; else a single token is read")
        if self.votes is not None:
            if self.answers_with == "text":
                raise ValueError("votes are for options: letter or name, which the prompt lists")
            if "top_logprobs" in self.model_fields_set:
                raise ValueError("votes are for models without log-probabilities; leave top_logprobs out")
        elif self.image and self.answers_with != "letter":
            raise ValueError(
                f"options: {self.answers_with} cannot be scored after an image by a server; use letter, or votes"
            )
        elif self.base_url is None and self.answers_with != "letter":
            raise ValueError(f"options: {self.answers_with} needs a server that scores given tokens, such as vLLM's")
        return self

    @property
    def is_chat(self) -> bool:
        """Return whether a prompt is a message of a conversation."""
        return self.endpoint == "chat"

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return super().answers_kind if self.votes is None else "probabilities"


class DecisionsSpec(EndpointSpec):
    """`{kind: decisions, model: NAME, base_url: URL}`: a server that returns a probability for every option.

    Attributes:
        instructions: Instructions of the question.
        question: "choice" among the options; "score", if these are levels in their order; or "predicate", for two
            options of which the second means that the statement in instructions is true.
        format: "decisions" asks POST /v1/decisions with the prompt as input; "systemone" asks POST /v1/systemone with
            the prompt as state.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.endpoint:DecisionsModel"
    LOGITS: ClassVar[LogitKind] = "probabilities"
    kind: Literal["decisions"]
    instructions: str = "Choose the right option."
    question: Literal["choice", "score", "predicate"] = "choice"
    format: Literal["decisions", "systemone"] = "decisions"

    @model_validator(mode="after")
    def _can_be_asked(self) -> DecisionsSpec:
        if self.options is not None:
            raise ValueError("options are for models that are asked by prompt; a decision lists its own")
        if self.question == "predicate" and len(self.labels or ()) != 2:
            raise ValueError("a predicate needs two labels: that it is false, and that it is true")
        if len(self.labels or ()) > MAX_DECISION_OPTIONS:
            raise ValueError(f"a decision takes up to {MAX_DECISION_OPTIONS} labels, not {len(self.labels or ())}")
        if self.format == "systemone" and (self.system or self.image):
            raise ValueError("format: systemone has neither system nor image; write the task into instructions")
        return self

    @property
    def answers_with(self) -> OptionsAs:
        """Return that the prompt does not list the options: the question does."""
        return "text"

    @property
    def shown(self) -> str:
        """Return the prompt and the question that is asked about it as one text."""
        prompt, question = Prompts(self, chat=True), self.decision(self.label_names or ())
        text = f"{prompt.head}{self.template.rstrip()}\n\n{json.dumps(question, ensure_ascii=False)}"
        return self._with_system(text)

    def decision(self, options: Sequence[str]) -> dict[str, Any]:
        """Return the question about a row with these options, in the format of the server.

        |  | `decisions` | `systemone` |
        | --- | --- | --- |
        | question | an element of `questions` | `answer` in the object `questions` |
        | choice | `choices`: objects of `value` and `description` | `criteria`: descriptions or null by option |
        | score | `levels`: objects of `label` and `description` | `criteria`: a list of "option: description" |
        | predicate | type `predicate` | type `noul` |
        | their answers | `probabilities`: objects of `value` or `label` | `probabilities` by option or level number |
        | its answer | `probability` | `noul` |
        """
        question: dict[str, Any] = {"type": self.question, "instructions": self.instructions}
        is_systemone, texts = self.format == "systemone", self.descriptions
        if self.question == "predicate":
            return question | ({"type": "noul"} if is_systemone else {})
        if is_systemone and self.question == "choice":
            return question | {"criteria": {option: texts.get(option) for option in options}}
        if is_systemone:
            return question | {"criteria": [": ".join(filter(None, (name, texts.get(name)))) for name in options]}
        name, key = ("value", "choices") if self.question == "choice" else ("label", "levels")
        descriptions = [{"description": texts[option]} if option in texts else {} for option in options]
        return question | {key: [{name: option} | text for option, text in zip(options, descriptions, strict=True)]}
