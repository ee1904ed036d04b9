"""Rows of training data as token ids with a weight for each token as a target."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from kvforge.common.errors import KvforgeError
from kvforge.distill.chat_text import conversation, conversation_text
from kvforge.distill.packing import Mask
from kvforge.distill.rows import Row, read_dataset, read_jsonl, read_lines
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.files import read_tokenizer, read_tokenizer_config, special_tokens, tokens_before_text

BATCH_CHARACTERS = 1 << 20
"""Texts are encoded together, which the tokenizer does on all cores, once they have this many characters."""


class Sample(NamedTuple):
    """``ids`` [n] int32 and ``weights`` [n] float32: the weight of predicting each token from those before it. The
    first token has no prediction, so its weight is of no effect."""

    ids: np.ndarray
    weights: np.ndarray


class TextSample(NamedTuple):
    """A text to encode. ``answers`` are its character spans [begin, end) that answer, None where all of it counts;
    ``whole`` texts get the special tokens that the tokenizer adds, and an end-of-text token."""

    where: str
    text: str
    answers: list[tuple[int, int]] | None
    whole: bool


class SampleReader:
    """Reads samples with the tokenizer of a checkpoint directory."""

    def __init__(self, checkpoint: Path, vocab_size: int, mask: Mask = "all") -> None:
        """``vocab_size`` is the model's. Raises KvforgeError where the checkpoint's tokenizer cannot be read."""
        self.vocab_size, self.mask = vocab_size, mask
        self.template = ChatTemplate.from_dir(checkpoint)
        self._checkpoint = checkpoint
        self._tokenizer = read_tokenizer(file) if (file := checkpoint / "tokenizer.json").is_file() else None
        self._end: int | None = None
        if self._tokenizer is not None:
            name = special_tokens(read_tokenizer_config(checkpoint)).get("eos_token")
            self._end = None if name is None else self._tokenizer.token_to_id(name)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises KvforgeError where the checkpoint has none."""
        if self._tokenizer is None:
            raise KvforgeError(
                f"{self._checkpoint} has no tokenizer.json, which text needs; put one there, or give rows of input_ids."
            )
        return self._tokenizer

    def read(self, source: str, length: int, show_progress: bool = False) -> Iterator[Sample]:
        """Yield the samples of a .jsonl or .txt file or a dataset (see ``rows``), empty ones too, streamed.

        A .txt file is one text, cut into samples of ``length`` tokens that each begin with what the tokenizer puts
        before a text; only the last is shorter.

        Raises:
            KvforgeError: the data cannot be read, or a row is none of the known forms; it names the row.
        """
        path = Path(source)
        if path.suffix == ".txt":
            yield from self._plain_text(path, length, show_progress)
        elif path.suffix in (".jsonl", ".json"):
            yield from self.from_rows(read_jsonl(path, show_progress))
        elif path.is_file():
            raise KvforgeError(f"The data file {path} is neither .jsonl nor .txt; name it after what it holds.")
        elif source.startswith(("/", ".", "~")) and not Path(source.split(":")[0]).exists():
            raise KvforgeError(f"The data {path} does not exist; check the path.")
        else:
            yield from self.from_rows(read_dataset(source, show_progress))

    def from_rows(self, rows: Iterable[Row]) -> Iterator[Sample]:
        """Yield a sample for each row, in order."""
        waiting: list[TextSample] = []
        characters = 0
        for row in rows:
            item = self._parse(row)
            if isinstance(item, TextSample):
                waiting.append(item)
                characters += len(item.text)
            if waiting and (isinstance(item, Sample) or characters > BATCH_CHARACTERS):
                yield from self._encode(waiting)
                waiting, characters = [], 0
            if isinstance(item, Sample):
                yield item
        yield from self._encode(waiting)

    def _parse(self, row: Row) -> "TextSample | Sample":
        values = {key: value for key, value in row.values.items() if value is not None}
        if "input_ids" in values:
            return self._from_ids(row.where, values["input_ids"], values.get("weights"))
        if "messages" in values or "conversations" in values:
            if self.template is None:
                raise KvforgeError(
                    f"{row.where}: messages need a chat template and {self._checkpoint} has none; add "
                    "chat_template.jinja, or give prompt and completion."
                )
            try:
                messages = conversation(values)
                text, answers = conversation_text(self.template, messages, with_answers=self.mask == "answers")
            except KvforgeError as error:
                raise KvforgeError(f"{row.where}: {error}; correct the row.") from None
            return TextSample(row.where, _utf8(row.where, text), answers, whole=False)
        if "prompt" in values and "completion" in values:
            prompt, completion = (_string(row.where, name, values[name]) for name in ("prompt", "completion"))
            if not completion:
                return TextSample(row.where, "", None, whole=True)
            answers = [(len(prompt), len(prompt) + len(completion))] if self.mask == "answers" else None
            return TextSample(row.where, prompt + completion, answers, whole=True)
        if "text" in values:
            answers = [] if self.mask == "answers" else None
            return TextSample(row.where, _string(row.where, "text", values["text"]), answers, whole=True)
        raise KvforgeError(
            f"{row.where}: none of the known keys (it has {', '.join(map(repr, list(row.values)[:5])) or 'none'}); "
            "give text, prompt and completion, messages, or input_ids."
        )

    def _from_ids(self, where: str, ids: Any, weights: Any) -> Sample:
        array = _array(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind != "i"):
            raise KvforgeError(f"{where}: input_ids is not a list of integers; give token ids.")
        self._check_ids(where, array)
        if weights is None:
            targets = np.full(array.size, float(self.mask == "all"), np.float32)
        else:
            targets = _array(weights)
            if targets.ndim != 1 or (targets.size and targets.dtype.kind not in "if"):
                raise KvforgeError(f"{where}: weights is not a list of numbers; give one for each token.")
            if targets.size != array.size:
                raise KvforgeError(
                    f"{where}: {targets.size} weights for {array.size} input_ids; give one for each token."
                )
            with np.errstate(over="ignore"):  # becomes infinite, which is refused
                targets = targets.astype(np.float32)
            if not (np.isfinite(targets) & (targets >= 0)).all():
                raise KvforgeError(f"{where}: a weight is negative or not finite; give weights of 0 or more.")
        return Sample(array.astype(np.int32), targets)

    def _encode(self, texts: Sequence[TextSample]) -> Iterator[Sample]:
        for whole, group in itertools.groupby(texts, key=lambda text: text.whole):
            same = list(group)
            encodings = self.tokenizer.encode_batch([text.text for text in same], add_special_tokens=whole)
            yield from map(self._sample, same, encodings)

    def _sample(self, text: TextSample, encoding: Encoding) -> Sample:
        if not text.text:
            return Sample(np.empty(0, np.int32), np.empty(0, np.float32))
        ids = np.asarray(encoding.ids, np.int64)
        self._check_ids(text.where, ids)
        if text.answers is None:
            weights = np.ones(ids.size, np.float32)
        else:
            # A token answers when its last character does: one that spans the border to an answer is part of it.
            ends = np.asarray([end for _, end in encoding.offsets], np.int64)
            weights = np.zeros(ids.size, np.float32)
            for begin, end in text.answers:
                weights[(ends > begin) & (ends <= end)] = 1
        if text.whole and self._end is not None:
            end_weight = 1.0 if text.answers is None or text.answers else 0.0
            if ids[-1] == self._end:  # the tokenizer adds it by itself
                weights[-1] = end_weight
            else:
                ids, weights = np.append(ids, self._end), np.append(weights, np.float32(end_weight))
        return Sample(ids.astype(np.int32), weights.astype(np.float32))

    def _plain_text(self, path: Path, length: int, show_progress: bool) -> Iterator[Sample]:
        if self.mask == "answers":
            raise KvforgeError(f"{path} is plain text, in which nothing is an answer; use --mask all.")
        prefix = tokens_before_text(self.tokenizer)
        step = length - len(prefix)
        if step < 1:
            raise KvforgeError(f"--length {length} leaves no room for text; give a larger one.")
        pending = np.empty(0, np.int64)
        block: list[str] = []
        characters = 0
        for number, line in read_lines(path, show_progress):
            block.append(line)
            characters += len(line)
            if characters > BATCH_CHARACTERS:
                pending = np.append(pending, self._block_ids(f"{path}, line {number}", block))
                block, characters = [], 0
                cut = pending.size // step * step
                yield from (self._piece(prefix, pending[at : at + step]) for at in range(0, cut, step))
                pending = pending[cut:]
        pending = np.append(pending, self._block_ids(str(path), block))
        yield from (self._piece(prefix, pending[at : at + step]) for at in range(0, pending.size, step))

    def _block_ids(self, where: str, block: list[str]) -> np.ndarray:
        ids = np.asarray(self.tokenizer.encode("".join(block), add_special_tokens=False).ids, np.int64)
        self._check_ids(where, ids)
        return ids

    def _piece(self, prefix: list[int], body: np.ndarray) -> Sample:
        ids = np.concatenate([prefix, body]).astype(np.int32)
        return Sample(ids, np.ones(ids.size, np.float32))

    def _check_ids(self, where: str, ids: np.ndarray) -> None:
        outside = ids[(ids < 0) | (ids >= self.vocab_size)]
        if outside.size:
            raise KvforgeError(
                f"{where}: token {outside[0]} is outside the model's vocabulary of {self.vocab_size}; use this model's "
                "tokenizer."
            )


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # rows of several lengths
        return np.empty((0, 0))


def _string(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise KvforgeError(f"{where}: {name} is of type {type(value).__name__}; give a string.")
    return _utf8(where, value)


def _utf8(where: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise KvforgeError(
            f"{where}: character {error.start + 1} is half a surrogate pair; give Unicode text."
        ) from None
    return text
