"""The settings of the `tensorrt_llm` model, read from its config.pbtxt."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.kv_policies import Full, KVPolicy
from kvforge.manifest import TOKENIZER_DIR, Manifest, load_manifest
from kvforge.serving.logs.request_log import TEXT


@dataclass(frozen=True)
class StubConfig:
    """`vocab_size` and `max_seq_len` are 0 and `kv_policy` is none when the engine directory cannot be read: the engine
    process says why."""

    inputs: tuple[str, ...]
    decoupled: bool
    engine_command: list[str]
    python: str
    run_dir: Path
    exclude_input: bool
    poll_s: float
    max_queue_size: int
    max_request_bytes: int
    log_format: str
    log_level: str
    vocab_size: int
    tokenizer_dir: Path
    eos_token_ids: tuple[int, ...]
    max_seq_len: int
    kv_policy: KVPolicy
    wraps_token_ids: bool
    stream_interval: int

    @classmethod
    def of(cls, model_config: dict[str, Any]) -> "StubConfig":
        """From Triton's model configuration as JSON."""
        parameters = {key: value["string_value"] for key, value in model_config.get("parameters", {}).items()}
        engine_command = [_native(word) for word in json.loads(parameters["engine_command"])]
        engine_dir = Path(parameters["gpt_model_path"])
        manifest = _manifest(engine_dir)
        max_seq_len = 0 if manifest is None else manifest.max_seq_len
        return cls(
            inputs=tuple(tensor["name"] for tensor in model_config["input"]),
            decoupled=model_config.get("model_transaction_policy", {}).get("decoupled", False),
            engine_command=engine_command,
            python=_native(parameters["python"]) if "python" in parameters else engine_command[0],
            run_dir=Path(parameters["run_dir"]),
            exclude_input=parameters.get("exclude_input_in_output", "true").lower() == "true",
            poll_s=float(parameters.get("cancellation_check_period_ms", "50")) / 1000.0,
            max_queue_size=int(parameters.get("max_queue_size", "1024")),
            max_request_bytes=int(parameters.get("max_request_bytes", str(16 << 20))),
            log_format=parameters.get("log_format", TEXT),
            log_level=parameters.get("log_level", "WARNING"),
            vocab_size=0 if manifest is None else manifest.vocab_size,
            tokenizer_dir=engine_dir / TOKENIZER_DIR,
            eos_token_ids=() if manifest is None else tuple(manifest.eos_token_ids),
            max_seq_len=int(_option(engine_command, "--max-seq-len", str(max_seq_len))),
            kv_policy=Full() if manifest is None else manifest.policy,
            wraps_token_ids=parameters.get("wrap_token_ids", "false") == "true",
            stream_interval=int(parameters.get("stream_interval", "1")),
        )


def _manifest(engine_dir: Path) -> Manifest | None:
    try:
        return load_manifest(engine_dir)
    except EngineError:
        return None


def _native(word: str) -> str:
    """A path or another word of a command line, as this process gives its bytes to the system. A stub of Triton's knows
    ASCII alone, and everything beyond as bytes that could not be decoded."""
    return os.fsdecode(word.encode("utf-8", "surrogateescape"))


def _option(command: list[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default
