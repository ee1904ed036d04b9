"""What a server is started with, and the engine process's command line that follows from it."""

from dataclasses import dataclass
from pathlib import Path

from kvforge.common.addresses import LOOPBACK
from kvforge.common.exact_intervals import ExactTokens
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.options import speculation_arguments
from kvforge.serving.engine.command import process_command
from kvforge.serving.server.repository import RequestLimits


@dataclass(frozen=True)
class ServerOptions:
    """Ports of 0 mean any free one; an address of None is `address`; None leaves a limit to the engine.
    `drain_timeout_s` is how long `stop` lets accepted requests run on; without `decoupled` each request has one
    response; with `exclude_input` (None: as `decoupled`) an answer leaves the prompt out where a request does not say;
    with `wrap_token_ids` any number is a token; responses of a stream have `stream_interval` tokens (parameters.py);
    `control_apis` leaves Triton's control endpoints (access.py) open; `log_file` None keeps the log in the run
    directory, which goes with the server; `manifest_sha256` is the digest (`Manifest.sha256`) that the engine must
    have."""

    address: str = LOOPBACK
    http_address: str | None = None
    grpc_address: str | None = None
    metrics_address: str | None = None
    http_port: int = 0
    grpc_port: int = 0
    metrics_port: int = 0
    max_num_seqs: int | None = None
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_gib: float | None = None
    enable_prefix_cache: bool = True
    prefix_dir: Path | None = None
    prefix_gib: float | None = None
    speculative: SpeculativeConfig | None = None
    early_exit_threshold: float | None = None
    early_exit_prompts: bool = False
    exact_tokens: ExactTokens | None = None
    max_queue_size: int = RequestLimits.max_queue_size
    max_request_bytes: int = RequestLimits.max_request_bytes
    drain_timeout_s: float = 0.0
    decoupled: bool = True
    exclude_input: bool | None = None
    wrap_token_ids: bool = False
    stream_interval: int = RequestLimits.stream_interval
    control_apis: bool = False
    log_level: str = "WARNING"
    log_format: str = RequestLimits.log_format
    log_file: Path | None = None
    manifest_sha256: str | None = None

    def address_of(self, frontend: str) -> str:
        """Where Triton's ``frontend`` (triton_addresses.py) listens."""
        own = getattr(self, f"{frontend}_address")
        return self.address if own is None else own

    @property
    def request_limits(self) -> RequestLimits:
        return RequestLimits(
            self.max_queue_size,
            self.max_request_bytes,
            self.log_format,
            self.log_level,
            self.max_seq_len,
            self.manifest_sha256,
            self.decoupled,
            self.decoupled if self.exclude_input is None else self.exclude_input,
            self.wrap_token_ids,
            self.stream_interval,
        )


def engine_command(engine_dir: Path, options: ServerOptions, target: str = "cpu") -> list[str]:
    """The argument list that starts the engine process with these limits, under the interpreter of the engine's target.

    Raises EngineError when that is vllm, and its interpreter or its checkpoint is not there.
    """
    arguments = ["--log-level", options.log_level, "--log-format", options.log_format]
    for name in ("manifest_sha256", "max_num_seqs", "max_num_tokens", "max_seq_len", "kv_cache_gib"):
        value = getattr(options, name)
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    speculation = speculation_arguments(
        options.speculative, options.early_exit_threshold, options.exact_tokens, options.early_exit_prompts
    )
    if options.prefix_dir is not None:
        arguments += ["--prefix-dir", str(options.prefix_dir.absolute())]
    if options.prefix_gib is not None:
        arguments += ["--prefix-gib", str(options.prefix_gib)]
    arguments += speculation if options.enable_prefix_cache else [*speculation, "--no-prefix-cache"]
    return process_command(engine_dir, target, arguments)
