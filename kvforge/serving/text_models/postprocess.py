"""The `postprocessing` model: token ids to text, and the ensemble's watch for clients that went away.

Triton's ensemble scheduler does not tell the engine step about a cancel, but a postprocessing step scheduled
after it is cancelled. Every response of a request passes here, heartbeats included, and goes back to the stub
as an ack (stub/acks.py), which carries what a look at the request every WATCH_PERIOD_S finds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvforge.common.errors import RequestError
from kvforge.runtime.text.detokenizer import Detokenizer
from kvforge.runtime.text.tokenizer import Tokenizer
from kvforge.serving.contract.response_fields import FINAL, HEARTBEAT, SEQUENCE_END
from kvforge.serving.contract.stream_keys import StreamKeys
from kvforge.serving.text_models.preprocess import load_tokenizer

WATCH_PERIOD_S = 0.05
FORGET_AFTER_S = 600.0
MAX_IDLE_STREAMS = 1024


@dataclass
class Stream:
    """One request passing through: a detokenizer per generated sequence."""

    detokenizers: dict[int, Detokenizer] = field(default_factory=dict)
    last_seen: float = 0.0
    last_watched: float = 0.0


@dataclass(frozen=True)
class Processed:
    """What became of a response: its texts, [B * beams] of bytes objects, or None to send nothing.

    `ack` is the stream key to acknowledge, None for a direct caller's request; `sequence` is the number of the
    sequence in its stream, `final` says that the stream has ended. With an `error` there is no text, and the request
    is over.
    """

    text: np.ndarray | None
    ack: int | None = None
    cancelled: bool = False
    sequence: int = 0
    final: bool = False
    error: str | None = None


class Postprocessor:
    """Keeps the streams by key. Threads may share it when no two have responses of one stream."""

    def __init__(self, tokenizer: Tokenizer, keys: StreamKeys) -> None:
        self._tokenizer = tokenizer
        self._keys = keys
        self._streams: dict[int, Stream] = {}

    def run(
        self,
        tokens: np.ndarray | None,
        lengths: np.ndarray | None,
        state: np.ndarray | None,
        is_cancelled: Callable[[], bool],
    ) -> Processed:
        """Process one response of the engine.

        `tokens` [B, beams, n] int32, `lengths` [B, beams] int32, `state` [1, m] int64 (see stub/responses.py). With
        a state, text comes out piece by piece: a character whose last byte is missing waits for it. Without
        one (a direct caller), every row is a whole text. Raises RequestError, naming the tensor.
        """
        if tokens is None or lengths is None:
            raise RequestError("input tensors 'TOKENS_BATCH' and 'SEQUENCE_LENGTH' are needed")
        _check(tokens, lengths)
        if state is None:
            return Processed(self._whole_texts(tokens, lengths))
        if state.size < 3 or lengths.size != 1 or state.reshape(-1)[[0, *range(3, state.size)]].min() < 0:
            raise RequestError("input tensor 'STREAM_STATE' is not what tensorrt_llm sends with one stream")
        key, sequence, flags, *context = state.reshape(-1).tolist()
        if not self._keys.is_valid(key):
            raise RequestError("input tensor 'STREAM_STATE' is for the ensemble's own use; leave it out")
        stream = self._stream(key)
        cancelled = self._is_cancelled(stream, is_cancelled)
        if flags & HEARTBEAT:
            return Processed(None, key, cancelled)
        try:
            if sequence not in stream.detokenizers:
                stream.detokenizers[sequence] = Detokenizer(self._tokenizer, context)
            detokenizer = stream.detokenizers[sequence]
            text = "".join(map(detokenizer.push, tokens.reshape(-1)[: int(lengths.reshape(-1)[0])].tolist()))
            if flags & SEQUENCE_END:
                text += detokenizer.flush()
        except RequestError as error:
            self._streams.pop(key, None)
            return Processed(None, key, cancelled=True, sequence=sequence, final=True, error=str(error))
        if flags & FINAL:
            self._streams.pop(key, None)
        output = np.array([text.encode()], dtype=np.object_)
        return Processed(output, key, cancelled, sequence, bool(flags & FINAL))

    def _stream(self, key: int) -> Stream:
        now = time.monotonic()
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_IDLE_STREAMS:
                self._forget_idle(now)
            stream = self._streams[key] = Stream()
        stream.last_seen = now
        return stream

    def _forget_idle(self, now: float) -> None:
        """Drop streams that ended in an error of another model, which never passes here."""
        for key in [k for k, s in list(self._streams.items()) if now - s.last_seen > FORGET_AFTER_S]:
            self._streams.pop(key, None)

    def _is_cancelled(self, stream: Stream, look: Callable[[], bool]) -> bool:
        """Look no more often than needed: a look costs 60 µs and postprocessing is serial."""
        if stream.last_seen - stream.last_watched < WATCH_PERIOD_S:
            return False
        stream.last_watched = stream.last_seen
        return look()

    def _whole_texts(self, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows = zip(tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1).tolist(), strict=True)
        texts = [self._tokenizer.decode(row[:length].tolist()).encode() for row, length in rows]
        return np.array(texts, dtype=np.object_)


def make_postprocessor(parameters: dict[str, str]) -> Postprocessor:
    """From the parameters of a model's config.pbtxt. Raises EngineError when there is no tokenizer."""
    keys = StreamKeys(Path(parameters["ack_socket"]).parent)
    tokenizer = load_tokenizer(parameters["tokenizer_dir"], parameters.get("manifest_sha256"))
    return Postprocessor(tokenizer, keys)


def _check(tokens: np.ndarray, lengths: np.ndarray) -> None:
    if tokens.ndim != 3 or tokens.shape[:2] != lengths.shape:
        raise RequestError(
            f"input tensor 'SEQUENCE_LENGTH' has shape {list(lengths.shape)}, which does not fit "
            f"'TOKENS_BATCH' of shape {list(tokens.shape)}"
        )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > tokens.shape[2]:
        raise RequestError(f"input tensor 'SEQUENCE_LENGTH' must be 0 to {tokens.shape[2]}")
    if tokens.min(initial=0) < 0:
        raise RequestError("input tensor 'TOKENS_BATCH' has a token id below 0")
