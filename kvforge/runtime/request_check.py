"""Whether a request can be served at all; every refusal is one sentence that says what to do."""

import math
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from itertools import chain

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.common.number_checks import shown
from kvforge.common.refusals import PROMPT, UNKNOWN_TOKEN
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.checks import check_prompt_length
from kvforge.runtime.requests.guided_decoding import guide_error
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.tokenizer import Tokenizer


def checked_prompt(token_ids: SequenceOf[int], config: RuntimeConfig) -> np.ndarray:
    """Return the prompt as int32.

    Raises:
        RequestError: empty, too long, or not token ids of this model.
    """
    if isinstance(token_ids, str):
        raise RequestError("is text", "encode it with the engine's tokenizer or use LLM", field=PROMPT)
    if hasattr(token_ids, "__len__"):
        check_prompt_length(len(token_ids), config.max_seq_len)
    try:
        ids = np.asarray(token_ids)
    except (ValueError, TypeError):
        ids = np.empty(0, dtype=object)
    if ids.size == 0:
        raise RequestError("is empty", "give at least one token", field=PROMPT)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("is not a flat list of whole numbers", "give token ids", field=PROMPT)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        raise RequestError(
            f"holds token id {low if low < 0 else high}, but the model's ids are 0 to {config.vocab_size - 1}",
            "use the engine's tokenizer",
            field=PROMPT,
            code=UNKNOWN_TOKEN,
        )
    return ids.astype(np.int32)


def max_length(num_prompt_tokens: int, params: SamplingParams, config: RuntimeConfig) -> int:
    """Return the longest the sequence may become, prompt included.

    Raises:
        RequestError: its K,V would never fit the pool.
    """
    length = min(num_prompt_tokens + params.max_tokens, config.max_seq_len)
    # The last token's K,V are never written.
    num_pages, num_state_pages = config.pages_needed(num_prompt_tokens, length - 1)
    if num_state_pages > config.num_state_pages:
        raise RequestError(
            f"of {num_prompt_tokens} tokens needs {num_state_pages} pages of the KV policy's own, but the engine has "
            f"{config.num_state_pages}",
            "shorten it",
            field=PROMPT,
            operator="raise the KV cache size",
        )
    if config.visibility is not None:
        seen = config.visibility.num_seen(num_prompt_tokens, length - 1)
        num_upper = -(-seen // config.page_size)
        if num_upper > config.num_upper_pages:
            raise RequestError(
                f"the request may have {seen} tokens past the model's cut and need {num_upper} pages there, but the "
                f"engine has {config.num_upper_pages}",
                "lower {max_tokens}",
                operator="raise the KV cache size",
            )
    if num_pages > config.num_pages:
        fits = config.num_pages * config.page_size + 1
        raise RequestError(
            f"the request may grow to {length} tokens and need {num_pages} pages, but the "
            f"engine has {config.num_pages} ({fits} tokens)",
            "lower {max_tokens}",
            operator="raise the KV cache size",
        )
    return length


def stop_ids(params: SamplingParams, config: RuntimeConfig) -> frozenset[int]:
    """Return the tokens that end a sequence; a guided one ends with an end-of-text token also under ignore_eos,
    where its text is complete.

    Raises:
        RequestError: one is not an id of this model.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, config)
    _check_words("stop_words_ids", params.stop_words_ids, config)
    if params.guided_decoding is None:
        return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else config.eos_token_ids)
    ends = frozenset(params.stop_token_ids) | frozenset(t for t in config.eos_token_ids if t < config.vocab_size)
    if not ends:
        raise guide_error("needs an end-of-text token and this engine has none", "give {stop_token_ids}")
    return ends


def bad_word_ids(params: SamplingParams, config: RuntimeConfig, tokenizer: Tokenizer | None) -> list[tuple[int, ...]]:
    """Return the token sequences that must not be generated.

    Raises:
        RequestError: an id is not of this model, there is no tokenizer for strings, or no token is left.
    """
    words = dict.fromkeys(map(tuple, params.bad_words_ids))
    for text in params.bad_words:
        if tokenizer is None:
            raise RequestError("needs a tokenizer and this engine has none", "give {bad_words_ids}", field="bad_words")
        for variant in (text, " " + text.lstrip()):
            words[tuple(tokenizer.encode(variant, add_special_tokens=False))] = None
    words.pop((), None)
    _check_words("bad_words_ids", words, config)
    forbidden = {word[0] for word in words if len(word) == 1}
    forbidden.update(token for token, bias in (params.logit_bias or {}).items() if bias == -math.inf)
    if len(forbidden) >= config.vocab_size:
        raise RequestError("and logit_bias forbid every token of the model", "leave at least one", field="bad_words")
    return list(words)


def check_token_ids(params: SamplingParams, config: RuntimeConfig) -> None:
    """Raise RequestError if a biased or drafted token is not an id of this model, or no step takes all drafts."""
    _check_ids("logit_bias", tuple(params.logit_bias or ()), config)
    _check_ids("draft_token_ids", params.draft_token_ids, config)
    maximum = config.max_num_survivors - 1
    if len(params.draft_token_ids) > maximum:
        raise RequestError(
            f"has {len(params.draft_token_ids)} tokens, but a step of this engine verifies at most {maximum}",
            "give fewer",
            field="draft_token_ids",
            operator="rebuild with a larger --max-draft-len",
        )


def check_stop_strings(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Raise RequestError if stop strings cannot be found for lack of a tokenizer."""
    if params.stop and tokenizer is None:
        raise RequestError("needs a tokenizer and this engine has none", "give {stop_words_ids}", field="stop")


def check_prompt_logprobs(num_prompt_tokens: int, params: SamplingParams, config: RuntimeConfig) -> None:
    """Raise RequestError if log-probabilities of the prompt are asked for, and this engine does not compute all of it,
    or not as it would without them."""
    if params.prompt_logprobs is None:
        return
    if params.prompt_logprobs > config.vocab_size:
        raise RequestError(
            f"is {params.prompt_logprobs}, but the model has {config.vocab_size} tokens",
            "lower it",
            field="prompt_logprobs",
        )
    reason = None
    change = config.kv_policy.next_transition(num_prompt_tokens, 0)
    if config.exact_tokens is not None:
        reason = "an auxiliary model predicts the cache of prompts in the model's place"
    elif config.visibility is not None:
        reason = "the model's upper layers see no prompt but for its first tokens"
    elif config.reads_states:
        reason = "layers above the model's cut read states, and those behind the prompt's tokens are not kept"
    elif config.has_observers:
        reason = f"the KV policy {config.kv_policy} counts the attention of all that goes past the cut"
    elif change is not None and change < num_prompt_tokens - 1:
        reason = f"the KV policy {config.kv_policy} changes the cache before the prompt's end"
    if reason is not None:
        raise RequestError(
            f"cannot be given, because {reason}", field="prompt_logprobs", operator="use an engine without it"
        )


def _check_words(name: str, words: Collection[SequenceOf[int]], config: RuntimeConfig) -> None:
    _check_ids(name, tuple(chain.from_iterable(words)), config)
    longest = max(map(len, words), default=0)
    if longest > config.max_seq_len:
        raise RequestError(
            f"holds a word of {longest} tokens, but a sequence has at most {config.max_seq_len}",
            "leave it out",
            field=name,
        )


def _check_ids(name: str, ids: SequenceOf[int], config: RuntimeConfig) -> None:
    largest = max(ids, default=0)
    if largest >= config.vocab_size:
        raise RequestError(
            f"holds token id {shown(largest)}, but the model's ids are 0 to {config.vocab_size - 1}",
            "use the engine's tokenizer",
            field=name,
        )
