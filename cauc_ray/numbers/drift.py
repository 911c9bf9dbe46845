"""A sequential test of category shares: evidence that rows differ from reference rows, valid at any time.

The evidence is a ratio of two predictions of the rows: shares that change at some row to unknown values, over shares
that stay those of the reference. Without a change its mean is at most 1 at any time, so the probability that it ever
exceeds 1 / alpha is at most alpha (Ville, 1939). The second prediction accounts for the finite size of the reference.
"""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.types import Floats, Ints

# Changes may begin at multiples of this many rows; the latest of these are tracked, and the first row.
SPACING = 64
MOST_BEGINNINGS = 16
# Prior strength of changed shares, in rows of the reference's shares: the smaller, the further they may differ.
_CONCENTRATIONS = (100.0, 300.0)
# Of two categories, the second one's odds may also have fallen by these factors everywhere, but for a prior of this
# strength: a change with one unknown number shows in far fewer rows than one with a number for each context.
_FALLS, _OF_FALLS = (float(np.exp(-0.3)), float(np.exp(-0.7))), 300.0
# Prior rows of a context, shared among its categories. This many for each category would be too many: with many
# categories most never occur, and a prediction that must learn this from the rows first is a poor one.
_UNSEEN = 2.0
# Weight of a reference row. At 1/2 the reference's sampling error doubles, which covers an endless stream drawn from
# another sample of the same size; the rest is a margin for an unlucky reference.
_TRUST = 0.4


class ShareDrift:
    """Tests whether the shares of K categories, within each of G contexts, are still those of reference rows.

    Both predictions are Dirichlet-multinomial, so their ratio needs only counts. The unchanged one starts from the
    reference's shares; the changed one starts from what the unchanged one has learned by then, so it gains only by new
    information. How often a context occurs is not tested. The state consists of counts and evidence, not of rows.
    """

    def __init__(self, reference: Ints) -> None:
        """Start without rows.   reference: int (G, K), how many rows had each category in each context."""
        self._n_categories = reference.shape[1]
        cells = reference + _UNSEEN / self._n_categories
        totals = cells.sum(axis=1)
        self._means = (cells / totals[:, None]).ravel()
        self._same = _TRUST * totals
        falls = _FALLS if self._n_categories == 2 else ()
        self._factors = np.array([1.0] * len(_CONCENTRATIONS) + [*falls])
        strengths = np.array([*_CONCENTRATIONS, *[_OF_FALLS] * len(falls)])
        # Changed shares must not be known better than those of the reference.
        self._changed = np.minimum(strengths, self._same[:, None] / 2)
        self.n = 0
        self._counts = np.zeros(cells.size)
        self._begun_at = np.zeros(0, dtype=np.int64)
        self._begun = np.zeros((0, cells.size))
        self._begun_means = np.zeros((0, cells.size))
        self._log_weights = np.zeros(0)
        self._log_ratios = np.zeros((0, len(self._factors)))

    @property
    def since(self) -> int:
        """Return the most likely first row of a change, if there was one; counted from 0."""
        if not self.n:
            return 0
        return int(self._begun_at[(self._log_ratios + self._log_weights[:, None]).max(axis=1).argmax()])

    def add(self, contexts: Ints, categories: Ints) -> Floats:
        """Take more rows, and return the log of the evidence after each of them, float64 (n,).

        contexts, categories: int (n,), in order of arrival. The result does not depend on how rows are batched.
        """
        cells = contexts * self._n_categories + categories
        evidence: list[Floats] = [np.zeros(0)]
        start = 0
        while start < len(cells):
            if self.n % SPACING == 0:
                self._begin()
            stop = min(len(cells), start + SPACING - self.n % SPACING)
            evidence.append(self._take(contexts[start:stop], cells[start:stop]))
            start = stop
        return np.concatenate(evidence)

    def _begin(self) -> None:
        """Track a change that begins here.

        The first row has prior weight 1/2, the j-th beginning after it 1 / (2 j (j + 1)). When a beginning is dropped,
        its evidence is dropped too: evidence can only decrease by this.
        """
        j = self.n // SPACING
        weight = 0.5 if j == 0 else 0.5 / (j * (j + 1))
        tracked = np.arange(j) if j <= MOST_BEGINNINGS else np.r_[0, 2 : MOST_BEGINNINGS + 1]
        self._begun_at = np.append(self._begun_at[tracked], self.n)
        self._begun = np.vstack([self._begun[tracked], self._counts])
        same, n = (np.repeat(of, self._n_categories) for of in (self._same, self._of_contexts(self._counts)))
        self._begun_means = np.vstack([self._begun_means[tracked], (same * self._means + self._counts) / (same + n)])
        self._log_weights = np.append(self._log_weights[tracked], np.log(weight / len(self._factors)))
        self._log_ratios = np.vstack([self._log_ratios[tracked], np.zeros(len(self._factors))])

    def _take(self, contexts: Ints, cells: Ints) -> Floats:
        """Take rows without a new beginning among them."""
        seen = self._counts[cells] + _earlier(cells)
        in_context = self._of_contexts(self._counts)[contexts] + _earlier(contexts)
        same = self._same[contexts]
        log_same = np.log((same * self._means[cells] + seen) / (same + in_context))

        # Axes: row, beginning, concentration.
        means = self._fallen(self._begun_means[:, cells].T[:, :, None], cells)
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

    def _fallen(self, means: Floats, cells: Ints) -> Floats:
        """Return rows' shares once the odds of the second category have changed.   means: before, (n, B, 1)."""
        if (self._factors == 1.0).all():
            return means
        factors = np.where((cells % 2 == 1)[:, None, None], self._factors, 1 / self._factors)
        shares: Floats = means * factors / (means * factors + 1 - means)
        return shares

    def _of_contexts(self, counts: Floats) -> Floats:
        """Return each context's number of rows, (..., G), from counts (..., G * K)."""
        rows: Floats = counts.reshape(*counts.shape[:-1], -1, self._n_categories).sum(axis=-1)
        return rows


def _earlier(values: Ints) -> Ints:
    """Return for each value how many equal values precede it, int (n,)."""
    earlier: Ints = np.tril(values[:, None] == values[None, :], -1).sum(axis=1)
    return earlier
