"""The `preprocessing` model: text to token ids, word lists to id lists, biased words to a bias."""

from pathlib import Path
from typing import Any

import numpy as np

from kvforge.common.errors import EngineError, RequestError
from kvforge.common.refusals import PROMPT
from kvforge.manifest import TOKENIZER_DIR, Manifest, check_not_replaced, load_manifest
from kvforge.runtime.requests.checks import MAX_WORDS
from kvforge.runtime.text.limits import TextLimits
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.inputs import refuse_unsupported
from kvforge.serving.contract.size_limits import check_request_bytes
from kvforge.serving.contract.tensors import Tensors, text
from kvforge.serving.contract.word_lists import encode_words
from kvforge.serving.triton_config import TritonConfig
from kvforge.tokenization.files import read_tokenizer_config, special_tokens

REFUSED = {
    "DECODER_QUERY": "decoder_text_input",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    "IMAGE_BYTES": "image_bytes_input",
    "IMAGE_URL": "image_url_input",
    "VIDEO_BYTES": "video_bytes_input",
}
BIAS_WORDS, BIAS_WEIGHTS = "EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS"
# What clients of the ensemble call the inputs that hold text.
ENSEMBLE_NAMES = {
    "QUERY": "text_input",
    "STOP_WORDS_DICT": "stop_words",
    "BAD_WORDS_DICT": "bad_words",
    BIAS_WORDS: "embedding_bias_words",
    BIAS_WEIGHTS: "embedding_bias_weights",
}
WORD_LISTS = ("STOP_WORDS_DICT", "BAD_WORDS_DICT", "EMBEDDING_BIAS_WORDS")
MAX_WORD_BYTES = 1 << 17
"""Of the words of one list together, 32 for each of MAX_WORDS."""


class Preprocessor:
    """Encodes with the engine's own tokenizer, special tokens included, as `kvforge.LLM` does.

    `vocab_size` is that of the model, which may be larger than the tokenizer's; 0 refuses biased words. Texts are held
    against `max_seq_len` before they are tokenized; 0 leaves that to the engine. `end_id` and `pad_id` are told to whom
    sends none; -1 is no token. Threads may share it.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, max_request_bytes: int, max_seq_len: int = 0, end_id: int = -1,
        pad_id: int = -1,
    ) -> None:  # fmt: skip
        self._tokenizer = tokenizer
        self._encode_prompt = TextLimits.of(tokenizer, max_seq_len).encode if max_seq_len else tokenizer.encode
        self._vocab_size = vocab_size
        self._max_request_bytes = max_request_bytes
        self._end_id, self._pad_id = end_id, pad_id

    def run(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """Output tensors by name, each with the batch dimension. Raises RequestError, naming the tensor.

        QUERY [B, 1] bytes gives INPUT_ID [B, n] int32 (rows padded with 0) and REQUEST_INPUT_LEN [B, 1];
        STOP_WORDS_DICT and BAD_WORDS_DICT [B, w] bytes give [B, 2, m] int32 tables of ids and end offsets;
        EMBEDDING_BIAS_WORDS [B, w] and _WEIGHTS [B, w] give EMBEDDING_BIAS [B, vocab] float32. What was not sent gives
        an empty table or bias, the engine's end and pad ids, and one pad id as the decoder's input, as in TensorRT-LLM.
        """
        if "QUERY" not in tensors or tensors["QUERY"].size == 0:
            raise RequestError("input tensor 'QUERY' ('text_input' of ensemble) is missing or empty")
        for name, ensemble_name in REFUSED.items():
            if name in tensors:
                refuse_unsupported(ensemble_name, tensors[name])
        check_request_bytes("texts", num_text_bytes(tensors), self._max_request_bytes)
        _check_words(tensors)
        rows = [self._encode(query) for query in tensors["QUERY"].reshape(-1)]
        outputs = {
            "INPUT_ID": _padded(rows),
            "REQUEST_INPUT_LEN": np.array([[len(row)] for row in rows], dtype=np.int32),
        }
        one = (len(rows), 1)
        if "REQUEST_OUTPUT_LEN" in tensors:
            outputs["REQUEST_OUTPUT_LEN"] = tensors["REQUEST_OUTPUT_LEN"]
        for source, target in (("STOP_WORDS_DICT", "STOP_WORDS_IDS"), ("BAD_WORDS_DICT", "BAD_WORDS_IDS")):
            outputs[target] = self._words(source, tensors.get(source, np.zeros((len(rows), 0), dtype=np.object_)))
        has_bias = BIAS_WORDS in tensors or BIAS_WEIGHTS in tensors
        outputs["EMBEDDING_BIAS"] = self._bias(tensors) if has_bias else np.zeros((len(rows), 0), np.float32)
        outputs["OUT_END_ID"] = tensors.get("END_ID", np.full(one, self._end_id, np.int32))
        outputs["OUT_PAD_ID"] = tensors.get("PAD_ID", np.full(one, self._pad_id, np.int32))
        outputs["DECODER_INPUT_ID"] = np.broadcast_to(outputs["OUT_PAD_ID"], one).copy()
        outputs["REQUEST_DECODER_INPUT_LEN"] = np.ones(one, dtype=np.int32)
        return outputs

    def _encode(self, query: Any) -> list[int]:
        decoded = text("text_input", query)
        ids = self._encode_prompt(decoded)
        if not decoded or not ids:
            raise RequestError("is empty", "'text_input' must hold at least one character", field=PROMPT)
        return ids

    def _words(self, name: str, table: np.ndarray) -> np.ndarray:
        rows = []
        for row in table.reshape(table.shape[0], -1):
            words = [text(ENSEMBLE_NAMES[name], word) for word in row]
            spellings = self._tokenizer.encode_all([spelling for word in words for spelling in _spellings(word)])
            rows.append(encode_words([ids for ids in spellings if ids]))
        width = max((row.shape[1] for row in rows), default=0)
        if not rows:
            return np.zeros((0, 2, 0), dtype=np.int32)
        return np.stack([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-1) for row in rows])

    def _bias(self, tensors: Tensors) -> np.ndarray:
        """Every token of a word gets the word's weight added, as in TensorRT-LLM's preprocessing; the word is taken as
        written, so that a space before it makes a difference."""
        words, weights = tensors.get(BIAS_WORDS), tensors.get(BIAS_WEIGHTS)
        if words is None or weights is None or words.shape != weights.shape:
            raise RequestError(
                "input tensors 'embedding_bias_words' and 'embedding_bias_weights' must have one weight for every word"
            )
        if not self._vocab_size:
            raise RequestError("cannot be used: the vocabulary's size is unknown", field="embedding_bias_words")
        if not np.isfinite(weights).all():
            raise RequestError("must hold finite numbers", field="embedding_bias_weights")
        bias = np.zeros((words.shape[0], self._vocab_size), dtype=np.float32)
        for row in range(words.shape[0]):
            texts = [text("embedding_bias_words", word) for word in words[row].reshape(-1)]
            for ids, weight in zip(self._tokenizer.encode_all(texts), weights[row].reshape(-1), strict=True):
                np.add.at(bias[row], ids, weight)
        return bias


def make_preprocessor(config: TritonConfig) -> Preprocessor:
    """For a model. Raises EngineError when there is no tokenizer."""
    manifest = _manifest(Path(config.parameters["tokenizer_dir"]))
    lengths = [config.options.max_seq_len, None if manifest is None else manifest.max_seq_len]
    tokenizer = tokenizer_of(config)
    end_id = -1 if manifest is None else next(iter(manifest.eos_token_ids), -1)
    return Preprocessor(
        tokenizer,
        0 if manifest is None else manifest.vocab_size,
        config.options.max_request_bytes,
        min(filter(None, lengths), default=0),
        end_id,
        _pad_id(tokenizer, Path(config.parameters["tokenizer_dir"]), end_id),
    )


def num_text_bytes(tensors: Tensors) -> int:
    """Bytes of all texts of a request."""
    return sum(_num_bytes(tensors[name]) for name in ENSEMBLE_NAMES if name in tensors)


def tokenizer_of(config: TritonConfig) -> Tokenizer:
    """That of the engine which is served. Raises EngineError when there is none."""
    return load_tokenizer(config.parameters["tokenizer_dir"], config.options.manifest_sha256)


def load_tokenizer(directory: str, manifest_sha256: str | None = None) -> Tokenizer:
    """That of an engine, whose manifest must have the digest if one is given. Raises EngineError when there is none."""
    if manifest_sha256:
        check_not_replaced(Path(directory).parent, manifest_sha256)
    tokenizer = Tokenizer.from_dir(Path(directory))
    if tokenizer is None:
        raise EngineError(f"{directory} has no tokenizer.json: text cannot be served; rebuild with kvforge build")
    return tokenizer


def _manifest(tokenizer_dir: Path) -> Manifest | None:
    if tokenizer_dir.name != TOKENIZER_DIR:
        return None
    try:
        return load_manifest(tokenizer_dir.parent)
    except EngineError:
        return None


def _pad_id(tokenizer: Tokenizer, directory: Path, end_id: int) -> int:
    """The token that the tokenizer's configuration pads with, or the end token."""
    name = special_tokens(read_tokenizer_config(directory)).get("pad_token")
    found = None if name is None else tokenizer.backend.token_to_id(name)
    return end_id if found is None else found


def _spellings(word: str) -> list[str]:
    """The word at the start of a line and after a space: most tokenizers tell them apart."""
    return [word] if not word or word[0].isspace() else [word, f" {word}"]


def _check_words(tensors: Tensors) -> None:
    for name in WORD_LISTS:
        if name not in tensors:
            continue
        number, size = tensors[name].size, _num_bytes(tensors[name])
        if number > MAX_WORDS:
            raise RequestError(f"has {number} words, but at most {MAX_WORDS} are taken", field=ENSEMBLE_NAMES[name])
        if size > MAX_WORD_BYTES:
            raise RequestError(
                f"has words of {size} bytes together, but at most {MAX_WORD_BYTES} are taken",
                "send fewer or shorter ones",
                field=ENSEMBLE_NAMES[name],
            )


def _num_bytes(table: np.ndarray) -> int:
    return sum(len(value) for value in table.reshape(-1) if isinstance(value, (bytes, str)))


def _padded(rows: list[list[int]]) -> np.ndarray:
    """[B, longest] int32, short rows filled with 0; their lengths travel beside."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
