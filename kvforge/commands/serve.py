"""`kvforge serve ENGINE`: a Triton server for one engine, until it is interrupted."""

import argparse
import dataclasses
import os
import sys
import webbrowser
from pathlib import Path

from kvforge.commands.engine_argument import add_engine_argument, engine_of
from kvforge.commands.parsers import add_always_on, add_command, add_kv_cache, add_threads, display_of
from kvforge.commands.serve_doors import add_door_options, choose_doors
from kvforge.commands.serve_gateway import add_gateway_options, choose_gateway, gateway_options, is_decoupled
from kvforge.commands.start_notes import StartNotes
from kvforge.common.errors import KvforgeError
from kvforge.gateway.options import GatewayOptions, add_option
from kvforge.manifest import load_manifest
from kvforge.runtime.async_scheduling import add_async_scheduling, check_async_scheduling
from kvforge.runtime.prefixes.options import PrefixOptions, add_prefix_options
from kvforge.runtime.speculation.config import check_speculation
from kvforge.runtime.speculation.options import add_speculation_options, speculation_options
from kvforge.serving.server.options import RestartPolicy, ServerOptions

MINIMUM = {
    "max_queue_size": 0,
    "stream_interval": 0,
    "max_request_bytes": 1024,
    "drain_timeout": 0,
    "max_restarts": 0,
    "restart_window": 0,
    "canary_period": 0,
}
OF_SERVER = (
    "http_port", "grpc_port", "metrics_port", "max_num_seqs", "max_num_tokens", "max_seq_len", "kv_cache_gib",
    "prefix_dir", "prefix_gib", "prefix_host_gib", "snapshot_every", "num_snapshots", "wrap_token_ids",
    "stream_interval", "max_queue_size", "max_request_bytes", "control_apis", "log_format", "log_file",
    "async_scheduling",
)  # fmt: skip
"""Fields of ServerOptions that are options of the same name."""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    parser = add_command(
        subparsers,
        "serve",
        help="serve an engine, or a checkpoint, behind Triton Inference Server",
        example="kvforge serve ENGINE --kv-cache-gib 8",
    )
    add_engine_argument(parser)
    add_door_options(parser)
    parser.add_argument("--max-num-seqs", type=int, help="sequences a step at most (default: the engine's)")
    parser.add_argument("--max-num-tokens", type=int, help="tokens a step at most (default: the engine's)")
    parser.add_argument("--max-seq-len", type=int, help="tokens a sequence at most (default: the engine's)")
    add_kv_cache(parser)
    prefixes = parser.add_mutually_exclusive_group()
    prefixes.add_argument("--no-prefix-cache", action="store_true", help="do not reuse pages of equal prompt starts")
    add_always_on(prefixes, parser)
    add_prefix_options(parser)
    add_threads(parser)
    add_speculation_options(parser)
    add_async_scheduling(parser)
    parser.add_argument(
        "--max-queue-size", type=int, default=ServerOptions.max_queue_size, help="sequences that may wait"
    )
    parser.add_argument(
        "--max-request-bytes", type=int, default=ServerOptions.max_request_bytes, help="a request's tensors at most"
    )
    parser.add_argument(
        "--drain-timeout", type=float, default=GatewayOptions.drain_timeout, metavar="S",
        help="seconds that accepted requests get to finish when the server is told to stop",
    )  # fmt: skip
    parser.add_argument(
        "--decoupled", action=argparse.BooleanOptionalAction,
        help="--no-decoupled: one response a request and no streaming, for clients that call infer() (default: as the "
        "engine was built, with streaming unless its recipe says otherwise)",
    )  # fmt: skip
    parser.add_argument(
        "--stream-interval", type=int, default=ServerOptions.stream_interval, metavar="N",
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
    add_gateway_options(parser)
    restarts = parser.add_mutually_exclusive_group()
    restarts.add_argument("--no-restart", action="store_true", help="end when a process dies, instead of restarting")
    restarts.add_argument(
        "--max-restarts", type=int, default=RestartPolicy.max_restarts, help="within the window, then give up"
    )
    parser.add_argument("--restart-window", type=float, default=RestartPolicy.window_s, metavar="S", help="seconds")
    parser.add_argument(
        "--canary-period", type=float, default=0.0, metavar="S",
        help="a request of one token every S seconds; unanswered, the server is not ready (default: 0, none)",
    )  # fmt: skip
    parser.add_argument(
        "--control-apis", action="store_true",
        help="leave Triton's shared-memory, repository, trace and logging endpoints open to all clients",
    )  # fmt: skip
    parser.add_argument("--log-file", type=Path, help="append the log here; -: standard error (default: keep none)")
    add_option(parser, "log_format")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"),
        help="what is logged at least; info has a line for each request (default: info on a terminal, else warning)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal to stop. Raises KvforgeError when it cannot start or its processes die too often."""
    from kvforge.gateway.http.auth import ApiKeys
    from kvforge.gateway.http.process import GatewayProcess
    from kvforge.gateway.model import ServedModel
    from kvforge.serving.health.canary import Canary
    from kvforge.serving.health.server import HealthServer
    from kvforge.serving.logs.pump import STDERR, LogSink, log_to
    from kvforge.serving.processes.service_manager import ServiceManager
    from kvforge.serving.server.launcher import TritonServer
    from kvforge.serving.server.stop_signals import StopSignals
    from kvforge.serving.server.supervisor import Supervisor

    speculation = speculation_options(args)
    if args.log_level is None:
        args.log_level = "info" if sys.stderr.isatty() else "warning"
    for option, minimum in MINIMUM.items():
        if not getattr(args, option) >= minimum:  # NaN too
            raise KvforgeError(f"--{option.replace('_', '-')} is {getattr(args, option)}: give {minimum} or more")
    no_gateway = choose_gateway(args)
    has_key = args.openai and bool(ApiKeys.read(args.api_key_file))
    doors = choose_doors(args, has_key)
    doors.check_ports()  # before an engine is built or loaded, which takes long
    manager = ServiceManager()
    manager.status("finding the engine, or building it")
    engine, name = engine_of(args, predicts="exact_tokens" in speculation)
    manifest = load_manifest(engine)
    options = ServerOptions(
        http_address=doors.ip("http"),
        grpc_address=doors.ip("grpc"),
        metrics_address=doors.ip("metrics"),
        enable_prefix_cache=not args.no_prefix_cache,
        decoupled=is_decoupled(args, manifest),
        exclude_input=args.exclude_input_in_output,
        drain_timeout_s=args.drain_timeout,
        log_level=args.log_level.upper(),
        **{name: getattr(args, name) for name in OF_SERVER},
        **speculation,
    )
    PrefixOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(PrefixOptions)}).check(
        manifest, options.enable_prefix_cache
    )
    check_speculation(options.speculative, options.early_exit_threshold, manifest, options.early_exit_prompts)
    if options.async_scheduling:
        taken = ("speculative", "early_exit_threshold", "prefix_dir", "prefix_host_gib")
        check_async_scheduling(manifest, manifest.target == "cuda", **{name: getattr(options, name) for name in taken})
    if options.speculative is not None and options.speculative.draft_engine is not None:
        load_manifest(options.speculative.draft_engine)
    served_name = sampling = None
    of_gateway = gateway_options(args, doors, name) if args.openai else None
    if of_gateway is not None:  # before the engine is loaded: the gateway would refuse the same, later
        opened = ServedModel.load(dataclasses.replace(of_gateway, engine=engine))
        served_name, sampling = opened.name, opened.sampling
        del opened  # its tokenizer is the gateway's to keep
    sink = LogSink(args.log_file or STDERR, args.log_format)
    canary = Canary(args.canary_period) if args.canary_period > 0 else None
    policy = RestartPolicy(0 if args.no_restart else args.max_restarts, args.restart_window)
    with log_to(sink, options.log_level), StopSignals() as signals:
        gateway = None if of_gateway is None else GatewayProcess(of_gateway, sink)
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
            notes.close()
            model = "'ensemble'" if served_name is None else f"{served_name!r} (Triton's is 'ensemble')"
            print(
                f"kvforge: serving {args.engine} as model {model}, after {notes.seconds:.1f} s (Ctrl-C stops)",
                flush=True,
            )
            if gateway is not None and not args.no_page:
                page = doors.page(gateway.port)
                print(f"kvforge: page {page}", flush=True)
                if args.open_page:
                    open_on_desktop(page)
            for line in doors.listening(ports):
                print(f"kvforge: {line}", flush=True)
            if no_gateway is not None:
                print(f"kvforge: no OpenAI API: {no_gateway}", flush=True)
            if sampling is not None:
                print(f"kvforge: OpenAI requests that do not say are sampled with {sampling}", flush=True)
            if (warning := doors.warning()) is not None:
                print(f"kvforge: warning: {warning}", flush=True)
            manager.ready()
            manager.follow(supervisor.report)

        def draining() -> None:
            manager.stopping(f"accepted requests have {options.drain_timeout_s:g} s to finish")
            print(
                f"kvforge: stopping; accepted requests have {options.drain_timeout_s:g} s to finish "
                "(Ctrl-C again ends them)",
                flush=True,
            )

        parts = "the engine, Triton and the gateway" if args.openai else "the engine and Triton"
        manager.status(f"starting {parts}")
        notes = StartNotes(display_of(args), parts)
        try:
            supervisor.run(announce, draining)
        except KvforgeError as error:
            manager.status(str(error))
            raise
        finally:
            manager.close()
            notes.close()
            if canary is not None:
                canary.close()
            health.close()
    return 0


def open_on_desktop(url: str) -> None:
    """Open ``url`` in a browser of the desktop, where there is one; browsers of the terminal would take it from the
    server."""
    if any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY")):
        webbrowser.open(url)
