"""Small tokenizers of the structures that published ones have, and language models of random weights on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from language_models import TEMPLATE, TEXTS, Loaded, llama

LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n{{ m['content'] | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
DATED = "{{ bos_token }}Today Date: {{ strftime_now('%d %b %Y') }}\n" + LLAMA3.removeprefix("{{ bos_token }}")
# Closes the thought that its generation prompt opens.
THINKING = (
    "{% for m in messages %}<|head|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|eot|>\n{% endfor %}{% if add_generation_prompt %}<|head|>assistant\n<think>\n{% endif %}"
)
# Has no thought in a rendered answer, but a switch.
SWITCHED = (
    "{% for m in messages %}<|head|>{{ m['role'] }}\n{{ m['content'] }}<|eot|>\n{% endfor %}{% if add_generation_prompt"
    " %}<|head|>assistant\n<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
# How a vocabulary is built, how it adds special tokens, and its chat template.
VOCABULARIES = {
    "byte pairs": ("bytes", None, TEMPLATE),
    "byte pairs with BOS": ("bytes", "<s> $A", LLAMA3),
    "dated": ("bytes", "<s> $A", DATED),
    "thinking": ("bytes", None, THINKING),
    "prepended space": ("prepend", "<s> $A", LLAMA2),
    "prepended space and EOS": ("prepend", "<s> $A </s>", LLAMA2),
    "metaspace first": ("first", "<s> $A", LLAMA2),
    "metaspace always": ("always", "<s> $A", LLAMA3),
    "unigrams": ("unigrams", "$A </s>", LLAMA2),
}
SPECIAL = ["<unk>", "<s>", "</s>", "<|head|>", "<|/head|>", "<|eot|>", "<|im_start|>", "<|im_end|>"]


def vocabulary(name: str, texts: Sequence[str] = (), template: str | None = None) -> Any:
    """Return a tokenizer trained on some texts."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    how, processor, chat_template = VOCABULARIES[name]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if how == "bytes" else sorted({*"".join([*TEXTS, *texts]), "▁"})
    settings = {"vocab_size": 500, "special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    if how == "unigrams":
        inner = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(**settings, unk_token="<unk>")
    else:
        inner = Tokenizer(models.BPE(unk_token=None if how == "bytes" else "<unk>"))
        trainer = trainers.BpeTrainer(**settings)
    if how == "bytes":
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
    elif how == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        lines = pre_tokenizers.Split("\n", "isolated")  # which sentencepiece never joins to what follows
        spaces = pre_tokenizers.Metaspace(prepend_scheme="always" if how == "unigrams" else how)
        inner.pre_tokenizer = pre_tokenizers.Sequence([lines, spaces])
    inner.train_from_iterator([*TEXTS, *texts], trainer)
    if processor is not None:
        tokens = [("<s>", inner.token_to_id("<s>")), ("</s>", inner.token_to_id("</s>"))]
        inner.post_processor = processors.TemplateProcessing(single=processor, special_tokens=tokens)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[3:],
        chat_template=template or chat_template,
    )


def language_model(folder: Path, tokenizer: Any, seed: int = 0) -> Loaded:
    """Save a Llama of random weights with a tokenizer, and load it again."""
    Loaded(folder, tokenizer, llama(tokenizer, seed)).save(folder)
    return Loaded.from_folder(folder)
