"""Requests with many random words, strings, ids and biases get the tokens and the text of a plain loop."""

import math
import random

import numpy as np

from kvforge.runtime import LLM, SamplingParams
from kvforge.runtime.text.detokenizer import Detokenizer
from tests.support.models.text_tokenizers import byte_level
from tests.support.plain_words import PlainStopStrings, bad_tokens, stop_word
from tests.support.sessions.fake import FakeSession, context_logits

TOKENIZER = byte_level()
VOCAB, EOS, MEMORY = 330, 2, 2
LETTERS = list(range(3, 40))
"""Tokens that most requests are biased to, so that their words are met."""


def forbidden_words(params):
    words = [tuple(word) for word in params.bad_words_ids]
    for text in params.bad_words:
        words += [tuple(TOKENIZER.encode(t, add_special_tokens=False)) for t in (text, " " + text.lstrip())]
    return words


def next_token(context, generated, params, stop_ids):
    logits = context_logits(context[-MEMORY:], 0, VOCAB)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += np.float32(bias)
    logits[list(bad_tokens(forbidden_words(params), generated))] = -np.inf
    if len(generated) < params.min_tokens:
        late = logits.copy()
        late[list(stop_ids)] = -np.inf
        logits = logits if late.max() == -np.inf else late
    return int(logits.argmax())


def plain_run(prompt, params):
    """(tokens, finish reason, stop reason, text) of one request, everything looked for one after another."""
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    strings, detokenizer, generated = PlainStopStrings(params.stop), Detokenizer(TOKENIZER, prompt), []
    while True:
        token = next_token(prompt + generated, generated, params, stop_ids)
        generated.append(token)
        allowed = len(generated) >= params.min_tokens
        string = strings.push(detokenizer.push(token), search=allowed)[1] if params.stop else None
        word = stop_word(params.stop_words_ids, generated) if allowed else None
        if token in stop_ids:
            reason = "stop", None if token == EOS and not params.ignore_eos else token
        elif word or string:
            reason = "stop", word or string
        elif len(generated) == params.max_tokens:
            reason = "length", None
        else:
            continue
        return generated, *reason, plain_text(prompt, params, generated, *reason)


def plain_text(prompt, params, tokens, finish, detail):
    if finish == "stop" and not isinstance(detail, str):
        tokens = tokens[: -len(detail)] if isinstance(detail, tuple) else tokens[:-1]
    detokenizer, strings, text = Detokenizer(TOKENIZER, prompt), PlainStopStrings(params.stop), ""
    for token in tokens[:-1]:
        text += strings.push(detokenizer.push(token), search=False)[0]
    if isinstance(detail, str):
        return text + strings.push(detokenizer.push(tokens[-1]))[0]
    for token in tokens[-1:]:
        text += strings.push(detokenizer.push(token), search=False)[0]
    return text + strings.push(detokenizer.flush(), search=False)[0] + strings.flush()


def random_request(rng):
    """A prompt and parameters; half of all words are made of tokens that come after one another."""
    prompt = rng.choices(LETTERS, k=rng.randint(1, 9))
    bias = {token: rng.choice([2.0, 4.0, 5.0]) for token in LETTERS if rng.random() < 0.6}
    bias |= {token: rng.choice([-3.0, -math.inf, 0.5]) for token in rng.sample(range(VOCAB), rng.choice([0, 5, 200]))}
    max_tokens = rng.randint(1, 40)
    params = {"temperature": 0.0, "logit_bias": bias, "max_tokens": max_tokens}
    likely, _, _, text = plain_run(prompt, SamplingParams(**params, ignore_eos=True))

    def word(longest):
        if rng.random() < 0.5:
            begin = rng.randrange(len(likely))
            return likely[begin : begin + rng.randint(1, longest)]
        return rng.choices(LETTERS, k=rng.randint(1, longest))

    def string():
        begin = rng.randrange(len(text) + 1)
        return text[begin : begin + rng.randint(1, 6)] or rng.choice(["th", "e", " fox"])

    def words(most, make):
        return [make() for _ in range(rng.choice([0, 0, 1, most]))]

    return prompt, SamplingParams(
        **params,
        ignore_eos=rng.random() < 0.5,
        min_tokens=rng.choice([0, 0, max_tokens // 2]),
        stop=words(6, string) if rng.random() < 0.4 else (),
        stop_token_ids=rng.choice([[], [], rng.sample(range(VOCAB), 5), rng.sample(range(VOCAB), 100)]),
        stop_words_ids=words(40, lambda: word(5)) if rng.random() < 0.5 else (),
        bad_words=words(10, string) if rng.random() < 0.3 else (),
        bad_words_ids=words(200, lambda: [*word(3), rng.choice(LETTERS)]),
        draft_token_ids=likely[: rng.choice([0, 3])],
        n=rng.choice([1, 1, 3]),
    )


def test_many_words_together_equal_the_plain_loop(seeds):
    rng = random.Random(0)
    finishes = {}
    for batch in seeds(6, 60):
        session = FakeSession(vocab_size=VOCAB, memory=MEMORY, max_draft_len=4, eos_token_ids=(EOS,))
        llm = LLM(session=session, tokenizer=TOKENIZER, num_pages=rng.choice([20, 60]))
        requests = [random_request(rng) for _ in range(12)]
        outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
        for (prompt, params), output in zip(requests, outputs, strict=True):
            expected = plain_run(prompt, params)
            kind = (expected[1], type(expected[2]).__name__)
            finishes[kind] = finishes.get(kind, 0) + 1
            for one in output.outputs:
                assert (one.token_ids, one.finish_reason, one.stop_reason, one.text) == expected, (batch, params)
        llm.engine.check_invariants()
    assert all(finishes.get(("stop", kind), 0) >= 3 for kind in ("int", "str", "tuple")) and len(finishes) >= 4, (
        finishes
    )
