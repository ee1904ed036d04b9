"""What the gateway is started with, from its command line and back."""

import argparse
import dataclasses
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvforge.common.errors import KvforgeError
from kvforge.common.sampling_fields import AUTO, DEFAULT_FIELDS, GENERATION_CONFIGS, SAMPLING_FIELDS


@dataclass(frozen=True)
class GatewayOptions:
    """One field per option; times in seconds. `engine` holds the tokenizer and limits, `grpc` is Triton's HOST:PORT.

    Raises:
        KvforgeError: a limit that lets nothing through, or a name of the model that is empty.
    """

    engine: Path = Path()
    grpc: str = "127.0.0.1:8001"
    address: str = "127.0.0.1"
    port: int = 8080
    model_names: tuple[str, ...] = ()
    chat_template: Path | None = None
    tool_call_format: str | None = None
    reasoning_format: str | None = None
    generation_config: str = AUTO
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    api_key_file: Path | None = None
    cors_origin: str | None = None
    max_seq_len: int | None = None
    state_file: Path | None = None
    metrics: str | None = None
    no_page: bool = False
    manifest_sha256: str | None = None
    max_body_bytes: int = 8 * 2**20
    max_requests: int = 1024
    max_connections: int = 4096
    max_prompts: int = 128
    max_n: int = 128
    max_stop: int = 16
    max_answer_bytes: int = 256 * 2**20
    request_timeout: float | None = None
    read_timeout: float = 20.0
    header_timeout: float = 15.0
    body_timeout: float = 60.0
    write_timeout: float = 60.0
    keep_alive: float = 15.0
    drain_timeout: float = 30.0
    log_format: str = "text"
    log_level: str = "info"
    exit_with_parent: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, beginning with its own name."""
        return self.model_names or (self.engine.resolve().name,)

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise KvforgeError(f"{option_of(name)} is {getattr(self, name)}: give 1 or more")
        for name in _TIMES:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:  # NaN is neither
                raise KvforgeError(f"{option_of(name)} is {value}: give a number of seconds above 0")
        if not all(name.strip() for name in self.model_names):
            raise KvforgeError("a name of --served-model-name is empty: give one that clients can ask for")


_COUNTS = ("max_body_bytes", "max_requests", "max_connections", "max_prompts", "max_n", "max_stop", "max_answer_bytes")
_TIMES = ("request_timeout", "read_timeout", "header_timeout", "body_timeout", "write_timeout", "keep_alive")

_TYPES_AND_HELP: dict[str, tuple[Any, str]] = {
    "engine": (Path, "directory that kvforge build wrote"),
    "grpc": (str, "Triton's gRPC endpoint, HOST:PORT"),
    "address": (str, "where to listen (default: loopback only)"),
    "port": (int, "0: any free one"),
    "model_names": (tuple, "what clients call the model (default: the engine directory's name)"),
    "chat_template": (Path, "Jinja file to use instead of the tokenizer's own template"),
    "tool_call_format": (str, "how the model writes calls of tools (default: what its chat template speaks)"),
    "reasoning_format": (str, "how the model writes its reasoning, none to leave it in the text (default: likewise)"),
    "generation_config": (
        str,
        "auto: where requests do not say, as generation_config.json does",
    ),
    **{
        name: (type(SAMPLING_FIELDS[name].neutral), f"{SAMPLING_FIELDS[name].about}, where requests do not say")
        for name in DEFAULT_FIELDS
    },
    "api_key_file": (Path, "one key per line; $KVFORGE_API_KEY adds one"),
    "cors_origin": (str, "origin whose web pages may call, * for all (default: none)"),
    "max_seq_len": (int, "tokens a sequence at most (default: the engine's)"),
    "state_file": (Path, "the state.json in the server's run directory, read for readiness"),
    "metrics": (str, "URL of Triton's metrics, which the page shows (default: it shows none)"),
    "no_page": (bool, "serve no page at /"),
    "manifest_sha256": (str, "the digest that the engine's manifest must have (default: any)"),
    "max_body_bytes": (int, "a request's body at most"),
    "max_requests": (int, "open requests at most; more are answered with 429"),
    "max_connections": (int, "open connections at most; more are closed"),
    "max_prompts": (int, "prompts of one request at most"),
    "max_n": (int, "'n' at most"),
    "max_stop": (int, "stop strings at most"),
    "max_answer_bytes": (int, "an answer that is not streamed at most; four times as much of all that are open"),
    "read_timeout": (float, "processor time that reading one request may take"),
    "request_timeout": (float, "a request that takes longer is given up with 504"),
    "header_timeout": (float, "a connection that sends no whole request head in time is closed"),
    "body_timeout": (float, "a body that takes longer to arrive is refused with 408"),
    "write_timeout": (float, "a client that reads nothing for so long is disconnected"),
    "keep_alive": (float, "an idle connection is closed after this"),
    "drain_timeout": (float, "what open requests get to finish after SIGTERM"),
    "log_format": (str, "json: one object per line"),
    "log_level": (str, "info logs every request"),
    "exit_with_parent": (bool, "end when the process that started the gateway ends"),
}

_CHOICES = {
    "generation_config": GENERATION_CONFIGS,
    "log_format": ("text", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}


def option_of(field: str) -> str:
    """What a field is called on a command line."""
    return f"--{field.replace('_', '-')}"


def help_of(field: str) -> str:
    """What a field is for."""
    return _TYPES_AND_HELP[field][1]


def type_of(field: str) -> Any:
    """What a field's values are."""
    return _TYPES_AND_HELP[field][0]


def gateway_command(options: GatewayOptions) -> list[str]:
    """The argument list that starts a gateway process with these options. API keys stay in their file."""
    command = [sys.executable, "-m", "kvforge.gateway"]
    for item in dataclasses.fields(options):
        value = getattr(options, item.name)
        if item.name == "engine" or value != item.default:
            name = option_of(item.name)
            values = value if isinstance(value, tuple) else (value,)
            command += [name] if value is True else [f"{name}={each}" for each in values]
    return command


def parse_options(argv: list[str] | None = None) -> GatewayOptions:
    """The inverse of `gateway_command`. Raises KvforgeError as GatewayOptions."""
    parser = argparse.ArgumentParser(
        prog="kvforge.gateway", description="OpenAI-compatible HTTP server in front of Triton's gRPC endpoint."
    )
    for item in dataclasses.fields(GatewayOptions):
        kind, text = _TYPES_AND_HELP[item.name]
        name = option_of(item.name)
        if kind is bool:
            parser.add_argument(name, action="store_true", help=text)
        elif kind is tuple:
            parser.add_argument(name, action="append", default=[], help=text)
        else:
            parser.add_argument(
                name,
                type=kind,
                default=item.default,
                required=item.name == "engine",
                choices=_CHOICES.get(item.name),
                help=text,
            )
    given: dict[str, Any] = vars(parser.parse_args(argv))
    return GatewayOptions(**{**given, "model_names": tuple(given["model_names"])})
