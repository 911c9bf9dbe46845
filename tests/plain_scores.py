"""Scores of options by plain forward passes over whole texts, one at a time."""

import itertools
import re

import numpy as np
from scipy.special import log_softmax

CLOCK = "strftime_now('%d %b %Y')"


def shared(sequences):
    """Return what all sequences begin with."""
    return [
        tokens[0] for tokens in itertools.takewhile(lambda tokens: len({*tokens}) == 1, zip(*sequences, strict=False))
    ]


def whole_texts(tokenizer, prompt, options, *, chat, ends):
    """Return the text of a prompt alone and with each option, as the template renders an answer."""
    if not chat:
        return [prompt, *(f"{prompt} {option}" + "\n" * ends for option in options)]
    kwargs = {"tokenize": False, "chat_template": tokenizer.chat_template.replace(CLOCK, "'26 Jul 2024'")}
    user = {"role": "user", "content": prompt}

    def answered(answer, **more):
        return tokenizer.apply_chat_template([user, {"role": "assistant", "content": answer}], **kwargs, **more)

    opened = tokenizer.apply_chat_template([user], add_generation_prompt=True, **kwargs)
    with_lead = "".join(shared([answered("Q"), answered("7")]))
    texts = [with_lead if with_lead[len(opened) :].strip() else opened]
    for option in options:
        texts.append(answered(option, continue_final_message=True))
        if ends:
            closing = answered(option)[len(texts[-1]) :]
            texts[-1] += re.match(r".*?(</s>|<\|eot\|>|<\|im_end\|>)", closing)[0]
    return texts


def plain_scores(model, spec, question, *, chat):
    """Score options by a forward pass over each whole text."""
    how, tokenizer = spec.answers_with, model.tokenizer
    texts = whole_texts(tokenizer, question.text, question.options, chat=chat, ends=how == "name")
    encoded = [tokenizer.encode(text, add_special_tokens=not chat) for text in texts]
    if not chat and tokenizer("Q")["input_ids"][-1] == tokenizer.eos_token_id:
        encoded = [tokens[:-1] for tokens in encoded]
    n_shared = len(shared(encoded[1:] if how == "letter" else encoded))
    scores = []
    for option, tokens in zip(question.options, encoded[1:], strict=True):
        logits = model.logits(tokens)[n_shared - 1 : -1].astype(np.float64)
        at = np.arange(len(logits)), tokens[n_shared:]
        assert len(logits) == 1 or how != "letter"
        scores.append(logits[at][0] if how == "letter" else log_softmax(logits, axis=1)[at].sum())
        scores[-1] /= len(option.encode()) if how == "text" else 1
    return np.array(scores)
