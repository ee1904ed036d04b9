"""Direct requests to preprocessing and postprocessing, which every client can send: refused in one sentence."""

from pathlib import Path

import numpy as np
import pytest

from kvforge.common.errors import RequestError
from kvforge.runtime.requests.checks import MAX_WORDS
from kvforge.serving.contract.stream_keys import StreamKeys
from kvforge.serving.text_models.postprocess import Postprocessor
from kvforge.serving.text_models.preprocess import Preprocessor, load_tokenizer
from tests.support.models.checkpoints import write_byte_tokenizer

TOKENS = np.array([[[1, 2, 3]]], np.int32)
LENGTHS = np.array([[3]], np.int32)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path


def preprocessor(tokenizer_dir: Path) -> Preprocessor:
    return Preprocessor(load_tokenizer(str(tokenizer_dir)), StreamKeys(tokenizer_dir), 300, 1 << 20)


@pytest.mark.parametrize(
    ("tokens", "lengths", "state", "words"),
    [
        (None, LENGTHS, None, "'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed"),
        (TOKENS, None, None, "'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed"),
        (TOKENS, [[4]], None, "'SEQUENCE_LENGTH' must be 0 to 3"),
        (TOKENS, [[-1]], None, "'SEQUENCE_LENGTH' must be 0 to 3"),
        (TOKENS, [[3], [3]], None, "does not fit 'TOKENS_BATCH'"),
        (TOKENS[0], LENGTHS, None, "does not fit 'TOKENS_BATCH'"),
        ([[[-1, 2, 3]]], LENGTHS, None, "a token id below 0"),
        (TOKENS, LENGTHS, [[1, 0]], "'STREAM_STATE' is not what"),
        (TOKENS, LENGTHS, [[1, 0, 0, -2]], "'STREAM_STATE' is not what"),
        # The key that ends the stub's listener, and with it the pace of everybody's streams.
        (TOKENS, LENGTHS, [[-1, 0, 0]], "'STREAM_STATE' is not what"),
    ],
)
def test_postprocessing_refuses(tokenizer_dir: Path, tokens, lengths, state, words: str) -> None:
    arrays = [None if value is None else np.array(value) for value in (tokens, lengths, state)]
    with pytest.raises(RequestError, match=words):
        Postprocessor(load_tokenizer(str(tokenizer_dir)), StreamKeys(tokenizer_dir)).run(*arrays, lambda: False)


@pytest.mark.parametrize(
    "tensors", [{}, {"QUERY": np.zeros((0, 1), np.object_)}, {"QUERY": np.zeros((1, 0), np.object_)}]
)
def test_preprocessing_without_a_text(tokenizer_dir: Path, tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(RequestError, match=r"'QUERY' .* is missing or empty"):
        preprocessor(tokenizer_dir).run(tensors)


def test_a_list_of_too_many_words(tokenizer_dir: Path) -> None:
    words = np.full((1, MAX_WORDS + 1), b"a", np.object_)
    with pytest.raises(RequestError, match=r"'stop_words' has 4097 words, but at most 4096"):
        preprocessor(tokenizer_dir).run({"QUERY": np.array([[b"a"]], np.object_), "STOP_WORDS_DICT": words})
