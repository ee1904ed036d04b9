"""The `preprocessing` model: text to token ids, word lists to id lists, and a key for the request."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np

from kvforge.errors import EngineError, RequestError
from kvforge.runtime.tokenizer import Tokenizer
from kvforge.serving.contract import refuse_unsupported
from kvforge.serving.request import encode_words

REFUSED = {
    "DECODER_QUERY": "decoder_text_input",
    "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
    "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
    "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
}
PASSED_ON = {"REQUEST_OUTPUT_LEN": "REQUEST_OUTPUT_LEN", "END_ID": "OUT_END_ID", "PAD_ID": "OUT_PAD_ID"}


class Preprocessor:
    """Encodes with the engine's own tokenizer, special tokens included, as `kvforge.LLM` does."""

    def __init__(self, tokenizer_dir: str) -> None:
        self._tokenizer = load_tokenizer(tokenizer_dir)

    def run(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Output tensors by name, each with the batch dimension. Raises RequestError, naming the tensor.

        QUERY [B, 1] bytes gives INPUT_ID [B, n] int32 (rows padded with 0) and REQUEST_INPUT_LEN [B, 1];
        STOP_WORDS_DICT and BAD_WORDS_DICT [B, w] bytes give [B, 2, m] int32 tables of ids and end offsets.
        """
        if "QUERY" not in tensors or tensors["QUERY"].size == 0:
            raise RequestError("input tensor 'QUERY' ('text_input' of ensemble) is missing or empty")
        for name, ensemble_name in REFUSED.items():
            if name in tensors:
                refuse_unsupported(ensemble_name, tensors[name])
        rows = [self._encode(query) for query in tensors["QUERY"].reshape(-1)]
        outputs = {
            "INPUT_ID": _padded(rows),
            "REQUEST_INPUT_LEN": np.array([[len(row)] for row in rows], dtype=np.int32),
            "STREAM_KEY": np.full((len(rows), 1), secrets.randbits(62), dtype=np.int64),
        }
        for source, target in PASSED_ON.items():
            if source in tensors:
                outputs[target] = tensors[source]
        for source, target in (("STOP_WORDS_DICT", "STOP_WORDS_IDS"), ("BAD_WORDS_DICT", "BAD_WORDS_IDS")):
            if source in tensors:
                outputs[target] = self._words(source, tensors[source])
        return outputs

    def _encode(self, text: Any) -> list[int]:
        decoded = _text("text_input", text)
        ids = self._tokenizer.encode(decoded)
        if not decoded or not ids:
            raise RequestError("the prompt is empty: 'text_input' must hold at least one character")
        return ids

    def _words(self, name: str, table: np.ndarray) -> np.ndarray:
        rows = []
        for row in table.reshape(table.shape[0], -1):
            words = [_text(name, word) for word in row]
            rows.append(encode_words([ids for word in words for ids in self._spellings(word)]))
        width = max(row.shape[1] for row in rows)
        return np.stack([np.pad(row, ((0, 0), (0, width - row.shape[1])), constant_values=-1) for row in rows])

    def _spellings(self, word: str) -> list[list[int]]:
        """The word's token ids at the start of a line and after a space: most tokenizers tell them apart."""
        texts = [word] if not word or word[0].isspace() else [word, f" {word}"]
        spellings = (self._tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return [ids for ids in spellings if ids]


def load_tokenizer(directory: str) -> Tokenizer:
    """Raises EngineError when there is none."""
    tokenizer = Tokenizer.from_dir(Path(directory))
    if tokenizer is None:
        raise EngineError(f"{directory} has no tokenizer.json: text cannot be served; rebuild with kvforge build")
    return tokenizer


def _text(name: str, value: Any) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise RequestError(f"'{name}' is not valid UTF-8: {error}") from None


def _padded(rows: list[list[int]]) -> np.ndarray:
    """[B, longest] int32, short rows filled with 0; their lengths travel beside."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
