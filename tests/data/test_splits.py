import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cauc_ray.data.benchmarks import BENCHMARKS
from cauc_ray.data.splits import RULE_PARTITIONS, split_by_rule, split_shares
from cauc_ray.errors import ConfigError, DataError

sizes = st.fixed_dictionaries(
    {"train": st.integers(300, 400), "validation": st.integers(4, 300), "test": st.integers(4, 300)}
)


@given(st.sampled_from(sorted(BENCHMARKS)), sizes, st.integers(0, 99))
def test_splits_are_disjoint_seeded_and_of_the_papers_sizes(dataset, partition_sizes, seed):
    rule = BENCHMARKS[dataset].rule
    taken_from = {name: partition_sizes[name] for name in RULE_PARTITIONS[rule]}
    splits = split_by_rule(rule, taken_from, seed)
    parts = splits.values()
    taken = [(p.partition, row) for p in parts for row in p.rows.tolist()]
    assert len(taken) == len(set(taken))
    for part in parts:
        assert 0 <= part.rows.min() <= part.rows.max() < partition_sizes[part.partition]
    n = partition_sizes["validation"]
    assert abs(len(splits["calibration"].rows) - len(splits["validation"].rows)) <= 1
    if rule == "three-way":
        assert {p.partition for p in parts} == {"validation"}
        assert len(taken) == n
        assert abs(len(splits["test"].rows) - n / 2) <= 1
    else:
        assert len(splits["calibration"].rows) + len(splits["validation"].rows) == n
        assert splits["test"].partition == ("validation" if rule == "sample-train" else "test")
        assert len(splits["test"].rows) == partition_sizes[splits["test"].partition]
        assert splits["calibration"].partition == ("train" if rule == "sample-train" else "validation")
    again = split_by_rule(rule, taken_from, seed)
    assert (again["calibration"].rows == splits["calibration"].rows).all()


def test_what_cannot_be_split_is_refused():
    with pytest.raises(DataError, match="needs a partition 'test'"):
        split_by_rule("halve-validation", {"validation": 100, "test": 3})
    with pytest.raises(DataError, match="cannot give a sample of 50"):
        split_by_rule("sample-train", {"train": 40, "validation": 50})
    with pytest.raises(ConfigError, match="sum to 1"):
        split_shares(10, {"a": 0.5, "b": 0.6})


@given(st.integers(4, 500), st.integers(0, 9))
def test_shares_cover_all_rows_once(n, seed):
    parts = split_shares(n, {"train": 0.4, "calibration": 0.15, "validation": 0.15, "test": 0.3}, seed)
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(n))
    assert abs(len(parts["train"]) - 0.4 * n) <= 1
