"""The settings of the `tensorrt_llm` model: Triton's, the server's, and those of the engine's manifest."""

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvforge.common.errors import EngineError
from kvforge.common.records import to_text
from kvforge.kv_policies import Full, KVPolicy
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.serving.engine.command import MODULE
from kvforge.serving.options import EngineOptions
from kvforge.serving.triton_config import TritonConfig


@dataclass(frozen=True)
class StubConfig:
    """`vocab_size` and `max_seq_len` are 0 and `kv_policy` is none when the engine directory cannot be read: the engine
    process says why."""

    engine_command: list[str]
    python: str
    exclude_input: bool
    poll_s: float
    tokenizer_dir: Path
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    max_seq_len: int = 0
    kv_policy: KVPolicy = field(default_factory=Full)

    @classmethod
    def of(cls, triton: TritonConfig) -> "StubConfig":
        """Of the model and the engine that its parameters name."""
        parameters, options = triton.parameters, triton.options
        engine_dir = Path(parameters["gpt_model_path"])
        python = _native(options.python) or sys.executable
        command = [_native(word) for word in options.engine_command] or [python, "-m", MODULE, str(engine_dir)]
        config = cls(
            engine_command=[*command, "--options", to_text(options, EngineOptions)],
            python=python,
            exclude_input=parameters.get("exclude_input_in_output", "true").lower() == "true",
            poll_s=float(parameters.get("cancellation_check_period_ms", "50")) / 1000.0,
            tokenizer_dir=engine_dir / TOKENIZER_DIR,
        )
        try:
            manifest = load_manifest(engine_dir)
        except EngineError:
            return config
        return replace(
            config,
            vocab_size=manifest.vocab_size,
            eos_token_ids=tuple(manifest.eos_token_ids),
            max_seq_len=options.max_seq_len or manifest.max_seq_len,
            kv_policy=manifest.policy,
        )


def _native(word: str) -> str:
    """A path or another word of a command line, as this process gives its bytes to the system. A stub of Triton's knows
    ASCII alone, and everything beyond as bytes that could not be decoded."""
    return os.fsdecode(word.encode("utf-8", "surrogateescape"))
