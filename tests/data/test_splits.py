import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.data.splits import RULE_PARTITIONS, choose_rule, split_by_rule, split_shares
from cauc_ray.errors import ConfigError, DataError

partition_sizes = st.fixed_dictionaries(
    {
        "train": st.integers(4, 400),
        "validation": st.integers(4, 300),
        "test": st.integers(4, 300),
        "calibration": st.integers(4, 300),
    }
)


@given(st.sampled_from(sorted(RULE_PARTITIONS)), partition_sizes, st.integers(0, 99))
def test_splits_are_disjoint_seeded_and_of_the_papers_sizes(rule, sizes, seed):
    sizes["train"] += sizes["validation"] if rule == "sample-train" else 0
    sizes = {name: sizes[name] for name in RULE_PARTITIONS[rule]}
    splits = split_by_rule(rule, sizes, seed)
    assert list(splits) == ["calibration", "validation", "test"]
    taken = [(part.partition, row) for part in splits.values() for row in part.rows.tolist()]
    assert len(taken) == len(set(taken))
    for part in splits.values():
        assert part.rows.tolist() == sorted(part.rows)
        assert 0 <= part.rows.min() <= part.rows.max() < sizes[part.partition]
    n = {split: len(part.rows) for split, part in splits.items()}
    if rule == "as-published":
        assert n == sizes
        return
    assert 0 <= n["calibration"] - n["validation"] <= 1
    assert {splits["calibration"].partition, splits["validation"].partition} == {next(iter(sizes))}
    if rule == "three-way":
        assert len(taken) == sizes["validation"]
        assert abs(n["test"] - sizes["validation"] / 2) <= 1
    else:
        drawn, tested = sizes
        assert (splits["test"].partition, n["test"]) == (tested, sizes[tested])
        whole = sizes["validation"] if drawn == "validation" else min(sizes.values())
        assert n["calibration"] + n["validation"] == whole
    again = split_by_rule(rule, sizes, seed)
    assert (again["calibration"].rows == splits["calibration"].rows).all()


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (lambda: split_by_rule("halve-validation", {"validation": 100, "test": 3}), "needs a partition 'test' of at"),
        (lambda: split_by_rule("sample-train", {"train": 40, "validation": 50}), "cannot give a sample of 50"),
        (lambda: split_shares(10, {"a": 0.5, "b": 0.6}), "sum to 1"),
        (lambda: choose_rule(["train", "dev"]), "no rule splits .* dev, train; name them"),
    ],
)
def test_what_cannot_be_split_is_refused(split, words):
    with pytest.raises((ConfigError, DataError), match=words):
        split()


@given(st.integers(4, 500), st.integers(0, 9))
def test_shares_cover_all_rows_once(n, seed):
    parts = split_shares(n, {"train": 0.4, "calibration": 0.15, "validation": 0.15, "test": 0.3}, seed)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(n))
    assert abs(len(parts["train"]) - 0.4 * n) <= 1
