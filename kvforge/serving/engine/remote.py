"""An engine that runs in a process of its own, with the methods of ``kvforge.runtime.LLMEngine``.

It is for programs that have an engine to themselves (``LLM``, ``AsyncLLM``, ``kvforge bench``) where that engine is of
target ``vllm`` and so of another interpreter. Triton's stub has ``EngineClient``, which starts a dead process again.
"""

import dataclasses
import os
import socket
import subprocess
import weakref
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

from kvforge.common.errors import EngineError, RequestError, refusal_of
from kvforge.common.records import to_text
from kvforge.common.refusals import Refusal
from kvforge.manifest import TOKENIZER_DIR, load_manifest
from kvforge.runtime.admission import check_request
from kvforge.runtime.config import RuntimeConfig, resolve_config
from kvforge.runtime.guides.shared import shared_judge
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import NEEDS_TOKENIZER, GuidedDecoding, guide_error
from kvforge.runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.requests.sequence import FinishReason, RequestMetrics
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.engine.command import process_command
from kvforge.serving.engine.output_rows import from_row
from kvforge.serving.engine.protocol import BLOB, Message, encode, receive
from kvforge.serving.options import EngineOptions
from kvforge.vllm_engine.params import check_honoured
from kvforge.workers import WorkersUnavailable

CLOSE_S = 10.0


class RemoteEngine:
    """An engine directory of target ``vllm``. Takes the keyword arguments of ``LLMEngine`` that its process takes. Not
    thread-safe: call it from one thread.

    Raises:
        EngineError: the engine cannot be loaded, a limit is above the engine's, or an option is for other targets.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        kv_cache_gib: float | None = None,
        num_pages: int | None = None,
        enable_prefix_cache: bool = True,
        max_num_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_seq_len: int | None = None,
        **others: Any,
    ) -> None:
        for name, value in others.items():
            if value is not None and value is not False:
                raise EngineError(
                    f"{name} is for kvforge's own engines, and {engine_dir} is of target vllm; leave it out."
                )
        engine_dir = Path(engine_dir)
        self.manifest = load_manifest(engine_dir)
        self.tokenizer = Tokenizer.from_dir(engine_dir / TOKENIZER_DIR)
        if num_pages is not None and kv_cache_gib is None:
            kv_cache_gib = num_pages * self.manifest.page_bytes / 2**30
        limits: dict[str, Any] = {
            "max_num_tokens": max_num_tokens,
            "max_num_seqs": max_num_seqs,
            "max_seq_len": max_seq_len,
        }
        self.guides = JudgedGuides(self.tokenizer, self.manifest.eos_token_ids)
        self._open: dict[str, tuple[SamplingParams, int]] = {}
        self._num_steps = 0
        options = EngineOptions(**limits, kv_cache_gib=kv_cache_gib, enable_prefix_cache=enable_prefix_cache)
        command = process_command(engine_dir.resolve(), self.manifest.target)
        self._start([*command, "--options", to_text(options), "--server-pid", str(os.getpid())])
        self._stats = self._ready()["stats"]
        self.config: RuntimeConfig = resolve_config(
            self.manifest, 0, num_pages=self._stats["num_pages"], enable_prefix_cache=enable_prefix_cache, **limits
        )

    def _start(self, command: list[str]) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        with theirs:
            full = [*command, "--socket-fd", str(theirs.fileno())]
            try:
                process = subprocess.Popen(full, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            except OSError as error:
                ours.close()
                raise EngineError(f"the engine process cannot be started: {error}.") from None
        self._process = process
        self._closer = weakref.finalize(self, _close, ours, process)

    def _ready(self) -> Message:
        message = self._receive()
        if message["op"] == "failed":
            self.close()
            raise EngineError(message["error"])
        return message

    def close(self) -> None:
        """End the process. Idempotent; it ends with this object, too."""
        self._closer()

    def add_request(
        self, request_id: str, prompt_token_ids: SequenceOf[int], params: SamplingParams, guide: Any = None
    ) -> None:
        """As ``LLMEngine.add_request``. Raises RequestError for what is wrong with it, or that vLLM does not have."""
        if request_id in self._open:
            raise RequestError(f"request id {request_id!r} is in use", "give another")
        check_honoured(params)
        prompt = check_request(prompt_token_ids, params, self.config, self.tokenizer).prompt.tolist()
        if params.guided_decoding is not None and guide is None:
            self.guides.compile(params.guided_decoding)
        self._send({"op": "add", "id": request_id, "prompt": prompt, "params": _fields(params)})
        self._open[request_id] = params, params.n

    def abort(self, request_id: str) -> bool:
        """Give up a request, without further output; False if it is not there."""
        if self._open.pop(request_id, None) is None:
            return False
        self._send({"op": "abort", "id": request_id})
        return True

    def has_unfinished(self) -> bool:
        """Requests are waiting or running."""
        return bool(self._open)

    @property
    def num_iterations(self) -> int:
        """Calls of ``step``."""
        return self._num_steps

    def stats(self) -> dict[str, Any]:
        """``LLMEngine.stats()`` of the process, as it last said."""
        return self._stats

    def step(self) -> list[SequenceOutput]:
        """Wait until the process says something; returns what is new of requests.

        Raises:
            EngineError: the process ended.
        """
        self._num_steps += 1
        message = self._receive()
        if message["op"] == "failed":
            raise EngineError(message["error"])
        if message["op"] == "stats":
            self._stats = message["stats"]
        elif message["op"] == "refused" and message["id"] in self._open:
            params, _ = self._open.pop(message["id"])
            refusal = Refusal.from_json(message["refusal"])
            return [
                SequenceOutput(message["id"], i, [], None, True, "error", refusal.words, refusal=refusal)
                for i in range(params.n)
            ]
        elif message["op"] == "tokens":
            blob = message.get(BLOB, b"")
            rows = (from_row(row, blob) for row in message["outputs"])
            return [self._output(row) for row in rows if row.engine_id in self._open]
        return []

    def _output(self, row: Any) -> SequenceOutput:
        params, num_open = self._open[row.engine_id]
        reason: FinishReason | None = row.finish_reason
        if reason is not None:
            self._open[row.engine_id] = params, num_open - 1
            if num_open == 1:
                del self._open[row.engine_id]
        logprobs = None
        if row.log_probs is not None:
            tops = row.top or [([], [])] * len(row.tokens)
            ranks = row.ranks or [0] * len(row.tokens)
            logprobs = [
                TokenLogprobs(token, value, rank, dict(zip(*top, strict=True)))
                for token, value, rank, top in zip(row.tokens, row.log_probs, ranks, tops, strict=True)
            ]
        stop = tuple(row.stop_reason) if isinstance(row.stop_reason, list) else row.stop_reason
        metrics = None if row.metrics is None else RequestMetrics(**row.metrics)
        return SequenceOutput(row.engine_id, row.index, row.tokens, logprobs, reason is not None, reason, stop, metrics)

    def _send(self, message: Message) -> None:
        try:
            self._sock.sendall(encode(message))
        except OSError as error:
            raise EngineError(f"the engine process ended ({error}); start it again.") from None

    def _receive(self) -> Message:
        try:
            message = receive(self._sock)
        except OSError:
            message = None
        if message is None:
            self.close()
            raise EngineError(f"the engine process ended unexpectedly (status {self._process.poll()}); start it again.")
        return message


class JudgedGuides:
    """Guides are judged here, and compiled by the process."""

    def __init__(self, tokenizer: Tokenizer | None, eos_token_ids: SequenceOf[int]) -> None:
        self._tokenizer, self._eos_token_ids = tokenizer, eos_token_ids

    def known(self, guided: GuidedDecoding) -> None:
        """None: whether the process compiles it quickly is not known here."""

    def compile(self, guided: GuidedDecoding, verdict: Verdict | None = None) -> Verdict:
        """Return the verdict. Raises RequestError where it refuses the guide, or nobody can judge."""
        if verdict is not None:
            verdict.accepted()
            return verdict
        if self._tokenizer is None:
            raise RequestError.of(NEEDS_TOKENIZER)
        try:
            verdict = shared_judge(self._tokenizer, self._eos_token_ids).submit(guided).result()
        except WorkersUnavailable as error:
            raise guide_error(f"cannot be used now: {refusal_of(error).reason}") from None
        assert verdict is not None
        verdict.accepted()
        return verdict


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The parameters that are not as they are where nothing is said, as JSON's data."""
    plain = SamplingParams()
    fields = {item.name: getattr(params, item.name) for item in dataclasses.fields(params)}
    given = {name: value for name, value in fields.items() if value != getattr(plain, name)}
    if params.guided_decoding is not None:
        given["guided_decoding"] = dataclasses.asdict(params.guided_decoding)
    return given


def _close(sock: socket.socket, process: subprocess.Popen) -> None:
    """The process ends when its socket does."""
    sock.close()
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
