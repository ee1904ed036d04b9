"""What the processes of a server are started with; each default stands here.

The engine process reads its options from its command line, Triton's models from `serve.json` in the run directory.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError
from kvforge.common.exact_intervals import ExactTokens
from kvforge.common.records import RecordError, from_text, to_text
from kvforge.runtime.speculation.config import SpeculativeConfig

SERVE_FILE = "serve.json"


OF_PROCESS = ("log_format", "log_level", "manifest_sha256")


@dataclass(frozen=True)
class EngineOptions:
    """What `LLMEngine` is loaded with; None leaves a limit to the engine. Of its process are OF_PROCESS: the form of
    the log, text or json; its level, INFO for a line a request; the `Manifest.sha256` of the only engine that is
    loaded, and the only tokenizer."""

    log_format: str = "text"
    log_level: str = "WARNING"
    manifest_sha256: str | None = None
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_gib: float | None = None
    enable_prefix_cache: bool = True
    prefix_dir: Path | None = None
    prefix_gib: float | None = None
    prefix_host_gib: float | None = None
    snapshot_every: int | None = None
    num_snapshots: int | None = None
    speculative: SpeculativeConfig | None = None
    early_exit_threshold: float | None = None
    early_exit_prompts: bool = False
    exact_tokens: ExactTokens | None = None
    async_scheduling: bool = False

    def of_engine(self) -> dict[str, Any]:
        """Return the arguments of `LLMEngine` that are not its defaults."""
        plain = vars(EngineOptions())
        return {k: getattr(self, k) for k in plain.keys() - OF_PROCESS if getattr(self, k) != plain[k]}


@dataclass(frozen=True)
class ModelOptions(EngineOptions):
    """What Triton's models know of their server.

    `max_queue_size` requests wait beyond those that fill the engine's sequences; one more is refused with UNAVAILABLE.
    `max_request_bytes` bounds the sum of a request's input tensors. `wrap_token_ids` takes any number for a token.
    Responses of a stream have `stream_interval` tokens (parameters.py). `engine_command` starts the engine process
    under `python`; without one it is that of the model's own interpreter.
    """

    max_queue_size: int = 1024
    max_request_bytes: int = 16 * 2**20
    wrap_token_ids: bool = False
    stream_interval: int = 1
    engine_command: tuple[str, ...] = ()
    python: str = ""


def write_serve_file(options: ModelOptions, run_dir: Path) -> None:
    """Say in the run directory what the models read. Other users do not."""
    path = run_dir / SERVE_FILE
    path.touch(0o600)
    path.write_text(to_text(options, ModelOptions), encoding="utf-8")


def read_serve_file(run_dir: Path) -> ModelOptions:
    """Return the options of a server; the defaults where it was started by hand. Raises EngineError for a damaged
    file."""
    path = run_dir / SERVE_FILE
    try:
        return from_text(ModelOptions, path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ModelOptions()
    except (OSError, RecordError) as error:
        raise EngineError(f"{path} {error}; start kvforge serve again.") from None
