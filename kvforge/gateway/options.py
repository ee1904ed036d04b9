"""What the gateway is started with, from its command line and back."""

import argparse
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

from kvforge.common.addresses import LOOPBACK
from kvforge.common.errors import KvforgeError
from kvforge.common.records import from_text, to_text
from kvforge.common.sampling_fields import AUTO, GENERATION_CONFIGS, SAMPLING_FIELDS
from kvforge.serving.server.ports import PORTS

_AS_RECORD = "--options"


@dataclass(frozen=True)
class About:
    """What ``--help`` says of a field, and what it may be: one of ``choices``, a count from 1 on, seconds above 0."""

    help: str
    choices: tuple[str, ...] | None = None
    is_count: bool = False
    is_seconds: bool = False


_count, _seconds = partial(About, is_count=True), partial(About, is_seconds=True)


def _sampled(name: str) -> About:
    return About(f"{SAMPLING_FIELDS[name].about}, where requests do not say")


@dataclass(frozen=True)
class GatewayOptions:
    """One field per option, with its help; times in seconds. `engine` holds the tokenizer and limits.

    Raises:
        KvforgeError: a limit that lets nothing through, or a name of the model that is empty.
    """

    engine: Annotated[Path, About("directory that kvforge build wrote")] = Path()
    grpc: Annotated[str, About("Triton's gRPC endpoint, HOST:PORT")] = f"{LOOPBACK}:{PORTS['grpc']}"
    address: Annotated[str, About("where to listen (default: loopback only)")] = LOOPBACK
    port: Annotated[int, About("0: any free one")] = PORTS["openai"]
    model_names: Annotated[
        tuple[str, ...], About("what clients call the model (default: the engine directory's name)")
    ] = ()
    chat_template: Annotated[Path | None, About("Jinja file to use instead of the tokenizer's own template")] = None
    tool_call_format: Annotated[
        str | None, About("how the model writes calls of tools (default: what its chat template speaks)")
    ] = None
    reasoning_format: Annotated[
        str | None, About("how the model writes its reasoning, none to leave it in the text (default: likewise)")
    ] = None
    generation_config: Annotated[
        str, About("auto: where requests do not say, as generation_config.json does", choices=GENERATION_CONFIGS)
    ] = AUTO
    temperature: Annotated[float | None, _sampled("temperature")] = None
    top_p: Annotated[float | None, _sampled("top_p")] = None
    top_k: Annotated[int | None, _sampled("top_k")] = None
    min_p: Annotated[float | None, _sampled("min_p")] = None
    repetition_penalty: Annotated[float | None, _sampled("repetition_penalty")] = None
    api_key_file: Annotated[Path | None, About("one key per line; $KVFORGE_API_KEY adds one")] = None
    cors_origin: Annotated[str | None, About("origin whose web pages may call, * for all (default: none)")] = None
    max_seq_len: Annotated[int | None, About("tokens a sequence at most (default: the engine's)")] = None
    state_file: Annotated[Path | None, About("the state.json in the server's run directory, read for readiness")] = None
    metrics: Annotated[str | None, About("URL of Triton's metrics, which the page shows (default: none)")] = None
    no_page: Annotated[bool, About("serve no page at /")] = False
    manifest_sha256: Annotated[str | None, About("digest that the engine's manifest must have (default: any)")] = None
    max_body_bytes: Annotated[int, _count("a request's body at most")] = 8 * 2**20
    max_requests: Annotated[int, _count("open requests at most; more are answered with 429")] = 1024
    max_connections: Annotated[int, _count("open connections at most; more are closed")] = 4096
    max_prompts: Annotated[int, _count("prompts of one request at most")] = 128
    max_n: Annotated[int, _count("'n' at most")] = 128
    max_stop: Annotated[int, _count("stop strings at most")] = 16
    max_answer_bytes: Annotated[
        int, _count("an answer that is not streamed at most; four times as much of all that are open")
    ] = 256 * 2**20
    request_timeout: Annotated[float | None, _seconds("a request that takes longer is given up with 504")] = None
    read_timeout: Annotated[float, _seconds("processor time that reading one request may take")] = 20.0
    header_timeout: Annotated[float, _seconds("a connection that sends no whole request head in time is closed")] = 15.0
    body_timeout: Annotated[float, _seconds("a body that takes longer to arrive is refused with 408")] = 60.0
    write_timeout: Annotated[float, _seconds("a client that reads nothing for so long is disconnected")] = 60.0
    keep_alive: Annotated[float, _seconds("an idle connection is closed after this")] = 15.0
    drain_timeout: Annotated[float, About("what open requests get to finish after SIGTERM")] = 30.0
    log_format: Annotated[str, About("json: one object per line", choices=("text", "json"))] = "text"
    log_level: Annotated[str, About("info logs every request", choices=("debug", "info", "warning", "error"))] = "info"
    exit_with_parent: Annotated[bool, About("end when the process that started the gateway ends")] = False

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may call the model, beginning with its own name."""
        return self.model_names or (self.engine.resolve().name,)

    def __post_init__(self) -> None:
        for name, (_, option) in FIELDS.items():
            value = getattr(self, name)
            if option.is_count and value < 1:
                raise KvforgeError(f"{option_of(name)} is {value}: give 1 or more")
            if option.is_seconds and value is not None and not 0 < value < math.inf:  # NaN is neither
                raise KvforgeError(f"{option_of(name)} is {value}: give a number of seconds above 0")
        if not all(name.strip() for name in self.model_names):
            raise KvforgeError("a name of --served-model-name is empty: give one that clients can ask for")


FIELDS: dict[str, tuple[Any, About]] = {
    name: get_args(kind) for name, kind in get_type_hints(GatewayOptions, include_extras=True).items()
}


def option_of(field: str) -> str:
    """What a field is called on a command line."""
    return f"--{field.replace('_', '-')}"


def add_option(parser: argparse._ActionsContainer, name: str, **more: Any) -> None:
    """Declare the option of a field; ``more`` goes to argparse as it is."""
    (kind, option), default = FIELDS[name], getattr(GatewayOptions, name)
    if kind is bool:
        more["action"] = "store_true"
    elif default == ():
        more |= {"action": "append", "default": []}
    else:
        more |= {"type": (get_args(kind) or (kind,))[0], "default": default, "choices": option.choices}
    parser.add_argument(option_of(name), help=option.help, **more)


def gateway_command(options: GatewayOptions) -> list[str]:
    """The argument list that starts a gateway process with these options. API keys stay in their file."""
    return [sys.executable, "-m", "kvforge.gateway", _AS_RECORD, to_text(options)]


def parse_options(argv: list[str]) -> GatewayOptions:
    """Of a person's command line, or of that of `gateway_command`. Raises KvforgeError as GatewayOptions."""
    if argv[:1] == [_AS_RECORD]:
        return from_text(GatewayOptions, argv[1])
    parser = argparse.ArgumentParser(
        prog="kvforge.gateway", description="OpenAI-compatible HTTP server in front of Triton's gRPC endpoint."
    )
    add_option(parser, "engine", required=True)
    for name in list(FIELDS)[1:]:
        add_option(parser, name)
    given: dict[str, Any] = vars(parser.parse_args(argv))
    return GatewayOptions(**{**given, "model_names": tuple(given["model_names"])})
