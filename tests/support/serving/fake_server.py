"""Real servers in front of the engine that computes nothing (fake_engine.py), and what it answers."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.server.launcher import TritonServer
from kvforge.serving.server.options import ServerOptions
from tests.support.serving import fake_engine


def fake_command(engine_dir: Path, target: str = "cpu", more: Sequence[str] = ()) -> list[str]:
    """As `process_command`; `more` are arguments that only this process takes."""
    return [sys.executable, fake_engine.__file__, str(engine_dir), *more]


def fake_server(engine_dir: Path, **options: Any) -> TritonServer:
    """A Triton server with these options."""
    return TritonServer(engine_dir, ServerOptions(**options, engine_command=tuple(fake_command(engine_dir))))


def fake_tokens(engine_dir: Path, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The answer to these tokens."""
    manifest, seed = load_manifest(engine_dir), fake_engine.seed_of(engine_dir)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(fake_engine.next_token(tokens[-1], len(tokens), seed, manifest.vocab_size))
    return tokens[len(prompt) :]


def encode(engine_dir: Path, text: str) -> list[int]:
    return _tokenizer(engine_dir).encode(text)


def fake_text(engine_dir: Path, prompt: str, num_tokens: int) -> str:
    """The answer to this text through the text models."""
    ids = encode(engine_dir, prompt)
    detokenizer = Detokenizer(_tokenizer(engine_dir), ids)
    return "".join(map(detokenizer.push, fake_tokens(engine_dir, ids, num_tokens))) + detokenizer.flush()


def _tokenizer(engine_dir: Path) -> Tokenizer:
    found = Tokenizer.from_dir(engine_dir / TOKENIZER_DIR)
    assert found is not None
    return found
