"""Post-Hoc-Embed (Gupta et al., ICLR 2024): a network predicts what the last model gains over a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np

from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.products import products
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.family import Control
from cauc_ray.policies.features import Scaler, answer_features
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.scored import ScoredPolicy
from cauc_ray.policies.trace import Examples, Trace, own_answers


class PostHocEmbedPolicy(ScoredPolicy):
    """Post-Hoc-Embed: a network predicts what the last model gains over a stage.

    Arrays of each model: layers, (d_in + 1, d_out), with biases in the last row.
    """

    NEEDS_ARRAYS: ClassVar[bool] = True
    method: Literal["post-hoc-embed"] = "post-hoc-embed"

    def score(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return 1 / (1 + exp(g)) of the predicted gain g: the less deferring gains, the higher."""
        return 1.0 / (1.0 + np.exp(np.clip(self.gain(stage, logits, embeddings), -700, 700)))

    def gain(self, stage: int, logits: Floats, embeddings: Floats) -> Floats:
        """Return the predicted gain of the last model, float64 (n,)."""
        hidden, name = self.read(stage, logits, embeddings, with_answer=False), self.stages[stage].name
        for index in range(3):
            layer = self.arrays[f"{name}/layer{index}"]
            hidden = products(np.maximum(hidden, 0.0) if index else hidden, layer[:-1].T) + layer[-1]
        gains: Floats = hidden[:, 0]
        return gains


def fit_hidden(fitting: Fitting) -> Sequence[Policy | Control]:
    """Fit the published form: a stage reads quantiles of its log probabilities and its model's own hidden state.

    Answers are one token: in place of quantiles over tokens stand all of those over options, which are the sorted log
    probabilities. The published form that also reads the large model's first layers needs a part of its call.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    policy = _fitted_policy(fitting, states_of(fitting.calibration), encoded=False)

    def cascade(examples: Examples) -> Trace:
        chain, states = examples.chain, states_of(examples)
        stages = enumerate(zip(chain.logits, states, strict=False))
        worth = [policy.score(stage, real_options(logits), hidden) for stage, (logits, hidden) in stages]
        return Trace(own_answers(chain), np.column_stack([*worth, np.ones(len(chain))]), policy.calls)

    return [Control(cascade)]


def states_of(examples: Examples) -> list[Floats]:
    """Return the hidden states of each model but the last, float32 (N, d) each."""
    return [examples.hidden[model] for model in examples.chain.models[:-1]]


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Fit a network for each stage but the last, by MSE to g = y_last - y_own in {-1, 0, 1}.

    The published method reads hidden states of the small model's decoder and of the large one, and has two models.
    Here a stage's log probabilities, with the query's embedding where there is one, replace the hidden state. In a
    longer chain all stages predict the gain of the last model: that of the next one would know nothing of the models
    behind it, and one threshold holds for all.
    """
    if _reads_a_model(fitting):
        splits = (
            replace(split, embeddings=None, embedding_call=None) for split in (fitting.calibration, fitting.validation)
        )
        calibration, validation = splits
        fitting = replace(fitting, calibration=calibration, validation=validation)
    n_models, embeddings = len(fitting.calibration.chain.models), fitting.calibration.embeddings
    if n_models == 1:
        return fit_single(fitting, 0)
    return [_fitted_policy(fitting, [embeddings] * (n_models - 1), encoded=embeddings is not None)]


def _reads_a_model(fitting: Fitting) -> bool:
    """Return whether the embedding is that of a model of the chain, whose call the first stage may not need."""
    call = fitting.calibration.embedding_call
    return call is not None and call.index is not None


def _note(fitting: Fitting) -> str:
    calibration = fitting.calibration
    if len(calibration.chain.models) == 1:
        return ""
    without = calibration.embeddings is None or _reads_a_model(fitting)
    seen = "log-probabilities" if without else "log-probabilities and the embedding"
    notes = f"{seen} in place of hidden states", "" if without else calibration.embedding_note
    return "; ".join(filter(None, notes))


def _fitted_policy(fitting: Fitting, vectors: Sequence[Floats | None], *, encoded: bool) -> PostHocEmbedPolicy:
    """Train a network for each stage but the last.

    Args:
        fitting: The splits to fit on.
        vectors: What each stage's network reads next to the outputs, float32 (N, d).
        encoded: Whether these vectors are an encoder's.
    """
    from cauc_ray.baselines.networks.gain import trained  # torch

    chain = fitting.calibration.chain
    correct = fitting.calibration.correct().astype(np.float32)
    arrays, read = dict[str, Floats](), list[dict[str, Any]]()
    for stage, (name, logits) in enumerate(zip(chain.models[:-1], chain.logits, strict=False)):
        read.append({"n_options": logits.shape[1]})
        features = answer_features(logits, logits.shape[1], vectors[stage])
        scaler = Scaler.of(features)
        layers = trained(scaler(features), correct[:, -1] - correct[:, stage], (fitting.seed, stage))
        arrays |= {f"{name}/layer{index}": layer for index, layer in enumerate(layers)}
        arrays |= {f"{name}/means": scaler.means, f"{name}/scales": scaler.scales}
    return fitting.policy(PostHocEmbedPolicy, encoded=encoded, of_stages=[*read, {}]).with_arrays(arrays)


METHOD = Method("post-hoc-embed", "cascade", fit, packages=("torch", "sklearn"), extra="baselines", note=_note)
HIDDEN = Method(
    "post-hoc-embed-hidden",
    "cascade",
    fit_hidden,
    packages=("torch", "sklearn"),
    extra="baselines",
    note=lambda fitting: "with each model's own hidden state" if len(fitting.calibration.chain.models) > 1 else "",
    needs="hidden states",
    unpublished="reads models' hidden states, which no stage gives",
)
