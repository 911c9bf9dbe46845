"""A digest of logits that is a sum over rows: parts of a table add up to the digest of the whole."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.types import Floats, Ints

# The odd number nearest to 2^64 over the golden ratio, by which Weyl sequences spread best.
_STEP = 0x9E3779B97F4A7C15
# Any number that is no float32's bits of note: a logit of 0 shall not look like a missing option.
_NOT_MISSING = np.uint32(0x5BD1E995)


def digest_of_rows(logits: Floats, ranks: Ints) -> int:
    """Return the sum over rows of a hash of each row's logits and rank, modulo 2^64 for whoever adds them up.

    logits: float (n, K), taken as float32; -inf counts as no option.   ranks: int (n,), the rows' places among all.
    A row's hash is linear in its bits with a multiplier for each option (Carter and Wegman, Universal classes of hash
    functions, 1979), mixed with its rank: it tells data apart that differ by chance, not by intent.
    """
    single = np.ascontiguousarray(logits, dtype="<f4")
    bits = np.where(np.isneginf(single), np.uint32(0), single.view("<u4") ^ _NOT_MISSING)
    options = np.arange(1, single.shape[1] + 1, dtype=np.uint64)
    of_rows = np.vecdot(bits.astype(np.uint64), _mixed(options * np.uint64(_STEP)) | np.uint64(1))
    hashes = _mixed(of_rows + _mixed((ranks.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)))
    return int(hashes.sum(dtype=np.uint64))


def _mixed(values: Ints) -> Ints:
    """Return values whose every bit depends on all bits of the given ones, uint64 (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
