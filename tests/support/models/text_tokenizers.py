"""Small tokenizers of the two usual kinds, made here: byte-level BPE, and pieces with byte fallback."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from kvforge.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer

TEXT = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Grüße aus Köln, naïve café façade",
    "日本語のテキスト、漢字とかな",
    "emoji 😀 😃 👩‍👩‍👧 done",
    "stop strings end texts; STOP here",
]


def byte_level(vocab_size=330):
    """Byte-level BPE (GPT-2, Llama 3, Qwen); most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return RuntimeTokenizer(tokenizer)


def byte_fallback():
    """SentencePiece-like (Llama 2): "▁" for a space, stripped at the start, bytes for what is not a piece."""
    words = ["▁", "▁The", "▁fox", "ox", "a", "b", "c", "o", "S", "T", "O", "P", "."]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": b + 3 for b in range(256)}
    vocab |= {word: 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    return RuntimeTokenizer(tokenizer)


PANICKING_TEXT = "a" * 25 + "b"
"""What a `panicking` tokenizer's library cannot split: the search for the pattern exceeds its limit."""


def panicking():
    """Byte-level BPE whose pre-tokenizer repeats a repetition; every text but PANICKING_TEXT's kind is fine."""
    tokenizer = byte_level().backend
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return RuntimeTokenizer(tokenizer)


def panicking_decoder():
    """`byte_level` with a token for PANICKING_TEXT, which cannot be decoded."""
    tokenizer = byte_level().backend
    tokenizer.add_tokens([PANICKING_TEXT])
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex(r"(a+)+$"), "a")])
    return RuntimeTokenizer(tokenizer)


def odd(tokenizer):
    """Changes a tokenizer of models/checkpoints.py: it panics on runs of "a" within a text, its time grows with the
    square of a run of spaces, and it cannot decode the token of PANICKING_TEXT."""
    content = tokenizer.to_str().replace('"t300"', f'"{PANICKING_TEXT}"')
    changed = Tokenizer.from_str(content)
    changed.add_tokens([PANICKING_TEXT])
    changed.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$|\s*x|."), "isolated")
    changed.decoder = decoders.Sequence([decoders.Replace(Regex(r"(a+)+$"), "a"), decoders.ByteFallback()])
    return changed


def composing():
    """Byte-level BPE whose normalizer makes texts shorter."""
    tokenizer = byte_level().backend
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return RuntimeTokenizer(tokenizer)


def dropping():
    """Words with one token for any that is unknown; spaces and control characters vanish."""
    words = models.WordLevel({"<unk>": 0, "fox": 1, "dog": 2}, unk_token="<unk>")
    tokenizer = Tokenizer(words)
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return RuntimeTokenizer(tokenizer)


def doubling():
    """Pieces of 1, 2, 4, … 128 of the letter a, as the pieces of spaces in large vocabularies."""
    lengths = [2**power for power in range(8)]
    vocab = {"a" * length: index for index, length in enumerate(lengths)} | {"b": 8}
    merges = [("a" * length, "a" * length) for length in lengths[:-1]]
    return RuntimeTokenizer(Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="b")))
