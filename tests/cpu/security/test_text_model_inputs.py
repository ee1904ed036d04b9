"""Direct requests to preprocessing and postprocessing, which every client can send: refused in one sentence."""

from pathlib import Path

import numpy as np
import pytest

from kvforge.runtime.requests.checks import MAX_WORDS
from kvforge.serving.text_models.postprocess import Postprocessor
from kvforge.serving.text_models.preprocess import Preprocessor, load_tokenizer
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.serving.refusals import refused

TOKENS = np.array([[[1, 2, 3]]], np.int32)
LENGTHS = np.array([[3]], np.int32)


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    write_byte_tokenizer(tmp_path)
    return tmp_path


def preprocessor(tokenizer_dir: Path) -> Preprocessor:
    return Preprocessor(load_tokenizer(str(tokenizer_dir)), 300, 1 << 20)


@pytest.mark.parametrize(
    ("tokens", "lengths", "words"),
    [
        (None, LENGTHS, "'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed"),
        (TOKENS, None, "'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed"),
        (TOKENS, [[4]], "'SEQUENCE_LENGTH' must be 0 to 3"),
        (TOKENS, [[-1]], "'SEQUENCE_LENGTH' must be 0 to 3"),
        (TOKENS, [[3], [3]], "does not fit 'TOKENS_BATCH'"),
        (TOKENS[0], LENGTHS, "does not fit 'TOKENS_BATCH'"),
        ([[[-1, 2, 3]]], LENGTHS, "a token id below 0"),
    ],
)
def test_postprocessing_refuses(tokenizer_dir: Path, tokens, lengths, words: str) -> None:
    arrays = [None if value is None else np.array(value) for value in (tokens, lengths)]
    with refused(words):
        Postprocessor(load_tokenizer(str(tokenizer_dir))).run(*arrays)


@pytest.mark.parametrize(
    "tensors", [{}, {"QUERY": np.zeros((0, 1), np.object_)}, {"QUERY": np.zeros((1, 0), np.object_)}]
)
def test_preprocessing_without_a_text(tokenizer_dir: Path, tensors: dict[str, np.ndarray]) -> None:
    with refused(r"'QUERY' .* is missing or empty"):
        preprocessor(tokenizer_dir).run(tensors)


def test_a_list_of_too_many_words(tokenizer_dir: Path) -> None:
    words = np.full((1, MAX_WORDS + 1), b"a", np.object_)
    with refused(r"'stop_words' has 4097 words, but at most 4096"):
        preprocessor(tokenizer_dir).run({"QUERY": np.array([[b"a"]], np.object_), "STOP_WORDS_DICT": words})
