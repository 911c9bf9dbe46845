"""How routers that read queries are fitted: by their embeddings, or by the first model's outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.routing import FirstOrLast, Router, Values, note_on_the_middle
from cauc_ray.policies.baselines.simple import fit_single
from cauc_ray.policies.method import Fitted, Fitting, Thresholded

Learn: TypeAlias = Callable[[Fitting, QueryVectors], Values]


def fit_router(fitting: Fitting, learn: Learn, *notes: str) -> Fitted:
    """Fit a router; without a budget it takes quality first. A chain of one model leaves nothing to learn.

    learn: from the splits and what is read of a query, to the values.   notes: for every table.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    prices, call = fitting.validation.chain.costs.means.copy(), fitting.validation.embedding_call
    if call is not None and call.place is not None:
        prices[call.place] = 0.0
    router = Router(learn(fitting, vectors), prices, vectors.paid)
    return Thresholded(router, fitting.validation, given=0.0, note=vectors.note(*notes))


def fit_first_or_last(fitting: Fitting, learn: Learn) -> Fitted:
    """Fit a router between the first and the last model.   learn: as of fit_router."""
    n_models = len(fitting.calibration.chain.models)
    if n_models == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    router = FirstOrLast(learn(fitting, vectors), vectors)
    return Thresholded(router, fitting.validation, note=vectors.note(note_on_the_middle(n_models)))
