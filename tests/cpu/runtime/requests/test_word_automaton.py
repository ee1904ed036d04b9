"""Words found by the automaton are those found one after another, and their number costs a step nothing."""

import random

import pytest

from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.word_automaton import START, WordAutomaton
from kvforge.runtime.sampling.bad_words import BadWords
from kvforge.runtime.text.stop import StopStrings
from tests.support.plain_words import PlainStopStrings, bad_tokens, longest_begun, stop_word


class CountingDict(dict):
    looks = 0

    def get(self, key):
        CountingDict.looks += 1
        return super().get(key)


def count_looks(automaton):
    """From now on, every look at a node's children counts in ``CountingDict.looks``."""
    CountingDict.looks = 0
    automaton._children = [CountingDict(children) for children in automaton._children]


@pytest.fixture
def rounds(full):
    return 20_000 if full else 2000


def random_words(rng, symbols, most, longest):
    return [tuple(rng.choices(symbols, k=rng.randint(1, longest))) for _ in range(rng.randint(1, most))]


def test_nodes_say_what_looking_at_all_words_says(rounds):
    rng = random.Random(0)
    seen = {"stop": 0, "held": 0, "several": 0}
    for _ in range(rounds):
        symbols = range(rng.randint(1, 4))
        words = random_words(rng, symbols, 8, 5)
        automaton, node, read = WordAutomaton(words), START, ()
        for symbol in rng.choices(range(len(symbols) + 1), k=20):
            node, read = automaton.step(node, symbol), (*read, symbol)
            ending = [word for word in words if read[-len(word) :] == word]
            assert [words[i] for i in automaton.ends(node)] == sorted(set(ending), key=len, reverse=True)
            first, longest = automaton.first[node], automaton.longest[node]
            assert (words[first] if first != -1 else None) == stop_word(words, read)
            assert (words[longest] if longest != -1 else None) == max(ending, key=len, default=None)
            held = longest_begun(words, read, 5)
            assert automaton.num_held[node] == held
            seen["stop"] += bool(ending)
            seen["held"] += held > 0
            seen["several"] += len(set(ending)) > 1
    assert all(count > rounds // 2 for count in seen.values()), seen


def test_stop_strings_are_those_of_the_plain_search(rounds):
    """Piece by piece, what is given out, held and found; searches left out and pushes after an end included."""
    rng = random.Random(1)
    found = 0
    for _ in range(rounds):
        letters = "ab 😀"[: rng.randint(1, 4)]
        stop = ["".join(word) for word in random_words(rng, letters, 6, 6)]
        finder, plain = StopStrings(SamplingParams(stop=stop)), PlainStopStrings(stop)
        for _ in range(12):
            piece, search = "".join(rng.choices(letters + "x", k=rng.randint(0, 6))), rng.random() < 0.7
            if rng.random() < 0.05:
                assert finder.flush() == plain.flush()
            result = finder.push(piece, search)
            assert result == plain.push(piece, search) and finder.held == plain.held, (stop, piece)
            found += result[1] is not None
    assert found > rounds


def test_bad_words_forbid_what_looking_at_all_words_forbids(rounds):
    rng = random.Random(2)
    forbidden = 0
    for _ in range(rounds // 4):
        symbols = range(rng.randint(2, 6))
        words = random_words(rng, symbols, 12, 4)
        bad, node, generated = BadWords(words), START, []
        for symbol in rng.choices(symbols, k=20):
            tokens = set(bad.single.tolist()).union(*(part.tolist() for part in bad.completed_by(node)))
            assert tokens == bad_tokens(words, generated)
            forbidden += len(tokens - set(bad.single.tolist()))
            node = bad.step(node, symbol)
            generated.append(symbol)
    assert forbidden > rounds


@pytest.mark.parametrize("num_words", [1, 100, 4000])
def test_a_text_costs_two_looks_a_character_at_most_however_many_strings_there_are(num_words):
    rng = random.Random(3)
    stop = ["aab"] + ["a" + "".join(rng.choices("abc", k=2)) + "#" for _ in range(num_words)]
    params = SamplingParams(stop=stop)
    count_looks(params.stop_automaton)
    text = "".join(rng.choices("ac", weights=(3, 1), k=3000)).replace("aab", "")
    finder = StopStrings(params)
    for begin in range(0, len(text), 5):
        assert finder.push(text[begin : begin + 5])[1] is None
    assert len(text) <= CountingDict.looks <= 2 * len(text)


@pytest.mark.parametrize(
    "words",
    [
        [tuple([0] * k + [1]) for k in range(1, 170)],
        [(token, 0) for token in range(1, 8000)],
        [(0, token) for token in range(1, 8000)],
    ],
    ids=["nested", "the same end", "the same beginning"],
)
def test_a_step_costs_the_same_whatever_the_words_have_in_common(words):
    """Token 0 again and again, which all words are made for."""
    params = SamplingParams(stop_words_ids=words)
    automaton = params.stop_words_automaton
    count_looks(automaton)
    node = START
    for _ in range(500):
        node = automaton.step(node, 0)
    assert automaton.first[node] == -1
    assert CountingDict.looks <= 1000
    bad = BadWords(words)
    node = bad.step(START, 0)
    for _ in range(200):
        node = bad.step(node, 0)
    assert len(bad.completed_by(node)) <= 169, "one tensor for each beginning that the sequence ends with"


def test_sequences_share_what_finds_their_words():
    params = SamplingParams(stop=["ab"], stop_words_ids=[[1, 2]])
    assert params.stop_automaton is params.stop_automaton
    assert params.stop_words_automaton is params.stop_words_automaton
    assert SamplingParams().stop_automaton is None and SamplingParams().stop_words_automaton is None
    assert StopStrings(params)._automaton is StopStrings(params)._automaton
