"""A GGUF file's tokenizer and chat templates, written as the files that a checkpoint's directory has."""

import json
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvforge.checkpoint.gguf.header import Header
from kvforge.checkpoint.gguf.pre_tokenizers import cutting_of
from kvforge.checkpoint.gguf.vocabulary import (
    BYTE_LEVEL,
    CONTROL,
    SENTENCEPIECE,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    flag,
    merges_of,
    read_vocabulary,
)
from kvforge.common.checkpoint_files import ADDITIONAL_TEMPLATES, CHAT_TEMPLATE, TOKENIZER_CONFIG
from kvforge.common.errors import CheckpointError, first_line
from kvforge.common.native_calls import panics_as

_SPACE = "▁"
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_TEMPLATE = "tokenizer.chat_template"
_LIST = "tokenizer.chat_templates"
_TEMPLATE_NAME = re.compile(r"\w[\w.-]{0,63}", re.ASCII)
_CHANGES_TEXTS = ("tokenizer.ggml.precompiled_charsmap", "tokenizer.ggml.suppress_tokens")


def write_texts(
    header: Header, generation: Mapping[str, Any], folder: Path, keeps_space_after: frozenset[str] | None = None
) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and the chat templates of a file into ``folder``, and
    ``generation_config.json`` where ``generation`` has something. ``keeps_space_after`` as in ``make_tokenizer``.

    Raises:
        CheckpointError: the file has no tokenizer, or one that is not supported.
    """
    vocabulary = read_vocabulary(header)
    make_tokenizer(header, vocabulary, keeps_space_after).save(str(folder / "tokenizer.json"))
    named = {
        name: vocabulary.tokens[vocabulary.special[key]] for key, name in _NAMES.items() if key in vocabulary.special
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name, template in _templates(header).items():
        file = folder / CHAT_TEMPLATE if name is None else folder / ADDITIONAL_TEMPLATES / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_text(template, encoding="utf-8")
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation) + "\n", encoding="utf-8")


def make_tokenizer(
    header: Header, vocabulary: Vocabulary, keeps_space_after: frozenset[str] | None = None
) -> Tokenizer:
    """Return the tokenizer of a file, whose tokens have the ids that they have there. Spaces behind special tokens of
    SentencePiece belong to these where ``keeps_space_after`` is not None, but for those that it names. Raises
    CheckpointError as ``write_texts`` does."""
    for key in _CHANGES_TEXTS:
        if header.metadata.get(key):
            raise CheckpointError(f"{header.path} has {key}, which is not supported.")
    make = _byte_level if vocabulary.model == BYTE_LEVEL else _sentencepiece
    try:
        with panics_as(CheckpointError, f"{header.path} makes the tokenizers library fail; convert the model again."):
            tokenizer, adds_bos = make(header, vocabulary)
            _add_tokens(tokenizer, vocabulary, keeps_space_after if vocabulary.model == SENTENCEPIECE else None)
            _add_ends(header, tokenizer, vocabulary, adds_bos)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises nothing more precise
        raise CheckpointError(f"{header.path} has a tokenizer that cannot be made ({first_line(error)}).") from None
    if tokenizer.get_vocab() != {text: number for number, text in enumerate(vocabulary.tokens)}:
        raise CheckpointError(f"{header.path} has tokens whose numbers tokenizer.json cannot have.")
    return tokenizer


def _byte_level(header: Header, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Merges of bytes by rank, as in GPT-2; and whether a text begins with a token for it."""
    cutting = cutting_of(header)
    vocab = {text: number for number, text in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges_of(header), ignore_merges=cutting.whole_pieces))
    if cutting.composes:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in cutting.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=flag(header, "add_space_prefix", False), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cutting.adds_bos


def _sentencepiece(header: Header, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Merges of characters by the score of what they make, with bytes for characters that are no tokens."""
    vocab = {text: number for number, text in enumerate(vocabulary.tokens)}
    merges = []
    for text, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        for at in range(1, len(text)):
            if text[:at] in vocab and text[at:] in vocab:
                merges.append((-score, -at, text[:at], text[at:]))
    merges.sort(key=lambda merge: merge[:2])
    model = models.BPE(
        vocab=vocab,
        merges=[(left, right) for _, _, left, right in merges],
        unk_token=vocabulary.tokens[vocabulary.special["unknown"]],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer, adds_space = Tokenizer(model), flag(header, "add_space_prefix", True)
    begin = [normalizers.Prepend(_SPACE)] if adds_space else []
    tokenizer.normalizer = normalizers.Sequence([*begin, normalizers.Replace(" ", _SPACE)])
    end = [decoders.Strip(" ", 1, 0)] if adds_space else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, keeps_space_after: frozenset[str] | None) -> None:
    """Declare the tokens that are found in a text before it is cut."""
    added = []
    for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in (CONTROL, UNKNOWN, USER_DEFINED):
            strips = keeps_space_after is not None and text not in keeps_space_after
            added.append(AddedToken(text, normalized=False, special=kind != USER_DEFINED, rstrip=strips))
    tokenizer.add_tokens(added)


def _add_ends(header: Header, tokenizer: Tokenizer, vocabulary: Vocabulary, adds_bos: bool) -> None:
    """Put the tokens around a text that the file asks for."""
    ends = {"bos": flag(header, "add_bos_token", adds_bos), "eos": flag(header, "add_eos_token", False)}
    for name, is_added in ends.items():
        if is_added and name not in vocabulary.special:
            raise CheckpointError(f"{header.path} asks for a {name} token around texts and does not say which it is.")
    if any(ends.values()):
        numbers = {name: vocabulary.special[name] for name, is_added in ends.items() if is_added}
        texts = {name: vocabulary.tokens[number] for name, number in numbers.items()}
        single = [*([texts["bos"]] if ends["bos"] else []), "$A", *([texts["eos"]] if ends["eos"] else [])]
        special = [(texts[name], number) for name, number in numbers.items()]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _templates(header: Header) -> dict[str | None, str]:
    """The chat templates by their names, the default one by None."""
    found: dict[str | None, str] = {}
    for key, template in header.metadata.items():
        if key == _LIST or not key.startswith(_TEMPLATE):
            continue
        name = key.removeprefix(_TEMPLATE).removeprefix(".") or None
        if not isinstance(template, str) or (name is not None and not _TEMPLATE_NAME.fullmatch(name)):
            raise CheckpointError(f"{header.path} has {reprlib.repr(key)}, which is no chat template.")
        found[name] = template
    return found
