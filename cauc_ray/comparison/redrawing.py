"""Splits that are drawn again with each seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.logits import stacked
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.trace import Examples


def drawn_rows(sizes: Mapping[str, int], names: Sequence[str], seed: int) -> dict[str, Ints]:
    """Return for each of the named splits its rows of all of them put together, drawn with a seed.

    Args:
        sizes: The rows of each split.
        names: The splits that are put together.
        seed: Of the draw.
    """
    ends = np.cumsum([sizes[name] for name in names])
    parts = np.split(np.random.default_rng(seed).permutation(ends[-1]), ends[:-1])
    return {name: np.sort(rows) for name, rows in zip(names, parts, strict=True)}


def redraw(splits: Mapping[str, Examples], names: Sequence[str], seed: int) -> dict[str, Examples]:
    """Put the named splits together, shuffle them with a seed, and cut them into the sizes that they had.

    Args:
        splits: Splits of one chain, by name; those that are not named stay as they are.
        names: The splits to draw again.
        seed: Of the draw.
    """
    if not names:
        return dict(splits)
    pooled = _joined([splits[name] for name in names])
    drawn = {
        name: pooled.of_rows(rows, f"{splits[name].chain.source}, redrawn with seed {seed}")
        for name, rows in drawn_rows({name: len(splits[name]) for name in names}, names, seed).items()
    }
    return {**splits, **drawn}


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return examples of several splits as one; where splits differ in options, rows get -inf for those they lack."""
    chains, first = [part.chain for part in parts], parts[0]
    costs = [of.costs.per_call for of in chains]
    if any(of_part.ndim == 2 for of_part in costs):
        shapes = [(len(of), len(of.models)) for of in chains]
        costs = [np.concatenate(list(map(np.broadcast_to, costs, shapes)))]
    joined = replace(
        first.chain,
        logits=tuple(stacked(of_model) for of_model in zip(*(of.logits for of in chains), strict=True)),
        example_ids=tuple(example for of in chains for example in of.example_ids),
        labels=np.concatenate([of.labels for of in chains]),
        costs=Costs(first.chain.costs.unit, costs[0]),
        per_call_costs=any(of.per_call_costs for of in chains),
    )
    calls = [part.embedding_call for part in parts]
    paid = [np.broadcast_to(call.costs, len(part)) for call, part in zip(calls, parts, strict=True) if call is not None]
    embeddings = [part.embeddings for part in parts if part.embeddings is not None]
    texts = [text for part in parts for text in part.texts or ()]
    call = None if calls[0] is None else replace(calls[0], costs=np.concatenate(paid))
    hidden = {model: np.concatenate([part.hidden[model] for part in parts]) for model in first.hidden}
    vectors = np.concatenate(embeddings) if embeddings else None
    return Examples(joined, vectors, tuple(texts) or None, call, hidden=hidden)
