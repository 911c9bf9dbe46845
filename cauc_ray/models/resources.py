"""The resources of a stage's replica, and the nodes on which it may run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, ByteSize, Field, field_validator, model_validator

from cauc_ray.models.kind import Section

_VALUE = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
_EXPRESSION = re.compile(rf"(?P<no>!?)(?:(?P<one>{_VALUE})|in\((?P<many>\s*{_VALUE}(?:\s*,\s*{_VALUE})*\s*)\))")
CPUS_PER_GPU = 4


def _expression(text: str) -> str:
    """Return an expression without spaces: Ray 2.60 takes those of "in(a, b)" for part of the values."""
    if not _EXPRESSION.fullmatch(text):
        raise ValueError(f"expected 'value', '!value', 'in(a, b)' or '!in(a, b)', got {text!r}")
    return re.sub(r"\s", "", text)


Labels: TypeAlias = dict[str, Annotated[str, AfterValidator(_expression)]]


class Resources(Section):
    """The resources of one replica, and the required labels of its node.

    Attributes:
        num_gpus: A fraction of one, which several replicas share, or whole ones, which need a language model or a model
            of your own.
        num_cpus: By default 4 for each GPU, to prepare its batches, and at least 1.
        memory: Bytes, or text such as "4GiB" or "500MB"; Ray schedules by it and does not enforce it.
        custom: Ray's custom resources, by name.
        labels: Label -> "value", "!value", "in(a, b)" or "!in(a, b)"; a node without the label meets a negated one.
        fallback: Other labels, tried in order if no node meets the first.
    """

    num_gpus: float = Field(default=0, ge=0)
    num_cpus: float = Field(default_factory=lambda fields: max(1, CPUS_PER_GPU * fields.get("num_gpus", 0)), ge=0)
    memory: ByteSize = Field(default=ByteSize(0), le=1 << 60)
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    labels: Labels = Field(default_factory=dict)
    fallback: tuple[Labels, ...] = ()

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, n: float) -> float:
        if n > 1 and n != int(n):
            raise ValueError(f"num_gpus must be a fraction below 1 or a whole number, got {n:g}")
        return n

    @field_validator("custom")
    @classmethod
    def _are_custom(cls, custom: dict[str, float]) -> dict[str, float]:
        for name in custom.keys() & {"CPU", "GPU", "memory", "object_store_memory", ""}:
            raise ValueError(f"{name!r} is not a custom resource; use num_cpus, num_gpus and memory")
        return custom

    @model_validator(mode="after")
    def _falls_back_from_something(self) -> Resources:
        if self.fallback and not self.labels:
            raise ValueError("fallback needs labels")
        return self

    @property
    def amounts(self) -> dict[str, float]:
        """Return a replica's resources, by Ray's names."""
        return {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": self.memory, **self.custom}

    def met_by(self, node_labels: Mapping[str, str]) -> bool:
        """Return whether a node's labels match the required ones, or one of the fallbacks."""
        ways = (self.labels, *self.fallback)
        return any(all(_meets(node_labels.get(label), needed) for label, needed in way.items()) for way in ways)

    def __str__(self) -> str:
        nodes = [", ".join(f"{k}={v}" for k, v in sorted(one.items())) for one in (self.labels, *self.fallback) if one]
        return amounts_text(self.amounts) + (f" on a node labelled {' or else '.join(nodes)}" if nodes else "")


def amounts_text(amounts: Mapping[str, float]) -> str:
    """Return a readable text of amounts of resources by Ray's names, without those that are 0.

    >>> amounts_text({"CPU": 1, "GPU": 0, "memory": 3 << 29})
    '1 CPU and 1.5 GiB of memory'
    """
    texts = {
        name: f"{ByteSize(amount).human_readable(separator=' ').replace('.0 ', ' ')} of memory"
        if name == "memory"
        else f"{amount:,.6g} {name}{'s' if name in ('CPU', 'GPU') and amount != 1 else ''}"
        for name, amount in amounts.items()
        if amount
    }
    return " and ".join(texts.values()) or "nothing"


def _meets(value: str | None, expression: str) -> bool:
    match = _EXPRESSION.fullmatch(expression)
    assert match is not None  # validated
    allowed = [match["one"]] if match["one"] else match["many"].split(",")
    return (value in allowed) != bool(match["no"])
