"""Tokenizers of GGUF files beside transformers' own of the same vocabulary, on odd texts."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from kvforge.checkpoint.gguf.header import Header
from kvforge.checkpoint.gguf.pre_tokenizers import CUTTINGS
from kvforge.checkpoint.gguf.texts import make_tokenizer, write_texts
from kvforge.checkpoint.gguf.vocabulary import ending_tokens, read_vocabulary
from kvforge.tokenization.template_files import read_templates
from perf.peers.odd_texts import odd_texts

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = odd_texts(400, 7, SPECIAL)


def header_of(metadata: dict[str, Any]) -> Header:
    return Header(Path("some.gguf"), {f"tokenizer.{key}": value for key, value in metadata.items()}, ())


@pytest.fixture(scope="module")
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of bytes, learned from other odd texts."""
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.Split(Regex(CUTTINGS["gpt-2"].patterns[0]), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(odd_texts(1000, 3), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return [*tokens, *SPECIAL], [" ".join(pair) for pair in model["merges"]]


def byte_level(trained: tuple[list[str], list[str]], pre: str, **more: Any) -> Header:
    tokens, merges = trained
    types = [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL)
    eos = {"ggml.eos_token_id": len(tokens) - 1, "ggml.bos_token_id": len(tokens) - 3}
    kinds = {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": types}
    return header_of({**kinds, "ggml.merges": merges, **eos, **more})


@pytest.mark.parametrize(("pre", "own"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_merges_of_bytes(trained: tuple[list[str], list[str]], pre: str, own: type) -> None:
    header = byte_level(trained, pre)
    tokenizer = make_tokenizer(header, read_vocabulary(header))
    tokens, merges = trained
    vocab = {text: number for number, text in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    other = own(vocab=vocab, merges=pairs, additional_special_tokens=SPECIAL, add_bos_token=False)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == other(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == other.decode(ids)


def test_pieces_of_scores() -> None:
    """SentencePiece's, with a space in front, bytes for what is no piece, and tokens with spaces in them."""
    words = ["▁", "▁the", "▁t", "he", "t", "h", "e", "l", "lo", "o", "▁Hel", "H", "el", "▁H", "▁▁", "▁▁▁", "ll", "W"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<|user|>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    scores = [*[0.0] * 259, *(-float(index) for index in range(len(words))), -1e4]
    given = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.token_type": types, "ggml.scores": scores}
    header = header_of(given)
    tokenizer = make_tokenizer(header, read_vocabulary(header))
    vocab = {text: number for number, text in enumerate(tokens)}
    pairs = sorted(
        ((text[:at], text[at:]) for text in words for at in range(1, len(text))),
        key=lambda pair: -scores[vocab["".join(pair)]],
    )
    pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    other = LlamaTokenizer(vocab=vocab, merges=pairs, legacy=True, add_bos_token=True)
    texts = ["the Hello", "Hel  lo", "H", "", "the\nthe", "ÄÖ the", "hello   World"]
    for text in [*texts, *odd_texts(100, 1)]:
        if text.startswith(" "):  # to which this class of transformers, unlike Llama 2's own files, adds no other
            continue
        assert tokenizer.encode(text).ids == other(text).input_ids, text
    assert tokenizer.encode("the").tokens == ["<s>", "▁the"]
    assert tokenizer.encode("  Hel").tokens == ["<s>", "▁▁", "▁Hel"]
    assert tokenizer.encode("a<|user|>  the").tokens[-3:] == ["<|user|>", "▁▁", "▁the"]
    assert tokenizer.decode(tokenizer.encode("Hello é").ids) == "Hello é"
    plain = header_of(
        {**given, "ggml.add_space_prefix": False, "ggml.add_bos_token": False, "ggml.add_eos_token": True}
    )
    assert make_tokenizer(plain, read_vocabulary(plain)).encode("the").tokens == ["t", "he", "</s>"]
    strips = make_tokenizer(header, read_vocabulary(header), frozenset({"<s>"}))
    ids = strips.encode("<s>  the<|user|>  the").ids
    assert [tokens[number] for number in ids] == ["<s>", "<s>", "▁▁", "▁the", "<|user|>", "▁the"]


@pytest.mark.parametrize("pre", CUTTINGS)
def test_every_cutting_keeps_texts_and_special_tokens(trained: tuple[list[str], list[str]], pre: str) -> None:
    header = byte_level(trained, pre, **{"ggml.add_bos_token": False})
    tokenizer = make_tokenizer(header, read_vocabulary(header))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        expected = text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == expected
        found = {token for token in SPECIAL if tokenizer.token_to_id(token) in ids}
        assert found == {token for token in SPECIAL if token in text}


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "it's 1234", ["it", "'s", "Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "IT'S 12345!\n\nx", ["IT", "'S", "Ġ", "123", "45", "!ĊĊ", "x"]),
        ("qwen2", "IT'S 123", ["IT", "'S", "Ġ", "1", "2", "3"]),
        ("glm4", "a 12345", ["a", "Ġ", "123", "45"]),
        ("tekken", "camelCase a/b12", ["camel", "Case", "Ġa", "/b", "1", "2"]),
        ("gpt-4o", "camelCase it's 12345", ["camel", "Case", "Ġit's", "Ġ", "123", "45"]),
        ("deepseek-coder", "ab,c 12", ["ab", ",", "c", "Ġ", "1", "2"]),
    ],
)
def test_how_texts_are_cut(trained: tuple[list[str], list[str]], pre: str, text: str, pieces: list[str]) -> None:
    header = byte_level(trained, pre)
    cut = make_tokenizer(header, read_vocabulary(header)).pre_tokenizer
    assert cut is not None and [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


def test_what_begins_a_text(trained: tuple[list[str], list[str]]) -> None:
    """As the pre-tokenizer has it, unless the file says something else."""
    for pre, said, begins in (("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)):
        more = {} if said is None else {"ggml.add_bos_token": said}
        header = byte_level(trained, pre, **more)
        encoding = make_tokenizer(header, read_vocabulary(header)).encode("x")
        assert (encoding.tokens[0] == SPECIAL[0]) == begins and encoding.special_tokens_mask[0] == int(begins)


def test_what_ends_a_text(trained: tuple[list[str], list[str]]) -> None:
    """What the file names, and control tokens of known names."""
    count = len(trained[0])
    assert ending_tokens(byte_level(trained, "qwen2")) == [count - 1, count - 3]

    def ends(texts: list[str], **named: int) -> set[str]:
        keys = {f"ggml.{name}_token_id": number for name, number in named.items()}
        given = {"ggml.model": "gpt2", "ggml.tokens": texts, "ggml.token_type": [3] * len(texts), **keys}
        return {texts[number] for number in ending_tokens(header_of(given))}

    assert ends(["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|x|>"]) == {
        "<|eot_id|>",
        "<|end_of_text|>",
        "<|eom_id|>",
    }
    harmony = ["<|return|>", "<|call|>", "<|end|>", "<|endoftext|>"]
    assert ends(harmony) == {"<|return|>", "<|call|>", "<|endoftext|>"}
    assert ends(["<|end|>", "<|user|>"]) == {"<|end|>"}
    assert ends(["<|endoftext|>", "<|user|>", "<|observation|>"], eos=0, eot=1) == {"<|endoftext|>", "<|user|>"}


def test_files_beside_the_weights(trained: tuple[list[str], list[str]], tmp_path: Path) -> None:
    """transformers reads them as this project does."""
    templates = {"chat_template": "{{ eos_token }}", "chat_template.tool": "T", "chat_templates": ["tool"]}
    header = byte_level(trained, "qwen2", **templates)
    write_texts(header, {"temperature": 0.5}, tmp_path)
    assert read_templates(tmp_path, {}) == {"default": "{{ eos_token }}", "tool": "T"}
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"temperature": 0.5}
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == SPECIAL[2]
    ours = make_tokenizer(header, read_vocabulary(header))
    assert all(theirs(text).input_ids == ours.encode(text).ids for text in TEXTS[:50])
