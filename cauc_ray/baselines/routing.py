"""What routers share: the choice of one model by value and price, or of the first or the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.features import Scaler, answer_features
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import RouterPolicy, choices
from cauc_ray.policies.trace import Examples, Trace, own_answers

# What a router reads of examples, float32 (N, d).
Read: TypeAlias = Callable[[Examples], Floats]
# Learns a router's arrays and other numbers from the splits and what is read of a query.
Learn: TypeAlias = Callable[[Fitting, Read], tuple[Mapping[str, Any], Mapping[str, Any]]]


def routed(values: Floats, prices: Floats, chain: ChainLogits) -> Trace:
    """Return a router's choices argmax_j (value_j - price x cost_j) at every price.

    Args:
        values: float (N, M).
        prices: Of a call of each model, float (M,).
        chain: The models' logits.
    """
    order = np.argsort(prices, kind="stable")
    return Trace(own_answers(chain, order), choices(values, prices), np.eye(len(order), dtype=bool)[order])


def note_on_the_middle(n_models: int) -> str:
    """Return the note for tables on a router that leaves out the models in the middle of a chain."""
    return "first and last model only" if n_models > 2 else ""


def note_of_router(*notes: str, leaves_middle: bool = False) -> Callable[[Fitting], str]:
    """Return the note for tables on a router by what it was fitted from.

    Args:
        notes: Notes for every table.
        leaves_middle: Whether it calls the first and the last model only.
    """

    def note(fitting: Fitting) -> str:
        calibration, n_models = fitting.calibration, len(fitting.calibration.chain.models)
        if n_models == 1:
            return ""
        features = "features: the first model's outputs, its call paid"
        if calibration.embeddings is not None:
            features = calibration.embedding_note
        middle = note_on_the_middle(n_models) if leaves_middle else ""
        return "; ".join(filter(None, (*notes, middle, features)))

    return note


def fit_router(
    fitting: Fitting, kind: type[RouterPolicy], learn: Learn, models: Sequence[int] | None = None
) -> Sequence[Policy]:
    """Fit a router of all models, or of some by index; without a budget one of values takes quality first.

    A chain of one model leaves nothing to learn. Embeddings have length 1, as sentence encoders give them, which
    published learning rates and noise are for. Without embeddings a router reads the first model's outputs,
    standardised, whose call every example then pays for.
    """
    calibration = fitting.calibration
    if len(calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    encoded, first = calibration.embeddings is not None, calibration.chain.logits[0]
    n_options, arrays = None, {}
    if not encoded:
        n_options = first.shape[1]
        scaler = Scaler.of(answer_features(first, n_options))
        arrays = {"means": scaler.means, "scales": scaler.scales}
    unfitted = fitting.policy(kind, models, encoded=encoded, n_options=n_options).with_arrays(arrays)

    def read(examples: Examples) -> Floats:
        return unfitted.vectors(examples.chain.logits[0] if examples.embeddings is None else examples.embeddings)

    learned, numbers = learn(fitting, read)
    if models is None:
        numbers = {"threshold": 0.0, **numbers}
    return [unfitted.model_copy(update=dict(numbers)).with_arrays({**arrays, **learned})]


def fit_first_or_last(fitting: Fitting, kind: type[RouterPolicy], learn: Learn) -> Sequence[Policy]:
    """Fit a router between the first and the last model."""
    return fit_router(fitting, kind, learn, [0, len(fitting.calibration.chain.models) - 1])
