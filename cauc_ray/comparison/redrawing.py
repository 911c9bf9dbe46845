"""Splits that are put together and cut anew, so that figures have a spread over what they were fitted on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from cauc_ray.data.logit_part import joined_logits
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.trace import EmbeddingCall, Examples


def redraw(splits: Mapping[str, Examples], names: Sequence[str], seed: int) -> dict[str, Examples]:
    """Put the named splits together, shuffle them with a seed, and cut them into the sizes that they had.

    splits: of one chain, by name; those that are not named stay as they are.
    """
    if not names:
        return dict(splits)
    pooled = _joined([splits[name] for name in names])
    ends = np.cumsum([len(splits[name]) for name in names])
    shuffled = np.random.default_rng(seed).permutation(len(pooled))
    parts = np.split(shuffled, ends[:-1])
    drawn = {
        name: _taken(pooled, np.sort(rows), f"{splits[name].chain.source}, redrawn with seed {seed}")
        for name, rows in zip(names, parts, strict=True)
    }
    return {**splits, **drawn}


def _joined(parts: Sequence[Examples]) -> Examples:
    """Return examples of several splits as one; where splits differ in options, rows get -inf for those they lack."""
    chains = [part.chain for part in parts]
    first = chains[0]
    logits = [joined_logits([chain.logits[place] for chain in chains]) for place in range(len(first.models))]
    shapes = [(len(chain), len(chain.models)) for chain in chains]
    costs = [chain.costs.per_call for chain in chains]
    per_call = any(each.ndim == 2 for each in costs)
    of_rows = np.concatenate([np.broadcast_to(c, shape) for c, shape in zip(costs, shapes, strict=True)])
    chain = replace(
        first,
        logits=tuple(logits),
        example_ids=tuple(example for chain in chains for example in chain.example_ids),
        labels=np.concatenate([chain.labels for chain in chains]),
        costs=Costs(first.costs.unit, of_rows if per_call else first.costs.per_call),
        per_call_costs=any(chain.per_call_costs for chain in chains),
    )
    embeddings = [part.embeddings for part in parts if part.embeddings is not None]
    texts = [part.texts for part in parts if part.texts is not None]
    return Examples(
        chain,
        np.concatenate(embeddings) if embeddings else None,
        tuple(text for of_part in texts for text in of_part) if texts else None,
        _joined_calls(parts),
    )


def _joined_calls(parts: Sequence[Examples]) -> EmbeddingCall | None:
    first = parts[0].embedding_call
    if first is None:
        return None
    costs = [np.broadcast_to(each.embedding_call.costs, len(each)) for each in parts if each.embedding_call is not None]
    return replace(first, costs=np.concatenate(costs))


def _taken(examples: Examples, rows: Ints, source: str) -> Examples:
    """Return some rows of examples, int (n,)."""
    whole = examples.chain
    costs = whole.costs.per_call
    chain = replace(
        whole,
        logits=tuple(logits[rows] for logits in whole.logits),
        example_ids=tuple(whole.example_ids[row] for row in rows),
        labels=whole.labels[rows],
        costs=Costs(whole.costs.unit, costs[rows] if costs.ndim == 2 else costs),
        source=source,
    )
    texts, call = examples.texts, examples.embedding_call
    return Examples(
        chain,
        None if examples.embeddings is None else examples.embeddings[rows],
        None if texts is None else tuple(texts[row] for row in rows),
        None if call is None else replace(call, costs=np.broadcast_to(call.costs, len(examples))[rows]),
    )
