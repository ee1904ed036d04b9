"""The byte-level BPE tokenizer of the tiny model: trained on generated text, one digit per token."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from kvforge.tasks import TASKS, filler, words
from kvforge.tasks.prompt import question_block
from perf.training.config import BOS_ID

BOS, EOS = "<s>", "</s>"
CORPUS_TASKS = ("needle_single", "needle_multi", "variables", "quoting", "list_recall", "arithmetic")
PATTERN = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]|\s"
_ASCII_PATTERN = re.compile(r" ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]|\s")


def corpus(num_items: int, seed: int) -> Iterator[str]:
    """Lines of generated text in which every word of the vocabulary occurs."""
    rng = random.Random(seed)
    for group in (words.ADJECTIVES, words.NOUNS, words.NAMES, words.ITEMS):
        for _ in range(50):
            yield " " + " ".join(group)
    for _ in range(num_items):
        for name in CORPUS_TASKS:
            item = TASKS[name].sample(rng, set())
            yield " ".join(item.statements) + question_block(item) + item.answer + "."
        yield " ".join(filler.sentence(rng) for _ in range(4))


def train_tokenizer(vocab_size: int, seed: int, num_items: int = 5000) -> Tokenizer:
    """A tokenizer whose encode puts `<s>` first; deterministic for (vocab_size, seed, num_items)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(num_items, seed), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_position: int) -> None:
    """Writes tokenizer.json and the tokenizer_config.json that Hugging Face transformers reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "model_max_length": max_position, "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class FastEncoder:
    """Encodes ASCII text as the tokenizer does, without `<s>`, remembering the ids of every word.

    Exact for text split before a space or at a line break, because the tokenizer never merges across those.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: dict[str, list[int]] = {}

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in _ASCII_PATTERN.findall(text):
            known = self._ids.get(piece)
            if known is None:
                known = self._tokenizer.encode(piece, add_special_tokens=False).ids
                self._ids[piece] = known
            ids += known
        return ids

    def count(self, text: str) -> int:
        return len(self(text))
