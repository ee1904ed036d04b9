"""Long texts are encoded as short ones are, and beside other threads."""

import threading
import time

from kvforge.runtime.tokenizer import LONG_TEXT
from tests.support.text_tokenizers import byte_fallback, byte_level

WORDS = "The quick brown fox </s> naïve 日本語 😀\n"


def test_long_texts_have_the_same_tokens():
    for tokenizer in (byte_level(), byte_fallback()):
        text = WORDS * (LONG_TEXT // len(WORDS) + 1)
        for special in (False, True):
            expected = tokenizer.backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, special) == expected


def test_other_threads_run_while_a_long_text_is_encoded():
    tokenizer, started = byte_level(), threading.Event()
    text = WORDS * (400_000 // len(WORDS))

    def encode():
        started.set()
        tokenizer.encode(text)

    thread, num_turns = threading.Thread(target=encode), 0
    thread.start()
    started.wait()
    while thread.is_alive():
        num_turns += 1
        time.sleep(0.001)
    assert num_turns > 3
