"""Lists in a request's tensors: bounded before they become Python lists, read as arrays."""

import itertools
import random

import numpy as np
import pytest

from kvforge.runtime.requests.checks import MAX_DRAFT_TOKENS, MAX_ID_WORDS, MAX_RANGES, MAX_SYMBOLS, MAX_WORDS
from kvforge.serving.contract.request import parse_batch
from kvforge.serving.contract.sampling import TENSORS, sampling_fields
from kvforge.serving.contract.size_limits import SizeLimits
from kvforge.serving.contract.word_lists import decode_words, encode_words
from tests.support.serving.refusals import refused

BASE = {"request_output_len": np.array([[4]], np.int32)}
MANY = 1 << 22


class Unlisted(np.ndarray):
    """An array that nobody may turn into a list or go through."""

    def tolist(self):
        raise AssertionError("it became a list")

    __iter__ = tolist


def unlisted(array: np.ndarray) -> np.ndarray:
    return array.view(Unlisted)


@pytest.mark.parametrize("name", ["stop_words_list", "bad_words_list"])
def test_too_many_words_are_refused_as_an_array(name: str) -> None:
    table = np.stack([np.full(MANY // 2, 3, np.int32), np.arange(1, MANY // 2 + 1, dtype=np.int32)])
    with refused(f"^input tensor '{name}' .*has {MANY // 2} entries; give at most 8192$"):
        sampling_fields({**BASE, name: unlisted(table[None])}, 0)
    one = np.stack([np.full(MANY // 2, 3, np.int32), np.full(MANY // 2, -1, np.int32)])
    one[1, 0] = MANY // 2
    with refused(f"^input tensor '{name}' .*has {MANY // 2} token ids together; give at most {MAX_SYMBOLS}$"):
        sampling_fields({**BASE, name: unlisted(one[None])}, 0)
    most = encode_words([[token] for token in range(MAX_ID_WORDS)])
    field = next(field for field, tensor in TENSORS.items() if tensor == name)
    assert len(sampling_fields({**BASE, name: most[None]}, 0)[field]) == MAX_ID_WORDS


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("draft_input_ids", MAX_DRAFT_TOKENS),
        ("retention_token_range_starts", MAX_RANGES),
        ("retention_token_range_ends", MAX_RANGES),
    ],
)
def test_too_many_numbers_are_refused_as_an_array(name: str, most: int) -> None:
    with refused(f"^input tensor '{name}' has {MANY} entries; give at most {most}$"):
        sampling_fields({**BASE, name: unlisted(np.zeros((1, MANY), np.int32))}, 0)


def test_too_many_stop_strings_are_refused_before_they_are_decoded() -> None:
    not_text = np.full((1, MAX_WORDS + 1), b"\xff", np.object_)
    with refused(r"^input tensor 'stop_strings' .*has 4097 entries; give at most 4096$"):
        sampling_fields({**BASE, "stop_strings": not_text}, 0)


def test_a_dense_bias_is_a_mapping_of_its_numbers() -> None:
    bias = np.random.default_rng(0).choice(np.array([0, 0, 1.5, -2, -np.inf], np.float32), (2, 1000))
    for row in range(2):
        fields = sampling_fields({"request_output_len": np.array([[4], [4]], np.int32), "embedding_bias": bias}, row)
        assert fields["logit_bias"] == {token: float(value) for token, value in enumerate(bias[row]) if value != 0}


def test_word_tables_are_read_as_one_word_after_another() -> None:
    """Random offsets, in order and not, against the definition."""

    def plain(ids: list[int], offsets: list[int]) -> list[list[int]] | None:
        ends = list(itertools.takewhile(lambda end: end != -1, offsets))
        if any(not start < end <= len(ids) for start, end in itertools.pairwise([0, *ends])):
            return None
        return [ids[start:end] for start, end in itertools.pairwise([0, *ends])]

    rng, num_refused = random.Random(0), 0
    for _ in range(3000):
        size = rng.randrange(6)
        ids = [rng.randrange(99) for _ in range(size)]
        offsets = rng.choice([sorted, list])([rng.choice([-1, *range(1, size + 1), size, 7, -5]) for _ in range(size)])
        if rng.random() < 0.5:
            offsets = sorted(set(range(1, size + 1)) - {rng.randrange(size + 1)})
            offsets += [-1] * (size - len(offsets))
        table = np.array([ids, offsets], np.int32).reshape(2, size)
        expected = plain(ids, offsets)
        if expected is None:
            num_refused += 1
            with refused("offsets that do not fit"):
                decode_words("stop_words_list", table)
        else:
            assert decode_words("stop_words_list", table) == expected
    assert 500 < num_refused < 2500


def test_a_prompt_longer_than_any_sequence_is_refused_before_it_is_read() -> None:
    limits = SizeLimits(max_request_bytes=1 << 30, vocab_size=8, max_seq_len=100)
    tensors = {
        "input_ids": unlisted(np.ones((1, MANY), np.int32)),
        "input_lengths": np.array([[MANY]], np.int32),
        **BASE,
    }
    with refused(f"^the prompt has {MANY} tokens, but the engine takes at most 99"):
        limits.check_tensors(tensors)
    limits.check_tensors({**tensors, "input_lengths": np.array([[99]], np.int32)})
    SizeLimits(max_request_bytes=1 << 30, vocab_size=8).check_tensors(tensors)
    wrong = {"input_ids": np.ones((1, 3), np.int32), "input_lengths": np.array([[1000]], np.int32), **BASE}
    limits.check_tensors(wrong)
    with refused("'input_lengths' is 1000, but 'input_ids' has 3 tokens"):
        parse_batch(wrong, True)
