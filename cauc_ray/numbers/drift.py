"""A sequential test of shares: evidence that rows no longer come as reference rows did, valid whenever it is looked at.

The evidence is a ratio of two predictions of the rows: by shares that change at some row to unknown ones, over shares
that stay the reference's. While nothing changes its mean is at most 1 at any time, so that it ever passes 1 / alpha
with a probability of at most alpha (Ville, 1939). That the reference is finite is a part of the second prediction.
"""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.types import Floats, Ints

# A change may begin every so many rows; the latest beginnings are kept apart, and the first row's.
SPACING = 64
MOST_BEGINNINGS = 16
# How many rows of the reference's shares the changed ones are worth: the fewer, the further they may lie from these.
_CONCENTRATIONS = np.array([100.0, 300.0])
# Rows that a context's categories share before any was seen. As many for each of them would be too many: most of many
# categories never occur, and a prediction that must first learn this from the rows loses to any other one.
_UNSEEN = 2.0
# What a row of the reference counts for. At 1/2 its error is as large again, and an endless stream drawn from
# other saved rows, as many as the reference's, differs from it no more; the rest is for a reference of unlucky rows.
_TRUST = 0.4


class ShareDrift:
    """Tests whether the shares of K categories, within each of G contexts, are still those of reference rows.

    Both predictions are Dirichlet's, so that their ratio needs only counts. One that stays begins with the reference's
    shares as its mean, one that changes with what the former has come to by then: it should win only by what is new.
    How often a context comes is not tested. The state is counts and evidence, no rows.
    """

    def __init__(self, reference: Ints) -> None:
        """Begin without rows.   reference: int (G, K), how many rows had each category in each context."""
        self._n_categories = reference.shape[1]
        cells = reference + _UNSEEN / self._n_categories
        totals = cells.sum(axis=1)
        self._means = (cells / totals[:, None]).ravel()
        self._same = _TRUST * totals
        # A changed share that is known better than the reference's own would be no change.
        self._changed = np.minimum(_CONCENTRATIONS, self._same[:, None] / 2)
        self.n = 0
        self._counts = np.zeros(cells.size)
        self._begun_at = np.zeros(0, dtype=np.int64)
        self._begun = np.zeros((0, cells.size))
        self._begun_means = np.zeros((0, cells.size))
        self._log_weights = np.zeros(0)
        self._log_ratios = np.zeros((0, len(_CONCENTRATIONS)))

    @property
    def since(self) -> int:
        """Return the row from which a change is most likely, were there one; counted from 0."""
        if not self.n:
            return 0
        return int(self._begun_at[(self._log_ratios + self._log_weights[:, None]).max(axis=1).argmax()])

    def add(self, contexts: Ints, categories: Ints) -> Floats:
        """Take more rows, and return the log of the evidence after each of them, float64 (n,).

        contexts, categories: int (n,), in the order in which the rows came. In how many parts makes no difference.
        """
        cells = contexts * self._n_categories + categories
        found: list[Floats] = [np.zeros(0)]
        start = 0
        while start < len(cells):
            if self.n % SPACING == 0:
                self._begin()
            stop = min(len(cells), start + SPACING - self.n % SPACING)
            found.append(self._take(contexts[start:stop], cells[start:stop]))
            start = stop
        return np.concatenate(found)

    def _begin(self) -> None:
        """Let a change begin here. The first row has half of the weight, the j-th beginning after it 1 / (2 j (j + 1)).

        One that is forgotten takes its evidence along: there is less then, never more.
        """
        j = self.n // SPACING
        weight = 0.5 if j == 0 else 0.5 / (j * (j + 1))
        kept = np.arange(j) if j <= MOST_BEGINNINGS else np.r_[0, 2 : MOST_BEGINNINGS + 1]
        self._begun_at = np.append(self._begun_at[kept], self.n)
        self._begun = np.vstack([self._begun[kept], self._counts])
        same, n = (np.repeat(of, self._n_categories) for of in (self._same, self._of_contexts(self._counts)))
        self._begun_means = np.vstack([self._begun_means[kept], (same * self._means + self._counts) / (same + n)])
        self._log_weights = np.append(self._log_weights[kept], np.log(weight / len(_CONCENTRATIONS)))
        self._log_ratios = np.vstack([self._log_ratios[kept], np.zeros(len(_CONCENTRATIONS))])

    def _take(self, contexts: Ints, cells: Ints) -> Floats:
        """Take rows among which no change begins."""
        seen = self._counts[cells] + _earlier(cells)
        in_context = self._of_contexts(self._counts)[contexts] + _earlier(contexts)
        same = self._same[contexts]
        log_same = np.log((same * self._means[cells] + seen) / (same + in_context))

        # By row, beginning and concentration.
        means = self._begun_means[:, cells].T[:, :, None]
        seen_since = (seen - self._begun[:, cells]).T[:, :, None]
        in_context_since = (in_context - self._of_contexts(self._begun)[:, contexts]).T[:, :, None]
        changed = self._changed[contexts][:, None, :]
        log_changed = np.log((changed * means + seen_since) / (changed + in_context_since))
        ratios = self._log_ratios + np.cumsum(log_changed - log_same[:, None, None], axis=0)

        self._log_ratios = ratios[-1]
        self._counts = self._counts + np.bincount(cells, minlength=len(self._counts))
        self.n += len(cells)
        weighed = (ratios + self._log_weights[:, None]).reshape(len(cells), -1)
        highest = weighed.max(axis=1)
        evidence: Floats = highest + np.log(np.exp(weighed - highest[:, None]).sum(axis=1))
        return evidence

    def _of_contexts(self, counts: Floats) -> Floats:
        """Return how many rows the contexts have, (..., G), of counts (..., G * K)."""
        rows: Floats = counts.reshape(*counts.shape[:-1], -1, self._n_categories).sum(axis=-1)
        return rows


def _earlier(values: Ints) -> Ints:
    """Return of each value how many before it are the same, int (n,)."""
    earlier: Ints = np.tril(values[:, None] == values[None, :], -1).sum(axis=1)
    return earlier
