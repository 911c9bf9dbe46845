"""RouteLLM's BERT and causal language model (Ong et al., ICLR 2025), which read the query's text.

Both choose between the first and the last model of a chain by w, the probability that the last one is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import AutoModelForCausalLM

from cauc_ray.baselines.routing import FirstOrLast
from cauc_ray.numbers.logits import log_softmax
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.family import Control, Member
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.trace import Examples
from cauc_ray.text_routers.reading import (
    Labelled,
    Reader,
    Recipe,
    classifier,
    drawn_from,
    fine_tune,
    load_pretrained,
    longest,
    require_training,
    texts_of,
)

CAUSAL_TOKENS = 1024
SCORES = tuple(f"<|quality {score}|>" for score in range(1, 6))
_ASKED = "\n\nQuality of the answer, from 1 to 5: "

# Rate, decay, batch and about 2,000 updates are from the paper's text; the published code, which holds no training,
# does not confirm them.
BERT = Recipe(rate=1e-5, weight_decay=0.01, batch_size=16, check_every=100, n_checks=20, patience=4)

# Eight devices with four texts each, as in the published training code.
CAUSAL = Recipe(rate=1e-5, weight_decay=0.0, batch_size=32, check_every=None, n_checks=5, patience=1)


@dataclass(frozen=True, slots=True)
class TextWins:
    """The probability w that the last model is needed, by a reader of the text.

    n_for_last: of the reader's outcomes, how many from the first on are in favour of the last model.   known: w of
    texts already read: splits are traced more than once, and reading takes nearly all of the time.
    """

    reader: Reader
    n_for_last: int
    known: dict[str, float] = field(default_factory=dict)

    def __call__(self, examples: Examples) -> Floats:
        """Return w, float64 (N,)."""
        texts = texts_of(examples)
        unread = sorted({*texts} - self.known.keys())
        if unread:
            found = self.reader.probabilities(unread)[:, : self.n_for_last].sum(axis=1)
            self.known.update(zip(unread, found.tolist(), strict=True))
        return np.array([self.known[text] for text in texts])


def fit_routellm_bert(fitting: Fitting, recipe: Recipe = BERT) -> Sequence[Member]:
    """Fine-tune a classifier of texts into: the last model wins, a tie, the first wins; w = 1 - P(the latter two).

    Labels are from correctness, not from people's preferences. The weights with the lowest validation loss are kept,
    checked every 100 updates; training ends when four checks in a row did not lower it.
    Raises ConfigError where there are no texts or the checkpoint cannot be loaded.
    """
    return _fitted(fitting, recipe, classifier, comparisons, n_for_last=1)


def fit_routellm_causal(fitting: Fitting, recipe: Recipe = CAUSAL) -> Sequence[Member]:
    """Fine-tune a causal language model to continue a text with a score of the first model; w = 1 - P(score >= 4).

    The score is one of five added tokens, the only one that the loss counts; its probabilities are taken among the
    five. Labels are bins of the first model's probability of the right option, not a judge's opinion of its answer.
    The weights of the epoch with the lowest validation loss are kept; training ends after one that did not lower it.
    Raises ConfigError where there are no texts or the checkpoint cannot be loaded.
    """
    return _fitted(fitting, recipe, scorer, qualities, n_for_last=3)


def _fitted(
    fitting: Fitting,
    recipe: Recipe,
    reader_of: Callable[[str], Reader],
    outcomes: Callable[[Examples], Ints],
    *,
    n_for_last: int,
) -> Sequence[Member]:
    checkpoint = require_training(fitting)
    calibration, validation = (Labelled(texts_of(s), outcomes(s)) for s in (fitting.calibration, fitting.validation))
    n_models = len(fitting.calibration.chain.models)
    if n_models == 1:
        return fit_single(fitting, 0)
    with drawn_from(fitting.seed):
        reader = reader_of(checkpoint)
        fine_tune(reader, calibration, validation, recipe, fitting.seed)
    return [Control(FirstOrLast(TextWins(reader, n_for_last)))]


def comparisons(examples: Examples) -> Ints:
    """Return who wins, int64 (N,): 0 where only the last model is right, 2 where only the first is, 1 elsewhere."""
    correct = examples.correct().astype(np.int64)
    winners: Ints = 1 - correct[:, -1] + correct[:, 0]
    return winners


def qualities(examples: Examples) -> Ints:
    """Return the first model's score less one, int64 (N,): fifths of its probability of the right option, 0 to 4."""
    chain = examples.chain
    right = np.exp(log_softmax(chain.logits[0]))[np.arange(len(chain)), chain.labels]
    return np.minimum((len(SCORES) * right).astype(np.int64), len(SCORES) - 1)


def scorer(checkpoint: str) -> Reader:
    """Load a causal language model and give it a token for each score; of long texts it reads the end."""
    tokenizer, network = load_pretrained(AutoModelForCausalLM, checkpoint, new_head=False)
    tokenizer.truncation_side = "left"
    tokenizer.add_tokens(list(SCORES), special_tokens=True)
    if len(tokenizer) > network.get_input_embeddings().num_embeddings:  # many vocabularies are padded: room enough
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    outcomes = tuple(tokenizer.convert_tokens_to_ids(list(SCORES)))
    return Reader(tokenizer, network, outcomes, longest(network, CAUSAL_TOKENS), next_token=True, closing=_ASKED)
