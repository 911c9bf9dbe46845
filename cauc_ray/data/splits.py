"""Calibration, validation and test splits by the paper's appendix ("Dataset splits"): seeded, disjoint.

Every split is a set of row numbers of one partition of the dataset as published (train, validation, test).
Three rules are the paper's, for its nine datasets. Two are for other datasets: the three published partitions, and
a sample of the train set as in sample-train, with a published test set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.rows import ascending
from cauc_ray.numbers.types import Ints

Rule: TypeAlias = Literal["halve-validation", "sample-train", "three-way", "as-published", "sample-train-with-test"]

# The partitions that each rule uses, first the one that it samples or cuts; three-way also cuts a single partition of
# any name.
RULE_PARTITIONS: Mapping[Rule, tuple[str, ...]] = {
    "halve-validation": ("validation", "test"),
    "sample-train": ("train", "validation"),
    "three-way": ("validation",),
    "as-published": ("calibration", "validation", "test"),
    "sample-train-with-test": ("train", "test"),
}


@dataclass(frozen=True, slots=True)
class SplitRows:
    """One split: its published partition, and its ascending row numbers there, int64."""

    partition: str
    rows: Ints


def choose_rule(partitions: Collection[str], source: str = "the dataset") -> Rule:
    """Return the rule for a dataset with these partitions that is not one of the paper's.

    Raises DataError, prefixed with the source, if no rule fits.

    >>> choose_rule(["train", "validation"]), choose_rule(["questions"])
    ('sample-train', 'three-way')
    """
    if len(partitions) == 1:
        return "three-way"
    for rule in ("as-published", "halve-validation", "sample-train", "sample-train-with-test"):
        if set(RULE_PARTITIONS[rule]) <= set(partitions):
            return rule
    raise DataError(
        f"{source}: no rule splits the partitions {', '.join(sorted(partitions))}; name them calibration, validation "
        "and test (or two of train, validation and test), or give a single file for a 25/25/50 cut"
    )


def describe_rule(rule: Rule, partitions: Sequence[str], seed: int = 0) -> str:
    """Return a phrase that describes how a rule splits a dataset, given the partitions that it uses.

    >>> describe_rule("halve-validation", ["validation", "test"])
    'validation halved into calibration and validation (seed 0)'
    """
    drawn = partitions[0]
    if rule == "as-published":
        return "calibration, validation and test as published"
    if rule == "three-way":
        return f"{drawn} cut 25/25/50 into calibration, validation and test (seed {seed})"
    sampled = f", at most as many rows as {partitions[1]} has," if drawn == "train" else ""
    return f"{drawn}{sampled} halved into calibration and validation (seed {seed})"


def split_by_rule(
    rule: Rule, partition_sizes: Mapping[str, int], seed: int = 0, source: str = "the dataset"
) -> dict[str, SplitRows]:
    """Split a dataset into calibration, validation and test examples.

    partition_sizes: rows of each partition that the rule uses, in the order of RULE_PARTITIONS; each of several test
    partitions is a split with its own name. Tasks with a labelled test set halve their validation
    set; PIQA and MedMCQA are tested on validation and halve as many rows sampled from train; ImageNet's
    validation set is cut 25/25/50. An odd row goes to calibration.
    Raises DataError, prefixed with the source, if a partition is too small.

    >>> splits = split_by_rule("sample-train", {"train": 16113, "validation": 1838})
    >>> {name: (split.partition, len(split.rows)) for name, split in splits.items()}
    {'calibration': ('train', 919), 'validation': ('train', 919), 'test': ('validation', 1838)}
    """
    for name, n in partition_sizes.items():
        if n < 4:
            raise DataError(f"{source}: splitting by {rule!r} needs a partition {name!r} of at least four rows")
    whole = {name: SplitRows(name, np.arange(n)) for name, n in partition_sizes.items()}
    if rule == "as-published":
        return whole
    rng = np.random.default_rng(seed)
    drawn, *tested = partition_sizes
    n = partition_sizes[drawn]
    if rule == "three-way":
        pool, test = np.split(rng.permutation(n), [(n + 1) // 2])
        half = (n + 3) // 4
        tests = {"test": SplitRows(drawn, np.sort(test))}
    else:
        n_tested = partition_sizes[tested[0]]
        if rule == "sample-train" and n < n_tested:
            raise DataError(
                f"{source}: a train set of {n} rows cannot give a sample of {n_tested}, the test set's size"
            )
        pool = rng.permutation(n) if drawn == "validation" else rng.choice(n, min(n, n_tested), replace=False)
        half = (len(pool) + 1) // 2
        tests = {"test" if len(tested) == 1 else name: whole[name] for name in tested}
    halves = {"calibration": pool[:half], "validation": pool[half:]}
    return {name: SplitRows(drawn, np.sort(rows)) for name, rows in halves.items()} | tests


def split_shares(n: int, shares: Mapping[str, float], seed: int = 0) -> dict[str, Ints]:
    """Split n rows at random into disjoint named parts of the given shares, which sum to 1; ascending rows, int64.

    >>> {name: len(rows) for name, rows in split_shares(10, {"train": 0.5, "test": 0.5}).items()}
    {'train': 5, 'test': 5}
    """
    if min(shares.values()) <= 0 or abs(sum(shares.values()) - 1) > 1e-9:
        raise ConfigError(f"the shares of a split must be positive and sum to 1, got {dict(shares)}")
    ends = np.round(np.cumsum(list(shares.values())) * n).astype(int)
    shuffled = np.random.default_rng(seed).permutation(n)
    return {name: ascending(rows, n) for name, rows in zip(shares, np.split(shuffled, ends[:-1]), strict=True)}
