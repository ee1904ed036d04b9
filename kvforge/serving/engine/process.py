"""The engine in a process of its own: `python -m kvforge.serving.engine.process ENGINE --socket-fd N`.

Three threads: a reader turns socket bytes into commands, the main thread runs `LLMEngine.step()` and is the
only one to touch the engine, a writer sends what it produced. The process ends when its parent does.
"""

import argparse
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvforge.common.errors import EngineReplacedError, KvforgeError, RequestError, first_line, let_end
from kvforge.common.records import from_text
from kvforge.common.refusals import Refusal
from kvforge.manifest import check_not_replaced, target_of
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.interface import Engine, WatchedEngine
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from kvforge.serving.engine.allowance import Pulse
from kvforge.serving.engine.guide_thread import COMPILED, GUIDE, GuideThread
from kvforge.serving.engine.heartbeat import LOAD_S, Heartbeat
from kvforge.serving.engine.output_rows import Row, blob_bytes, error_row, to_row
from kvforge.serving.engine.protocol import METERED, Message, ProtocolError, encode, receive
from kvforge.serving.logs.request_log import configure
from kvforge.serving.options import EngineOptions
from kvforge.serving.processes.facts import descendants, kill_all
from kvforge.serving.processes.watchdog import end_with_server, exit_with_parent

logger = logging.getLogger("kvforge.engine")

EngineFactory = Callable[[], WatchedEngine]
STATS_PERIOD_S = 0.1
ADD_S = 20.0
"""Above what it takes to add any request, guides that must be compiled included."""
COMMANDS_S = 0.05
"""What adding requests may take between two steps: one with long lists takes 0.1 s."""
WARM_UP_TOKENS = 1024
"""Sequences up to this length find the engine warm; longer ones cost their first steps a little."""
VLLM_LOAD_S = 3600.0
"""For weights of many GPUs, and what vLLM compiles for them."""
MAX_BLOB_BYTES = 64 << 20
"""Logits and the like in one message; far below the protocol's limit, which ends the connection."""


class EngineServer:
    """Runs one engine for one connected stub.

    `make_params` turns the
    `params` of an `add` message into what `add_request` takes, raising RequestError. `pulse` is told what the main
    thread does, and by it the stub; `load_s` is what `make_engine` may take.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_engine: EngineFactory,
        make_params: Callable[[dict], Any],
        pulse: Pulse | None = None,
        load_s: float = LOAD_S,
    ) -> None:
        self._sock = sock
        self._make_engine = make_engine
        self._make_params = make_params
        self._pulse = pulse or Pulse()
        self._load_s = load_s
        self._commands: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._metered: dict[str, int] = {}  # sequences that still run of requests whose every row has metrics
        self._stats: dict[str, Any] = {}
        self._stats_sent_at = 0.0

    def run(self) -> int:
        """Serve until `close` or a closed socket. Returns the exit status."""
        writer = threading.Thread(target=self._write, name="writer", daemon=True)
        writer.start()
        try:
            self._serve()
            status = 0
        except KvforgeError as error:
            self._send({"op": "failed", "error": str(error), "replaced": isinstance(error, EngineReplacedError)})
            status = 1
        except BaseException as error:
            let_end(error)
            logger.exception("the engine stopped on an error")
            self._send({"op": "failed", "error": f"{type(error).__name__}: {error}"})
            status = 1
        self._outgoing.put(None)
        writer.join(timeout=5.0)
        return status

    def _serve(self) -> None:
        self._pulse.may_take(self._load_s)
        engine = self._make_engine()
        engine.watch(self._pulse.begins)
        guides = GuideThread(
            partial(self._known_guide, engine), partial(self._compile_guide, engine), self._commands.put, self._refuse
        )
        threading.Thread(target=self._read, name="reader", daemon=True).start()
        self._send({"op": "ready", "pid": os.getpid(), "stats": engine.stats()})
        while True:
            if not self._handle_commands(engine, guides):
                return
            self._pulse.idles()
            if engine.has_unfinished():
                outputs = engine.step()
                self._pulse.idles()
                self._send_outputs(engine, outputs)
            self._publish_stats(engine)

    def _handle_commands(self, engine: Engine, guides: GuideThread) -> bool:
        """Apply waiting commands, with something to compute for at most COMMANDS_S; with nothing, wait for one. False
        ends the process."""
        block = not engine.has_unfinished()
        until = time.monotonic() + COMMANDS_S
        while True:
            if time.monotonic() > until and engine.has_unfinished():
                return True
            self._pulse.idles()
            try:
                command = self._commands.get(timeout=STATS_PERIOD_S) if block else self._commands.get_nowait()
            except queue.Empty:
                return True
            block = False
            if command["op"] == "close":
                return False
            if command["op"] == "add":
                if guides.is_ready(command):
                    self._add(engine, command)
            elif command["op"] == "abort":
                guides.abort(command["id"])
                engine.abort(command["id"])
                self._metered.pop(command["id"], None)

    def _add(self, engine: Engine, command: Message) -> None:
        self._pulse.may_take(ADD_S)
        try:
            params = self._make_params(command["params"])
            engine.add_request(command["id"], command["prompt"], params, command.get(COMPILED))
            if command.get(METERED):
                self._metered[command["id"]] = params.n
        except RequestError as error:
            self._refuse(command, error.refusal)
        except BaseException as error:  # one request must not end the engine for all others
            let_end(error)
            logger.exception("a request could not be added")
            engine.abort(command["id"])
            self._refuse(command, Refusal("the request failed", operator=first_line(error)))

    def _known_guide(self, engine: Engine, command: Message) -> Any:
        guided = GuidedDecoding.of(command["params"].get("guided_decoding"))
        return None if guided is None else engine.guides.known(guided)

    def _compile_guide(self, engine: Engine, command: Message) -> Any:
        guided = self._make_params(command["params"]).guided_decoding
        return engine.guides.compile(guided, Verdict.from_json(command[GUIDE]))

    def _refuse(self, command: Message, refusal: Refusal) -> None:
        self._send({"op": "refused", "id": command["id"], "refusal": refusal.to_json()})

    def _publish_stats(self, engine: Engine) -> None:
        idle = not engine.has_unfinished()
        if not idle and time.monotonic() - self._stats_sent_at < STATS_PERIOD_S:
            return
        stats = engine.stats()
        if stats != self._stats:
            self._stats, self._stats_sent_at = stats, time.monotonic()
            self._send({"op": "stats", "stats": stats})

    def _send_outputs(self, engine: Engine, outputs: list[Any]) -> None:
        """In one message, or several where arrays make it large."""
        rows: list[Row] = []
        blobs: list[bytes] = []
        size = 0
        for output in outputs:
            num_bytes = blob_bytes(output)
            if num_bytes > MAX_BLOB_BYTES:
                engine.abort(output.request_id)
                rows.append(error_row(output, f"the logits of one step have {num_bytes} bytes, over {MAX_BLOB_BYTES}"))
                continue
            if size and size + num_bytes > MAX_BLOB_BYTES:
                self._send({"op": "tokens", "outputs": rows}, b"".join(blobs))
                rows, blobs, size = [], [], 0
            rows.append(to_row(output, blobs, size, output.request_id in self._metered))
            size += num_bytes
            if output.finished and output.request_id in self._metered:
                self._metered[output.request_id] -= 1
                if not self._metered[output.request_id]:
                    del self._metered[output.request_id]
        if rows:
            self._send({"op": "tokens", "outputs": rows}, b"".join(blobs))

    def _send(self, message: Message, blob: bytes = b"") -> None:
        self._outgoing.put(encode(message, blob))

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outgoing.get()) is not None:
                self._sock.sendall(message)

    def _read(self) -> None:
        try:
            while (command := receive(self._sock)) is not None:
                self._commands.put(command)
        except (OSError, ProtocolError):
            logger.exception("the connection to the server broke")
        # The stub is gone: whatever runs is for nobody, so the process does not outlive it.
        self._commands.put({"op": "close"})
        time.sleep(2.0)
        os._exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvforge.serving.engine.process", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--socket-fd", type=int, required=True, help="inherited end of a Unix socket pair")
    parser.add_argument("--server-pid", type=int, required=True, help="tritonserver, whose end is this one's too")
    parser.add_argument("--heartbeat-fd", type=int, help="inherited memory in which the main thread beats")
    parser.add_argument("--options", type=partial(from_text, EngineOptions), default=EngineOptions())
    parser.add_argument("--vllm", action="store_true", help="the engine is of target vllm, and so is this interpreter")
    args = parser.parse_args(argv)
    options: EngineOptions = args.options
    configure(options.log_format, options.log_level)
    exit_with_parent()
    end_with_server(args.server_pid)

    def check_manifest() -> None:
        if options.manifest_sha256 is not None:
            check_not_replaced(args.engine, options.manifest_sha256)

    def make_engine() -> WatchedEngine:
        check_manifest()  # before all that takes time
        engine = load(args.engine, **options.of_engine())
        check_manifest()  # what was read is not half of one engine and half of another
        return engine

    def make_params(fields: dict) -> Any:
        from kvforge.runtime import SamplingParams

        return SamplingParams(**fields)

    sock = socket.socket(fileno=args.socket_fd)
    pulse = Pulse() if args.heartbeat_fd is None else Pulse(Heartbeat(args.heartbeat_fd).beat)
    load, load_s = (_load_vllm, VLLM_LOAD_S) if args.vllm else (_load_own, LOAD_S)
    status = EngineServer(sock, make_engine, make_params, pulse, load_s).run()
    if args.vllm:  # what vLLM does at a common exit waits for its ranks, of which one may wait for another that is dead
        kill_all(descendants(os.getpid()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _load_own(engine_dir: str, **options: Any) -> WatchedEngine:
    target_of(engine_dir)  # what is no engine is refused before torch is read, which takes seconds
    from kvforge.runtime import LLMEngine

    engine = LLMEngine(engine_dir, **options)
    engine.runner.warm_up(min(WARM_UP_TOKENS, engine.config.max_seq_len), engine.config.max_num_seqs)
    engine.guides.prepare()
    return engine


def _load_vllm(engine_dir: str, **options: Any) -> WatchedEngine:
    from kvforge.vllm_engine.engine import load_engine

    return load_engine(engine_dir, **options)


if __name__ == "__main__":
    sys.exit(main())
