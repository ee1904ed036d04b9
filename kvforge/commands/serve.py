"""`kvforge serve ENGINE`: a Triton server for one engine, until it is interrupted."""

import argparse
import os
import shlex
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.commands.build_options import add_build_options, flag_of, given_options
from kvforge.commands.parsers import add_command, add_revision, display_of
from kvforge.commands.sampling_options import add_default_options, sampling_defaults
from kvforge.commands.serve_doors import Doors, add_door_options, choose_doors
from kvforge.common.errors import KvforgeError
from kvforge.engine_cache.names import check_is_there, names_checkpoint
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.requests.default_fields import AUTO, DEFAULT_FIELDS
from kvforge.runtime.speculation.config import check_speculation
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options
from kvforge.serving.server.ports import PORTS

if TYPE_CHECKING:
    from kvforge.gateway import GatewayOptions

LIMITS = ("max_num_seqs", "max_num_tokens", "max_seq_len")
"""What an engine is both built and served with."""
OF_GATEWAY: dict[str, Any] = {
    "openai_port": PORTS["openai"], "generation_config": AUTO,
    **dict.fromkeys(
        (
            "openai_address", "api_key_file", "served_model_name", "chat_template", "tool_call_format",
            "reasoning_format", "no_page", "open_page", *DEFAULT_FIELDS,
        )
    ),
}  # fmt: skip
"""Options of the gateway alone, and what they are where nobody gives them; None and False are so of any."""
MINIMUM = {
    "max_queue_size": 0,
    "stream_interval": 0,
    "max_request_bytes": 1024,
    "drain_timeout": 0,
    "max_restarts": 0,
    "restart_window": 0,
    "canary_period": 0,
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = add_command(
        subparsers,
        "serve",
        help="serve an engine, or a checkpoint, behind Triton Inference Server",
        example="kvforge serve ENGINE --openai --kv-cache-gib 8",
    )
    parser.add_argument(
        "engine",
        type=Path,
        help="directory that kvforge build wrote; or a checkpoint, a directory or OWNER/NAME[@REVISION] on the Hub, of "
        "which an engine is built once and kept",
    )
    add_door_options(parser)
    parser.add_argument("--max-num-seqs", type=int, help="sequences a step at most (default: the engine's)")
    parser.add_argument("--max-num-tokens", type=int, help="tokens a step at most (default: the engine's)")
    parser.add_argument("--max-seq-len", type=int, help="tokens a sequence at most (default: the engine's)")
    parser.add_argument("--kv-cache-gib", type=float, help="size of the KV cache (default: from free memory)")
    parser.add_argument("--no-prefix-cache", action="store_true", help="do not reuse pages of equal prompt starts")
    add_speculation_options(parser)
    building = parser.add_argument_group(
        "building", "for a checkpoint, besides --max-num-seqs, --max-num-tokens and --max-seq-len, which are built for"
    )
    add_revision(building)
    add_build_options(building, leave_out=(*LIMITS, "decoupled_mode", "kv_prediction", "calibration"))
    parser.add_argument("--max-queue-size", type=int, default=1024, help="sequences that may wait")
    parser.add_argument("--max-request-bytes", type=int, default=16 * 2**20, help="a request's tensors at most")
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, metavar="S",
        help="seconds that accepted requests get to finish when the server is told to stop",
    )  # fmt: skip
    parser.add_argument(
        "--decoupled", action=argparse.BooleanOptionalAction,
        help="--no-decoupled: one response a request and no streaming, for clients that call infer() (default: as the "
        "engine was built, with streaming unless its recipe says otherwise)",
    )  # fmt: skip
    parser.add_argument(
        "--stream-interval", type=int, default=1, metavar="N",
        help="tokens in a response of a stream; 0: all that wait for their turn",
    )  # fmt: skip
    parser.add_argument(
        "--exclude-input-in-output", action=argparse.BooleanOptionalAction, default=None,
        help="leave the prompt out of answers that are not streamed, where a request does not say (default: "
        "it is there with --no-decoupled, as with TensorRT-LLM, otherwise not)",
    )  # fmt: skip
    parser.add_argument(
        "--wrap-token-ids", action="store_true",
        help="count token ids beyond the vocabulary from its start: for load generators that draw any number",
    )  # fmt: skip
    gateway = parser.add_argument_group("OpenAI API", "a gateway in front of the server")
    gateway.add_argument("--openai", action="store_true", help="serve OpenAI's HTTP API too")
    gateway.add_argument(
        "--api-key-file", type=Path, help="keys that clients must have, one per line; $KVFORGE_API_KEY adds one"
    )
    gateway.add_argument(
        "--served-model-name", help="what clients call the model (default: its folder or name on the Hub)"
    )
    gateway.add_argument("--chat-template", type=Path, help="Jinja file in place of the tokenizer's template")
    gateway.add_argument(
        "--tool-call-format", help="how the model writes calls of tools (default: what its chat template speaks)"
    )
    gateway.add_argument(
        "--reasoning-format",
        help="how the model writes its reasoning, none to leave it in the text (default: likewise)",
    )
    add_default_options(gateway)
    page = gateway.add_mutually_exclusive_group()
    page.add_argument("--no-page", action="store_true", help="serve no page at the gateway's root")
    page.add_argument("--open-page", action="store_true", help="open that page in a browser once the server is ready")
    restarts = parser.add_mutually_exclusive_group()
    restarts.add_argument("--no-restart", action="store_true", help="end when a process dies, instead of restarting")
    restarts.add_argument("--max-restarts", type=int, default=5, help="within the window, then give up")
    parser.add_argument("--restart-window", type=float, default=300.0, metavar="S", help="seconds")
    parser.add_argument(
        "--canary-period", type=float, default=0.0, metavar="S",
        help="a request of one token every S seconds; unanswered, the server is not ready (default: 0, none)",
    )  # fmt: skip
    parser.add_argument(
        "--control-apis", action="store_true",
        help="leave Triton's shared-memory, repository, trace and logging endpoints open to all clients",
    )  # fmt: skip
    parser.add_argument("--log-file", type=Path, help="append the log here; -: standard error (default: keep none)")
    parser.add_argument("--log-format", default="text", choices=("text", "json"), help="json: one object per line")
    parser.add_argument(
        "--log-level", default="warning", choices=("debug", "info", "warning", "error"), help="what is logged at least"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal to stop. Raises KvforgeError when it cannot start or its processes die too often."""
    from kvforge.gateway.auth import ENVIRONMENT, ApiKeys
    from kvforge.gateway.process import GatewayProcess
    from kvforge.serving.health.canary import Canary
    from kvforge.serving.health.server import HealthServer
    from kvforge.serving.logs.pump import STDERR, LogSink, log_to
    from kvforge.serving.server.launcher import TritonServer
    from kvforge.serving.server.options import ServerOptions
    from kvforge.serving.server.stop_signals import StopSignals
    from kvforge.serving.server.supervisor import RestartPolicy, Supervisor

    speculation = speculation_options(args)
    for option, minimum in MINIMUM.items():
        if not getattr(args, option) >= minimum:  # NaN too
            raise KvforgeError(f"--{option.replace('_', '-')} is {getattr(args, option)}: give {minimum} or more")
    if not args.openai:
        for option in OF_GATEWAY:
            value = getattr(args, option)
            if value is not None and value is not False and value != OF_GATEWAY[option]:
                raise KvforgeError(
                    f"--{option.replace('_', '-')} is for the OpenAI gateway: add --openai, or leave it out"
                )
        if ENVIRONMENT in os.environ:
            raise KvforgeError(
                f"${ENVIRONMENT} is set, and only the OpenAI gateway has keys: add --openai, or unset it"
            )
    doors = choose_doors(args, has_key=args.openai and bool(ApiKeys.read(args.api_key_file)))
    doors.check_ports()  # before an engine is built or loaded, which takes long
    engine, name = _engine(args, predicts="exact_tokens" in speculation)
    manifest = load_manifest(engine)
    decoupled = manifest.decoupled_mode is not False if args.decoupled is None else args.decoupled
    options = ServerOptions(
        http_address=doors.ip("http"),
        grpc_address=doors.ip("grpc"),
        metrics_address=doors.ip("metrics"),
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        metrics_port=args.metrics_port,
        max_num_seqs=args.max_num_seqs,
        max_num_tokens=args.max_num_tokens,
        max_seq_len=args.max_seq_len,
        kv_cache_gib=args.kv_cache_gib,
        enable_prefix_cache=not args.no_prefix_cache,
        decoupled=decoupled,
        exclude_input=args.exclude_input_in_output,
        wrap_token_ids=args.wrap_token_ids,
        stream_interval=args.stream_interval,
        **speculation,
        max_queue_size=args.max_queue_size,
        max_request_bytes=args.max_request_bytes,
        drain_timeout_s=args.drain_timeout,
        control_apis=args.control_apis,
        log_format=args.log_format,
        log_level=args.log_level.upper(),
        log_file=args.log_file,
    )
    if args.openai and not decoupled:
        raise KvforgeError("--openai streams every answer from the engine: give --decoupled, or leave out --openai")
    check_speculation(options.speculative, options.early_exit_threshold, manifest, options.early_exit_prompts)
    if options.speculative is not None and options.speculative.draft_engine is not None:
        load_manifest(options.speculative.draft_engine)
    sampling = sampling_defaults(args, engine / TOKENIZER_DIR) if args.openai else None
    sink = LogSink(args.log_file or STDERR, args.log_format)
    canary = Canary(args.canary_period) if args.canary_period > 0 else None
    policy = RestartPolicy(0 if args.no_restart else args.max_restarts, args.restart_window)
    with log_to(sink, options.log_level), StopSignals() as signals:
        gateway = GatewayProcess(_gateway_options(args, doors, name), sink) if args.openai else None
        supervisor = Supervisor(engine, options, signals, policy, canary, gateway)
        health = HealthServer(
            doors.ip("health"),
            args.health_port,
            lambda: {**supervisor.report(), "open_without_key": doors.open_without_key},
        )

        def announce(server: TritonServer) -> None:
            if canary is not None:
                canary.start(server.http_url)
            ports = {**server.ports, "health": health.port, **({} if gateway is None else {"openai": gateway.port})}
            where = doors.listening(ports)
            print(f"kvforge: serving {args.engine} as model 'ensemble': {where} (Ctrl-C stops)", flush=True)
            if args.open_page and gateway is not None:
                page = doors.page(gateway.port)
                print(f"kvforge: the page is {page}", flush=True)
                open_on_desktop(page)
            if sampling is not None:
                print(f"kvforge: OpenAI requests that do not say are sampled with {sampling}", flush=True)
            if (warning := doors.warning()) is not None:
                print(f"kvforge: warning: {warning}", flush=True)

        def draining() -> None:
            print(
                f"kvforge: stopping; accepted requests have {options.drain_timeout_s:g} s to finish "
                "(Ctrl-C again ends them)",
                flush=True,
            )

        try:
            supervisor.run(announce, draining)
        finally:
            if canary is not None:
                canary.close()
            health.close()
    return 0


def open_on_desktop(url: str) -> None:
    """Open ``url`` in a browser of the desktop, where there is one; browsers of the terminal would take it from the
    server."""
    if any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(url)


def _engine(args: argparse.Namespace, predicts: bool) -> tuple[Path, str | None]:
    """Return the engine directory, and what to call the model where that directory does not say it. ``predicts``: the
    options are for an engine with a predictor.

    Raises:
        CheckpointError, BuildError: a checkpoint that there is not or that cannot be built.
        KvforgeError: options of a build for an engine, of a predictor for a checkpoint, or nothing of this name.
    """
    given = given_options(args)
    if names_checkpoint(args.engine, args.revision):
        if predicts:
            raise KvforgeError(
                f"{args.engine} is a checkpoint, and --exact-first, --exact-last and --exact-share are for an engine "
                "with a predictor: build one with kvforge build --kv-prediction, or leave them out."
            )
        from kvforge.compiler import BuildOptions
        from kvforge.engine_cache.build import cached_engine

        options = BuildOptions(**given)
        cached = cached_engine(args.engine, options, revision=args.revision, display=display_of(args))
        return cached.path, cached.name
    check_is_there(args.engine)
    for name, value in given.items():
        if name not in LIMITS:
            words = flag_of(name) if isinstance(value, bool) else f"{flag_of(name)} {shlex.quote(str(value))}"
            raise KvforgeError(
                f"{args.engine} is a built engine; {flag_of(name)} is fixed when building. Rebuild with "
                "kvforge build CHECKPOINT -o ENGINE "
                f"{words}."
            )
    return args.engine, None


def _gateway_options(args: argparse.Namespace, doors: Doors, name: str | None) -> "GatewayOptions":
    from kvforge.gateway import GatewayOptions

    return GatewayOptions(
        address=doors.ip("openai"),
        port=args.openai_port,
        model_name=args.served_model_name or name,
        chat_template=args.chat_template,
        tool_call_format=args.tool_call_format,
        reasoning_format=args.reasoning_format,
        generation_config=args.generation_config,
        **{name: getattr(args, name) for name in DEFAULT_FIELDS},
        api_key_file=args.api_key_file,
        no_page=args.no_page,
        max_seq_len=args.max_seq_len,
        drain_timeout=args.drain_timeout,
        log_format=args.log_format,
        log_level=args.log_level,
    )
