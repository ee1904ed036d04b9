"""Random prompts of a wanted number of tokens, as text that comes back to these tokens."""

import numpy as np

from kvforge.common.errors import KvforgeError
from kvforge.runtime.text.tokenizer import Tokenizer

MAX_WORDS = 512


def single_token_words(tokenizer: Tokenizer, vocab_size: int, seed: int = 0) -> list[str]:
    """Up to MAX_WORDS words that are one token each when a space stands before them."""
    words = []
    for token in np.random.default_rng(seed).permutation(vocab_size).tolist():
        word = tokenizer.decode([token]).strip()
        if word.isalnum() and len(tokenizer.encode(f" {word}", False)) == 1:
            words.append(word)
            if len(words) == MAX_WORDS:
                break
    return words


def make_prompts(tokenizer: Tokenizer, vocab_size: int, num: int, num_tokens: int, seed: int) -> list[str]:
    """``num`` texts of exactly ``num_tokens`` tokens each, special tokens included.

    Raises KvforgeError when the tokenizer has too few whole words.
    """
    words = single_token_words(tokenizer, vocab_size)
    num_words = num_tokens - (len(tokenizer.encode(" a")) - len(tokenizer.encode(" a", False)))
    rng = np.random.default_rng(seed)
    prompts = (
        [" " + " ".join(rng.choice(words, num_words).tolist()) for _ in range(num)] if words and num_words > 0 else []
    )
    if num_words < 1 or not words or any(len(tokenizer.encode(prompt)) != num_tokens for prompt in prompts):
        raise KvforgeError(f"no text of {num_tokens} tokens can be made from whole words; use another tokenizer.")
    return prompts
