"""preprocessing and postprocessing without Triton: ids and texts."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvforge.common.errors import EngineError
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.request import parse_batch
from kvforge.serving.contract.word_lists import decode_words
from kvforge.serving.text_models.bls import FROM_PREPROCESSING
from kvforge.serving.text_models.postprocess import Postprocessor
from kvforge.serving.text_models.preprocess import MAX_WORD_BYTES, Preprocessor, load_tokenizer
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking_decoder
from tests.support.serving.refusals import refused

VOCAB_SIZE, END_ID, PAD_ID = 400, 2, 0
CONTRACT = json.loads((Path(__file__).parents[1] / "contract" / "triton_contract.json").read_text())


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    loaded = Tokenizer.from_dir(tokenizer_dir)
    assert loaded is not None
    return loaded


def preprocessor(tokenizer_dir: Path, max_request_bytes: int = 1 << 20) -> Preprocessor:
    tokenizer = load_tokenizer(str(tokenizer_dir))
    return Preprocessor(tokenizer, VOCAB_SIZE, max_request_bytes, end_id=END_ID, pad_id=PAD_ID)


def texts(*values: str | bytes) -> np.ndarray:
    return np.array([[v.encode() if isinstance(v, str) else v] for v in values], dtype=object)


def test_prompts_of_a_batch_are_padded(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    outputs = preprocessor(tokenizer_dir).run({"QUERY": texts("abc", "a")})
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[3], [1]]
    assert outputs["INPUT_ID"].tolist() == [tokenizer.encode("abc"), [*tokenizer.encode("a"), 0, 0]]


def test_what_was_not_sent_comes_out_as_tensorrt_llms_preprocessing_has_it(tokenizer_dir: Path) -> None:
    """Every output of the contract but the one of prompt tables, for each of two prompts; the engine takes them as if
    they had not been sent."""
    tensors = {"QUERY": texts("abc", "a"), "REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32)}
    outputs = preprocessor(tokenizer_dir).run(tensors)
    names = set(CONTRACT["models"]["preprocessing"]["outputs"])
    assert set(outputs) == names - {"OUT_PROMPT_TABLE_EXTRA_IDS"}
    assert outputs["STOP_WORDS_IDS"].shape == outputs["BAD_WORDS_IDS"].shape == (2, 2, 0)
    assert outputs["EMBEDDING_BIAS"].shape == (2, 0)
    assert outputs["OUT_END_ID"].tolist() == [[END_ID]] * 2
    assert outputs["OUT_PAD_ID"].tolist() == outputs["DECODER_INPUT_ID"].tolist() == [[PAD_ID]] * 2
    assert outputs["REQUEST_DECODER_INPUT_LEN"].tolist() == [[1], [1]]
    ids = {name: np.array([[8], [9]], np.int32) for name in ("END_ID", "PAD_ID")}
    own = preprocessor(tokenizer_dir).run(tensors | ids)
    assert own["OUT_END_ID"].tolist() == own["OUT_PAD_ID"].tolist() == own["DECODER_INPUT_ID"].tolist() == [[8], [9]]
    others = {"DECODER_INPUT_ID": "decoder_input_ids", "REQUEST_DECODER_INPUT_LEN": "decoder_input_lengths"}
    engine = {(FROM_PREPROCESSING | others)[name]: array for name, array in outputs.items()}
    for row, request in enumerate(parse_batch(engine, True, end_id=END_ID)):
        assert request.params == {"max_tokens": 3 + row, "n": 1, "temperature": 0.0}


def test_words_are_looked_for_with_and_without_a_space(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    words = np.array([[b"ab", b" c"]], dtype=object)
    outputs = preprocessor(tokenizer_dir).run({"QUERY": texts("x"), "STOP_WORDS_DICT": words})
    assert decode_words("", outputs["STOP_WORDS_IDS"][0]) == [tokenizer.encode(t) for t in ("ab", " ab", " c")]


def test_biased_words_make_a_dense_bias(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    words = np.array([[b"ab", b"b"]], dtype=object)
    weights = np.array([[1.5, -4.0]], np.float32)
    tensors = {"QUERY": texts("x"), "EMBEDDING_BIAS_WORDS": words, "EMBEDDING_BIAS_WEIGHTS": weights}
    bias = preprocessor(tokenizer_dir).run(tensors)["EMBEDDING_BIAS"]
    expected = np.zeros((1, VOCAB_SIZE), np.float32)
    for word, weight in (("ab", 1.5), ("b", -4.0)):
        for token in tokenizer.encode(word, add_special_tokens=False):
            expected[0, token] += weight
    np.testing.assert_array_equal(bias, expected)
    with refused("one weight for every word"):
        preprocessor(tokenizer_dir).run({"QUERY": texts("x"), "EMBEDDING_BIAS_WORDS": words})


def test_texts_over_the_limit(tokenizer_dir: Path) -> None:
    with refused("21 bytes, but at most 20"):
        preprocessor(tokenizer_dir, 20).run({"QUERY": texts("a" * 15), "STOP_WORDS_DICT": texts("b" * 6)})


@pytest.mark.parametrize(
    ("query", "words"), [("", "the prompt is empty"), (b"\xff", "'text_input' is not valid UTF-8")]
)
def test_refused_texts(tokenizer_dir: Path, query: str | bytes, words: str) -> None:
    with refused(words):
        preprocessor(tokenizer_dir).run({"QUERY": texts(query)})


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_tokens_become_the_text_of_each_row(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    tokens = np.array([[[*ids, 0], [ids[0], 0, 0]]], dtype=np.int32)
    done = Postprocessor(load_tokenizer(str(tokenizer_dir))).run(tokens, np.array([[2, 1]]))
    assert done.tolist() == [b"ab", b"a"]


def test_tokens_that_cannot_be_decoded_are_refused() -> None:
    tokenizer = panicking_decoder()
    (bad,) = tokenizer.encode(PANICKING_TEXT)
    with refused("cannot be shown as text"):
        Postprocessor(tokenizer).run(np.array([[[bad]]], np.int32), np.array([[1]]))


def test_word_lists_are_bounded_by_their_text(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = preprocessor(tokenizer_dir)
    weights = np.ones((1, 2), np.float32)
    for name in ("STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS"):
        for size, fits in ((MAX_WORD_BYTES, True), (MAX_WORD_BYTES + 1, False)):
            words = np.array([[b"a" * (size - 1), b"b"]], dtype=object)
            tensors = {"QUERY": texts("x"), name: words}
            if name == "EMBEDDING_BIAS_WORDS":
                tensors["EMBEDDING_BIAS_WEIGHTS"] = weights
            if fits:
                assert model.run(tensors)
                continue
            with monkeypatch.context() as patch, refused(f"at most {MAX_WORD_BYTES} are"):
                patch.setattr(Tokenizer, "encode_all", None)  # refused before any word is tokenized
                model.run(tensors)


def test_a_text_beyond_the_context_is_refused(tokenizer_dir: Path) -> None:
    model = Preprocessor(load_tokenizer(str(tokenizer_dir)), VOCAB_SIZE, 1 << 20, max_seq_len=101)
    assert model.run({"QUERY": texts("a" * 100)})["REQUEST_INPUT_LEN"].tolist() == [[100]]
    for length in (101, 1000, 1 << 19):
        with refused("shorten it, or give a larger --max-seq-len, to the build too, if"):
            model.run({"QUERY": texts("a" * length)})
