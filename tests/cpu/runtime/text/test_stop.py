"""Stop strings and stop words: found across token borders, and never part of the text."""

import itertools
import random

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime import LLMEngine, SamplingParams, SequenceOutput
from kvforge.runtime.requests.sequence import RequestMetrics, Sequence
from kvforge.runtime.text.stop import Stopper, StopStrings
from kvforge.runtime.text.stream import TextStream
from tests.support.models.text_tokenizers import PANICKING_TEXT, byte_level, panicking_decoder
from tests.support.sessions.fake import FakeSession

TOKENIZER = byte_level()


def cut(text, rng):
    borders = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randint(0, 8)))
    return [text[a:b] for a, b in itertools.pairwise([0, *borders, len(text)])]


def first_to_complete(text, stop):
    """Definition: the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_stop_strings_equal_the_definition_however_the_text_is_cut():
    rng = random.Random(0)
    num_stopped = 0
    for _ in range(2000):
        text = "".join(rng.choice("ab ") for _ in range(rng.randint(0, 14)))
        stop = ["".join(rng.choice("ab ") for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 3))]
        finder, given, found = StopStrings(SamplingParams(stop=stop)), "", None
        for piece in cut(text, rng):
            out, found = finder.push(piece)
            given += out
            if found is not None:
                break
        if found is None:
            given += finder.flush()
        assert (given, found) == first_to_complete(text, stop), (text, stop)
        num_stopped += found is not None
    assert 300 < num_stopped < 1900


def test_held_text_is_only_what_could_become_a_stop_string():
    finder = StopStrings(SamplingParams(stop=["STOP", "end."]))
    assert finder.push("a ST") == ("a ", None)
    assert finder.push("A") == ("STA", None)
    assert finder.push(" en") == (" ", None)
    assert finder.push("d.x") == ("", "end.")


def run_sequence(text_ids, params, prompt=(3, 4)):
    """Feed tokens through Stopper and TextStream as the engine and the LLM do."""
    sequence = Sequence("r", 0, (0, 0, 0), np.asarray(prompt, dtype=np.int32), params, 500, RequestMetrics(0, 0))
    stopper, stream = Stopper(params, TOKENIZER, list(prompt)), TextStream(TOKENIZER, params, list(prompt))
    pieces = []
    for i, token in enumerate(text_ids):
        sequence.append(token)
        reason = stopper.check(sequence)
        last = reason is not None or i == len(text_ids) - 1
        finish = ("stop" if reason is not None else "length") if last else None
        pieces.append(stream.push(SequenceOutput("r", 0, [token], None, last, finish, reason)))
        if last:
            return pieces, reason
    raise AssertionError("no tokens")


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("The fox STOP here", ["STOP"], "The fox "),
        ("The fox jumps", ["x j"], "The fo"),
        ("emoji 😀 done", ["😀"], "emoji "),
        ("naïve café", ["fé", "café"], "naïve "),
        ("no such thing", ["zebra"], "no such thing"),
        ("ends with a begun ST", ["STOP"], "ends with a begun ST"),
        ("aab", ["aab"], ""),
    ],
)
def test_stop_string_across_tokens(text, stop, expected):
    pieces, reason = run_sequence(TOKENIZER.encode(text, add_special_tokens=False), SamplingParams(stop=stop))
    assert "".join(pieces) == expected
    assert reason == (next((s for s in stop if s in text), None) if expected != text else None) or reason in stop
    for i in range(len(pieces)):
        assert expected.startswith("".join(pieces[: i + 1])), "text was given out that is not part of the result"


def test_stop_words_are_sequences_of_generated_tokens():
    params = SamplingParams(stop_words_ids=[[70, 71, 72], [80]])
    pieces, reason = run_sequence([70, 71, 70, 71, 72, 75], params)
    assert reason == (70, 71, 72)
    assert "".join(pieces) == TOKENIZER.decode([70, 71])
    _, reason = run_sequence([71, 72, 90], params, prompt=(5, 70))
    assert reason is None, "the prompt's tokens do not count"


def test_min_tokens_lets_earlier_stops_pass():
    ids = TOKENIZER.encode("STOP now STOP then", add_special_tokens=False)
    params = SamplingParams(stop=["STOP"], min_tokens=len(TOKENIZER.encode("STOP now")), max_tokens=100)
    pieces, reason = run_sequence(ids, params)
    assert ("".join(pieces), reason) == ("STOP now ", "STOP")
    params = SamplingParams(stop_words_ids=[[70]], min_tokens=3)
    assert run_sequence([70, 71, 72, 70, 73], params)[1] == (70,)


def test_a_token_that_cannot_be_decoded_ends_its_own_request_alone():
    tokenizer = panicking_decoder()
    bad = tokenizer.backend.token_to_id(PANICKING_TEXT)
    engine = LLMEngine(session=FakeSession(vocab_size=340), tokenizer=tokenizer, num_pages=40)
    attacked = SamplingParams(max_tokens=8, stop=["x"], logit_bias={bad: 1000.0}, ignore_eos=True)
    engine.add_request("attacked", [5, 6, 7], attacked)
    engine.add_request("neighbour", [8, 9], SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0))
    ended = {}
    while engine.has_unfinished():
        ended.update({output.request_id: output for output in engine.step() if output.finished})
    assert ended["attacked"].finish_reason == "error"
    assert "cannot be shown as text" in ended["attacked"].stop_reason
    assert ended["attacked"].stop_reason.startswith("the model's tokenizer")
    assert ended["neighbour"].finish_reason == "length"
    engine.check_invariants()
    with pytest.raises(RequestError, match="cannot be shown as text"):
        engine.add_request("prompt", [bad], SamplingParams(stop=["x"]))
    assert not engine.has_unfinished()
