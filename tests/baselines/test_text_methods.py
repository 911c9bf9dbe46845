from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from planted import examples, gain_over_mixture
from synthetic import chain

from cauc_ray.baselines.networks.training import Schedule
from cauc_ray.errors import CaucError
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.trace import EmbeddingCall, Examples

pytest.importorskip("transformers", reason="the text routers need transformers: pip install 'cauc-ray[text-routers]'")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from cauc_ray.baselines.networks.full_forms import (
    BERT,
    CAUSAL,
    SCORER,
    fit_frugalgpt_bert,
    fit_routellm_bert,
    fit_routellm_causal,
    fit_routerdc_encoder,
)
from cauc_ray.baselines.networks.reading import classifier, drawn_from, passes, scorer

FILLERS = [f"w{i}" for i in range(20)]
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
SIZES = {
    "vocab_size": 26, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 32, "initializer_range": 0.2,
}  # fmt: skip

# Random weights have further to go than those of a trained checkpoint.
FAST_BERT = replace(BERT, rate=1e-2, check_every=25, n_checks=6)
FAST_CAUSAL = replace(CAUSAL, rate=1e-2, batch_size=16, n_checks=4)
ONE_STEP = {"rate": 1e-2, "batch_size": 8, "check_every": 1, "n_checks": 1}
FAST_SCORER = replace(SCORER, rate=1e-2, check_every=25, n_checks=6)
TWO_STEPS = Schedule(batch_size=8, n_steps=2, check_every=1, patience=6)
# Of every method, its fit in a step or two.
QUICK = {
    "routellm-bert": partial(fit_routellm_bert, recipe=replace(BERT, **ONE_STEP)),
    "routellm-causal": partial(fit_routellm_causal, recipe=replace(CAUSAL, **ONE_STEP)),
    "frugalgpt-bert": partial(fit_frugalgpt_bert, recipe=replace(SCORER, **ONE_STEP)),
    "routerdc-encoder": partial(fit_routerdc_encoder, schedule=TWO_STEPS, rate=2e-3),
}
READERS = {"bert": classifier, "causal": scorer}
kinds = pytest.mark.parametrize("kind", ["bert", "causal"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folders of networks with random weights, each with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("checkpoints")
    logging.disable_progress_bar()
    with drawn_from(0):
        networks = {"bert": BertModel(BertConfig(**SIZES)), "causal": LlamaForCausalLM(LlamaConfig(**SIZES))}
    vocabulary = {word: index for index, word in enumerate([*SPECIALS, *FILLERS, "plain", "knotty"])}
    for name, network in networks.items():
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if name == "bert":
            ends = [("[CLS]", 2), ("[SEP]", 3)]
            words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
        network.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    logging.enable_progress_bar()
    return {name: str(folder / name) for name in networks}


def sentences(rng, n, longest=10):
    return [list(rng.choice(FILLERS, rng.integers(1, longest + 1))) for _ in range(n)]


def queries(seed, n=300):
    """Return examples whose first model is right unless one word of the text is "knotty".

    The last model is right on nine of ten. With them: bool (n,), where the first model is wrong.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, n).astype(np.int32)
    hard, last_right = rng.random(n) < 0.5, rng.random(n) < 0.9
    texts = sentences(rng, n)
    for words, clue in zip(texts, np.where(hard, "knotty", "plain"), strict=True):
        words.insert(rng.integers(len(words) + 1), clue)
    logits = []
    for right in (~hard, last_right):
        z = rng.standard_normal((n, 4))
        z[np.arange(n), labels] = z.max(axis=1) + np.where(right, 3.0, -9.0)
        logits.append(z.astype(np.float32))
    data = replace(chain(seed, n, 4, (1.0, 1.0)), logits=tuple(logits), labels=labels)
    return Examples(data, texts=tuple(" ".join(words) for words in texts)), hard


FULL = pytest.mark.soak("full")
LONG = Schedule(batch_size=32, n_steps=400, check_every=25, patience=12)


@pytest.mark.parametrize(
    ("kind", "fit", "share", "gain"),
    [
        ("causal", partial(fit_routellm_causal, recipe=FAST_CAUSAL), 1.0, 0.06),
        pytest.param("bert", partial(fit_routellm_bert, recipe=FAST_BERT), 1.0, 0.06, marks=FULL),
        # By contrast; random weights take many steps to read a word so.
        pytest.param("bert", partial(fit_routerdc_encoder, schedule=LONG, rate=2e-3), 0.75, 0.05, marks=FULL),
    ],
    ids=["routellm-causal", "routellm-bert", "routerdc-encoder"],
)
def test_routers_learn_a_telling_word(kind, fit, share, gain, checkpoints):
    fitting = Fitting(queries(0)[0], queries(1)[0], 0, checkpoints[kind])
    fitted, (test, hard) = Family(fit(fitting), fitting.validation), queries(2)
    compared = fitted.members[0].trace(test.without_labels()).compared[:, 0]
    assert np.mean(compared[~hard, None] > compared[hard]) >= share
    assert gain_over_mixture(fitted, test) > gain
    assert (fitted.members[0].trace(test).compared[:, 0] == compared).all()
    answers = fitted.answers(test.without_labels(), fitted.default)
    assert (answers.calls.sum(axis=1) == 1).all()


@pytest.mark.soak("full")
def test_scorers_of_query_and_answer_learn_a_telling_word(checkpoints):
    fitting = Fitting(queries(0)[0], queries(1)[0], 0, checkpoints["bert"])
    fitted, (test, hard) = Family(fit_frugalgpt_bert(fitting, FAST_SCORER), fitting.validation), queries(2)
    costs = test.chain.costs.means
    setting = float(fitted.points.settings[fitted.points.index_of_best(costs[0] + costs[1] / 2)])
    answers = fitted.answers(test.without_labels(), setting)
    assert answers.calls[hard, 1].mean() > 0.9
    assert answers.calls[~hard, 1].mean() < 0.1
    assert (fitted.answers(test, setting).predictions == answers.predictions).all()


def checkpoint_of(method, checkpoints):
    return checkpoints["causal" if method == "routellm-causal" else "bert"]


@pytest.mark.parametrize("method", QUICK)
def test_the_seed_decides_and_the_global_generator_stays_as_it_was(method, checkpoints):
    calibration, validation = queries(7, 60)[0], queries(8, 40)[0]
    outcomes, checkpoint = [], checkpoint_of(method, checkpoints)
    for seed in (0, 0, 1):
        torch.rand(1)  # wherever the global generator stands
        before = torch.get_rng_state()
        members = QUICK[method](Fitting(calibration, validation, seed, checkpoint))
        routes = [member.route(validation) for member in members if member.route]
        outcomes.append([route.args for route in routes] or members[0].trace(validation).compared)
        assert torch.equal(torch.get_rng_state(), before)
    assert np.array_equal(outcomes[0], outcomes[1])
    assert not np.array_equal(outcomes[0], outcomes[2])


@pytest.mark.parametrize("method", QUICK)
def test_missing_texts_checkpoints_and_labels_are_refused_in_one_line(method, checkpoints, tmp_path):
    data, _ = queries(15, 20)
    bare, checkpoint = Examples(data.chain), checkpoint_of(method, checkpoints)
    refusals = [
        (Fitting(bare, data, 0, checkpoint), "reads the queries' texts; give them"),
        (Fitting(data.without_labels(), data, 0, checkpoint), "needs labels"),
        (Fitting(data, data), "give one by its hub id or local folder"),
        (Fitting(data, data, 0, str(tmp_path)), "cannot be loaded"),
    ]
    if method == "routellm-causal":
        mismatch = r"'.*bert' is not a BertLMHeadModel: it lacks the weights cls\.predictions"
        refusals.append((Fitting(data, data, 0, checkpoints["bert"]), mismatch))
    for fitting, words in refusals:
        with pytest.raises(CaucError, match=words) as error:
            QUICK[method](fitting)
        assert "\n" not in str(error.value)


@kinds
def test_a_text_is_read_alone_as_among_others_and_a_long_one_from_its_start_or_end(kind, checkpoints):
    with drawn_from(1):
        reader = READERS[kind](checkpoints[kind])
    long = ["w1"] * 60
    texts = [*sentences(np.random.default_rng(6), 37, 20), long, ["knotty", *long[1:]], [*long[:-1], "knotty"]]
    texts = [" ".join(words) for words in texts]
    together = reader.probabilities(texts)
    assert together.shape == (40, {"bert": 3, "causal": 5}[kind])
    assert together.sum(axis=1) == pytest.approx(np.ones(40))
    for text, row in zip(texts, together, strict=True):
        assert reader.probabilities([text])[0] == pytest.approx(row, abs=1e-5)
    plain, *ends = together[-3:]
    read, ignored = ends if kind == "bert" else ends[::-1]
    assert ignored == pytest.approx(plain, abs=1e-5)
    assert np.abs(read - plain).max() > 1e-3
    assert len(reader.tokens(texts[-1:])[0]) == SIZES["max_position_embeddings"]


def test_passes_hold_every_row_once_and_their_tokens_are_bounded():
    rng = np.random.default_rng(12)
    tokens = [[0] * int(n) for n in rng.integers(1, 1500, 200)] + [[0] * 9000]
    asked = rng.permutation(201)[:150]
    rows = list(passes(tokens, asked))
    assert sorted(np.concatenate(rows)) == sorted(asked)
    assert all(len(part) == 1 or len(part) * max(len(tokens[row]) for row in part) <= 4096 for part in rows)
    assert len(rows) < 75


@kinds
@pytest.mark.parametrize("m", [1, 3])
def test_only_the_first_and_the_last_model_are_called_and_embeddings_are_not_paid_for(kind, m, checkpoints):
    rng = np.random.default_rng(14)
    texts = [tuple(" ".join(words) for words in sentences(rng, 40)) for _ in range(3)]
    splits = [examples(14, split, n=40, m=m, ragged=True, texts=texts[split]) for split in range(3)]
    splits = [replace(split, embedding_call=EmbeddingCall("enc", None, 7.0)) for split in splits]
    fitting = Fitting(*splits[:2], 0, checkpoints[kind])
    fitted = replace(METHODS[f"routellm-{kind}"], fit=QUICK[f"routellm-{kind}"]).family(fitting)
    assert fitted.note.startswith(f"fine-tuned from {kind}; ") == (m > 1)
    assert ("first and last model only" in fitted.note) == (m > 2)
    for setting in fitted.points.settings[[0, -1]]:
        answers = fitted.answers(splits[2].without_labels(), setting)
        assert (answers.calls.sum(axis=1) == 1).all()
        assert not answers.calls[:, 1:-1].any()
        assert np.sum(answers.other_costs) == 0
