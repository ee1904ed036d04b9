"""The sequences of one request while they grow: tokens from Triton in, certain text out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvforge.gateway.model import ServedModel
from kvforge.gateway.tensors import Piece, infer_request
from kvforge.gateway.triton import Triton
from kvforge.runtime.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.sampling_params import SamplingParams
from kvforge.runtime.text_stream import TextStream

TOKENS_AT_ONCE = 128
"""Tokens turned to text before other requests get their turn."""
MAX_WAITING = 8
"""Pieces per prompt that may wait for the client when several prompts share an answer."""


@dataclass(frozen=True)
class Delta:
    """News of choice `index`: its new text, certain and whole characters only, and the new tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: Any


@dataclass
class Usage:
    """Tokens of a request; `cached` is what the prefix cache spared, None where the engine did not say."""

    prompt: int
    completion: int = 0
    cached: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.cached, self.prompt)}
        return usage


@dataclass
class Generation:
    """`prompts` with the same parameters; choice `p * n + s` is sequence `s` of prompt `p`.

    `usage` grows while `deltas` is read; its cached tokens are asked for with `cache_stats`.
    """

    triton: Triton
    model: ServedModel
    request_id: str
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    streaming: bool
    cache_stats: bool = True
    timeout_s: float | None = None
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(sum(len(prompt) for prompt in self.prompts))

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """All news until every sequence has ended. Raises ApiError. Closing it cancels what runs."""
        pieces = self._pieces(0) if len(self.prompts) == 1 else self._merged()
        tokenizer = self.model.tokenizer
        streams = [TextStream(tokenizer, self.params, prompt) for prompt in self.prompts for _ in range(self.params.n)]
        async with contextlib.aclosing(pieces):
            async for index, piece in pieces:
                text = await self._text(streams[index], piece)
                self.usage.completion += len(piece.token_ids)
                yield Delta(index, text, piece.token_ids, self._logprobs(piece), piece.finish_reason, piece.stop_reason)

    async def _pieces(self, position: int) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of one prompt, each with its choice."""
        request = infer_request(
            f"{self.request_id}.{position}",
            self.prompts[position],
            self.params,
            self.model.manifest.vocab_size,
            self.streaming,
            self.cache_stats,
            self.timeout_s,
        )
        reused = None
        async with contextlib.aclosing(self.triton.generate(request)) as pieces:
            async for piece in pieces:
                if piece.reused_blocks is not None:
                    reused = max(reused or 0, piece.reused_blocks)
                yield position * self.params.n + piece.sequence, piece
        if reused is not None:
            self.usage.cached = (self.usage.cached or 0) + reused * self.model.manifest.page_size

    async def _merged(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of all prompts as they come; the first error ends all."""
        queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue(MAX_WAITING * len(self.prompts))

        async def follow(position: int) -> None:
            try:
                async with contextlib.aclosing(self._pieces(position)) as pieces:
                    async for item in pieces:
                        await queue.put(item)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.ensure_future(follow(position)) for position in range(len(self.prompts))]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _text(self, stream: TextStream, piece: Piece) -> str:
        """The text that a piece makes certain, made in slices where it is long."""
        texts = []
        tokens = piece.token_ids
        while len(tokens) > TOKENS_AT_ONCE + self._longest_stop_word:
            texts.append(stream.push(SequenceOutput("", 0, tokens[:TOKENS_AT_ONCE])))
            tokens = tokens[TOKENS_AT_ONCE:]
            await asyncio.sleep(0)
        texts.append(stream.push(_output(tokens, piece)))
        return "".join(texts)

    @property
    def _longest_stop_word(self) -> int:
        return max((len(word) for word in self.params.stop_words_ids), default=0)

    def _logprobs(self, piece: Piece) -> list[TokenLogprobs] | None:
        if self.params.logprobs is None:
            return None
        top = piece.top or [{} for _ in piece.token_ids]
        return [
            TokenLogprobs(token, value, 0, most)
            for token, value, most in zip(piece.token_ids, piece.log_probs, top, strict=True)
        ]


def _output(tokens: list[int], piece: Piece) -> SequenceOutput:
    reason = tuple(piece.stop_reason) if isinstance(piece.stop_reason, list) else piece.stop_reason
    output = SequenceOutput("", 0, tokens, finished=piece.finish_reason is not None, stop_reason=reason)
    output.finish_reason = piece.finish_reason  # type: ignore[assignment]
    return output
