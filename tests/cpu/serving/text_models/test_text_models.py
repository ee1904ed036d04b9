"""preprocessing and postprocessing without Triton: ids and texts, pieces that join, cancels that are seen."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvforge.common.errors import EngineError, RequestError
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.request import parse_batch
from kvforge.serving.contract.stream_keys import StreamKeys
from kvforge.serving.contract.word_lists import decode_words
from kvforge.serving.server.repository import repository_templates
from kvforge.serving.stub.responder import Responder
from kvforge.serving.stub.responses import FINAL, HEARTBEAT, SEQUENCE_END
from kvforge.serving.text_models.bls import FROM_PREPROCESSING
from kvforge.serving.text_models.postprocess import Postprocessor, Processed
from kvforge.serving.text_models.preprocess import MAX_WORD_BYTES, Preprocessor, load_tokenizer
from tests.support.models.checkpoints import write_byte_tokenizer
from tests.support.models.text_tokenizers import PANICKING_TEXT, panicking_decoder

VOCAB_SIZE, END_ID, PAD_ID = 400, 2, 0
CONTRACT = json.loads((Path(__file__).parents[1] / "contract" / "triton_contract.json").read_text())
TEXT = "añb 日本 🙂 end"


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
    keys = StreamKeys(tokenizer_dir)
    return Preprocessor(
        load_tokenizer(str(tokenizer_dir)), keys, VOCAB_SIZE, max_request_bytes, end_id=END_ID, pad_id=PAD_ID
    )


def postprocessor(tokenizer_dir: Path) -> tuple[Postprocessor, list[int]]:
    """With keys of streams that it accepts."""
    keys = StreamKeys(tokenizer_dir)
    return Postprocessor(load_tokenizer(str(tokenizer_dir)), keys), [keys.make() for _ in range(10)]


def texts(*values: str | bytes) -> np.ndarray:
    return np.array([[v.encode() if isinstance(v, str) else v] for v in values], dtype=object)


def test_prompts_of_a_batch_are_padded(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    outputs = preprocessor(tokenizer_dir).run({"QUERY": texts("abc", "a")})
    assert outputs["REQUEST_INPUT_LEN"].tolist() == [[3], [1]]
    assert outputs["INPUT_ID"].tolist() == [tokenizer.encode("abc"), [*tokenizer.encode("a"), 0, 0]]
    assert outputs["STREAM_KEY"].shape == (2, 1)


def test_what_was_not_sent_comes_out_as_tensorrt_llms_preprocessing_has_it(tokenizer_dir: Path) -> None:
    """Every output of the contract but the one of prompt tables, for each of two prompts; the engine takes them as if
    they had not been sent."""
    tensors = {"QUERY": texts("abc", "a"), "REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32)}
    outputs = preprocessor(tokenizer_dir).run(tensors)
    names = set(CONTRACT["models"]["preprocessing"]["outputs"])
    assert set(outputs) - {"STREAM_KEY"} == names - {"OUT_PROMPT_TABLE_EXTRA_IDS"}
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
    with pytest.raises(RequestError, match="one weight for every word"):
        preprocessor(tokenizer_dir).run({"QUERY": texts("x"), "EMBEDDING_BIAS_WORDS": words})


def test_texts_over_the_limit(tokenizer_dir: Path) -> None:
    with pytest.raises(RequestError, match="21 bytes, but at most 20"):
        preprocessor(tokenizer_dir, 20).run({"QUERY": texts("a" * 15), "STOP_WORDS_DICT": texts("b" * 6)})


@pytest.mark.parametrize(
    ("query", "words"), [("", "the prompt is empty"), (b"\xff", "'text_input' is not valid UTF-8")]
)
def test_refused_texts(tokenizer_dir: Path, query: str | bytes, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        preprocessor(tokenizer_dir).run({"QUERY": texts(query)})


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def send(
    made: tuple[Postprocessor, list[int]],
    ids: list[int],
    flags: int,
    key: int = 1,
    sequence: int = 0,
    cancelled: bool = False,
):
    tokens = np.array([[ids]], dtype=np.int32).reshape(1, 1, -1)
    lengths = np.array([[len(ids)]], dtype=np.int32)
    post, keys = made
    return post.run(tokens, lengths, np.array([[keys[key], sequence, flags]]), lambda: cancelled)


def piece(done) -> str:
    return done.text.reshape(-1)[0].decode()


def test_pieces_join_to_the_text_and_never_split_a_character(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    post = postprocessor(tokenizer_dir)
    ids = tokenizer.encode(TEXT)
    end = [SEQUENCE_END | FINAL if i == len(ids) - 1 else 0 for i in range(len(ids))]
    pieces = [piece(send(post, [token], flags)) for token, flags in zip(ids, end, strict=True)]
    assert "".join(pieces) == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) > len(TEXT)


def test_streams_do_not_mix(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    post = postprocessor(tokenizer_dir)
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert piece(send(post, ids[:1], 0, key=1)) == ""
    assert piece(send(post, ids[:1], 0, key=2)) == ""
    assert piece(send(post, ids[:1], 0, key=2, sequence=1)) == ""
    assert piece(send(post, ids[1:], SEQUENCE_END, key=2, sequence=1)) == "é"
    assert piece(send(post, [], SEQUENCE_END | FINAL, key=2)) == "\ufffd"
    assert piece(send(post, ids[1:], SEQUENCE_END | FINAL, key=1)) == "é"


def test_a_finished_key_starts_afresh(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    post = postprocessor(tokenizer_dir)
    send(post, tokenizer.encode("é")[:1], SEQUENCE_END | FINAL)
    assert piece(send(post, tokenizer.encode("a"), 0)) == "a"


def test_every_response_is_acknowledged_with_what_became_of_its_client(tokenizer_dir: Path) -> None:
    post = postprocessor(tokenizer_dir)
    beat = send(post, [], HEARTBEAT, key=5)
    assert (beat.text, beat.ack, beat.cancelled) == (None, post[1][5], False)
    assert send(post, [], HEARTBEAT, key=6, cancelled=True).cancelled


def test_a_direct_caller_gets_whole_texts(tokenizer_dir: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    tokens = np.array([[[*ids, 0], [ids[0], 0, 0]]], dtype=np.int32)
    done = postprocessor(tokenizer_dir)[0].run(tokens, np.array([[2, 1]]), None, lambda: False)
    assert done.ack is None
    assert done.text is not None
    assert done.text.tolist() == [b"ab", b"a"]


def test_an_answer_that_cannot_be_sent_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an ack the engine would go on for the ensemble that has ended."""
    pb = SimpleNamespace(
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Tensor=lambda *parts: parts,
        InferenceResponse=lambda output_tensors, error=None: (output_tensors, error),
        TritonError=type("TritonError", (), {"INTERNAL": 1, "__init__": lambda self, message, code: None}),
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", pb)
    path = repository_templates() / "postprocessing" / "1" / "model.py"
    module = runpy.run_path(str(path))
    model = module["TritonPythonModel"]()
    acks: list[tuple[int, bool]] = []
    sent: list[tuple] = []
    model._responder = Responder(pb)
    model._acks = SimpleNamespace(send=lambda *ack: acks.append(ack))
    model._postprocessor = SimpleNamespace(run=lambda *tensors: Processed(texts("a"), 7))

    def send(response: tuple, flags: int) -> None:
        if response[1] is None:
            raise RuntimeError("no room")
        sent.append(response)

    sender = SimpleNamespace(send=send)
    model.execute([SimpleNamespace(get_response_sender=lambda: sender, inputs=list, is_cancelled=lambda: False)])
    assert (acks, len(sent)) == ([(7, True)], 1)


def test_tokens_that_cannot_be_decoded_end_their_stream_alone(tokenizer_dir: Path) -> None:
    tokenizer, keys = panicking_decoder(), StreamKeys(tokenizer_dir)
    post = Postprocessor(tokenizer, keys), [keys.make() for _ in range(3)]
    (bad,), fine = tokenizer.encode(PANICKING_TEXT), tokenizer.encode("fox")
    send(post, fine, 0, key=1)
    failed = send(post, [*fine, bad], 0, key=2)
    assert (failed.text, failed.ack, failed.cancelled, failed.final) == (None, post[1][2], True, True)
    assert failed.error is not None and "cannot be shown as text" in failed.error
    assert piece(send(post, fine, SEQUENCE_END | FINAL, key=1)) == "fox"
    assert post[0]._streams == {}


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
            with monkeypatch.context() as patch, pytest.raises(RequestError, match=f"at most {MAX_WORD_BYTES} are"):
                patch.setattr(Tokenizer, "encode_all", None)  # refused before any word is tokenized
                model.run(tensors)


def test_a_text_beyond_the_context_is_refused(tokenizer_dir: Path) -> None:
    keys = StreamKeys(tokenizer_dir)
    model = Preprocessor(load_tokenizer(str(tokenizer_dir)), keys, VOCAB_SIZE, 1 << 20, max_seq_len=101)
    assert model.run({"QUERY": texts("a" * 100)})["REQUEST_INPUT_LEN"].tolist() == [[100]]
    for length in (101, 1000, 1 << 19):
        with pytest.raises(RequestError, match="shorten it or rebuild with a larger --max-seq-len"):
            model.run({"QUERY": texts("a" * length)})
