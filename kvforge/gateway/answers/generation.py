"""The sequences of one request while they grow: tokens from Triton in, certain text out."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.gateway.answers.left_header import left_header, left_tools_header
from kvforge.gateway.answers.reasoning_tokens import reasoning_tokens
from kvforge.gateway.client_words import GUIDE
from kvforge.gateway.engine.tensors import ResponseTokens, infer_request
from kvforge.gateway.engine.triton import Triton
from kvforge.gateway.errors import ApiError
from kvforge.gateway.languages.marked_text import MarkedText
from kvforge.gateway.model import ServedModel
from kvforge.gateway.parsed_request import ParsedRequest
from kvforge.runtime.requests.outputs import SequenceOutput, TokenLogprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.stream import TextStream

TOKENS_AT_ONCE = 64
"""Tokens turned to text before other requests get their turn."""
LOGPROBS_AT_ONCE = 512
"""The same of log-probabilities that are written."""
MAX_WAITING = 8
"""Pieces per prompt that may wait for the client when several prompts share an answer."""


@dataclass(frozen=True)
class Delta:
    """News of choice `index`: its new text, certain and whole characters only, and the new tokens'
    log-probabilities. `more`: the next delta is of the same response. `prompt`: log-probabilities of the prompt's next
    tokens, from the second one on; all of them come before anything else."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: Any
    more: bool
    prompt: list[TokenLogprobs] | None = None


@dataclass
class Usage:
    """Tokens of a request; `cached` is what the prefix cache spared, None where the engine did not say, `reasoning`
    those of the completion that are reasoning, None where they are not counted."""

    prompt: int
    completion: int = 0
    cached: int | None = None
    reasoning: int | None = None

    @property
    def body(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
        }
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": min(self.cached, self.prompt)}
        if self.reasoning is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning}
        return usage


@dataclass
class Generation:
    """Prompts with the same parameters; choice `p * n + s` is sequence `s` of prompt `p`.

    `usage` grows while `deltas` is read; `left` (see ParsedRequest) is certain with the first of them.
    """

    triton: Triton
    model: ServedModel
    request_id: str
    asked: ParsedRequest
    draft_scope: str = ""
    usage: Usage = field(init=False)
    left: dict[str, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.asked.left
        self._reasoning_tokens = reasoning_tokens(self.asked.thinking, self.model.token_bytes.is_blank)
        self.usage = Usage(self.asked.num_prompt_tokens, reasoning=None if self._reasoning_tokens is None else 0)

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Those of the answer."""
        return [*left_header(self.left), *left_tools_header(self.asked.left_tools)]

    @property
    def num_choices(self) -> int:
        return len(self.asked.prompts) * self.asked.n

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """All deltas until every sequence has ended, a bounded number of tokens at a time; between the deltas of one
        response others get their turn. Raises ApiError. Closing it cancels what runs."""
        if self.asked.empty and self.asked.prompt_logprobs is None:
            for index in range(self.num_choices):
                yield Delta(index, "", None, "length", None, False)
            return
        pieces = self._pieces(0) if len(self.asked.prompts) == 1 else self._merged()
        streams: dict[int, TextStream | MarkedText] = {}
        async with contextlib.aclosing(pieces):
            async for index, piece in pieces:
                if index not in streams:
                    streams[index] = self._text_stream(index // self.asked.n)
                for delta in self._slices(index, piece, streams[index]):
                    yield delta
                    if delta.more:
                        await asyncio.sleep(0)

    def _text_stream(self, position: int) -> TextStream | MarkedText:
        params = SamplingParams(stop=self.asked.stop)
        prompt = memoryview(self.asked.prompts[position]).cast("i")
        if marks := self.asked.marks(self.model.marks):
            shown = self.model.shown_marks & marks.keys() if params.stop else frozenset()
            return MarkedText(lambda: TextStream(self.model.tokenizer, params, prompt), marks, shown)
        return TextStream(self.model.tokenizer, params, prompt)

    def _slices(self, index: int, piece: ResponseTokens, stream: TextStream | MarkedText) -> Iterator[Delta]:
        """The deltas of one response. Raises ApiError."""
        if piece.prompt:
            yield from self._prompt_slices(index, piece)
        if self.asked.empty:
            if piece.finish_reason is not None:
                yield Delta(index, "", None, "length", None, False)
            return
        num_logprobs = self.asked.logprobs
        size = TOKENS_AT_ONCE if num_logprobs is None else min(TOKENS_AT_ONCE, LOGPROBS_AT_ONCE // (num_logprobs + 1))
        num_tokens = len(piece.token_ids)
        for start in range(0, max(num_tokens, 1), size):
            end = min(start + size, num_tokens)
            more = end < num_tokens
            output = SequenceOutput("", 0, list(piece.token_ids[start:end]))
            if not more and piece.finish_reason is not None:
                output.finished = True
                output.finish_reason = piece.finish_reason  # type: ignore[assignment]
                stopped_by: Any = piece.stop_reason
                output.stop_reason = tuple(stopped_by) if isinstance(stopped_by, list) else stopped_by
            text = _pushed(stream, output)
            self.usage.completion += end - start
            if self._reasoning_tokens is not None and self.usage.reasoning is not None:
                self.usage.reasoning += self._reasoning_tokens.count(index, piece.token_ids[start:end])
            logprobs = None if num_logprobs is None else piece.logprobs(start, end)
            yield Delta(index, text, logprobs, output.finish_reason, piece.stop_reason, more)

    def _prompt_slices(self, index: int, piece: ResponseTokens) -> Iterator[Delta]:
        """The deltas of the prompt's log-probabilities, a bounded number at a time."""
        prompt = memoryview(self.asked.prompts[index // self.asked.n]).cast("i")
        size = max(LOGPROBS_AT_ONCE // ((self.asked.prompt_logprobs or 0) + 1), 1)
        for start in range(1, len(prompt), size):
            entries = piece.prompt_logprobs(prompt, start, min(start + size, len(prompt)))
            yield Delta(index, "", None, None, None, True, entries)

    async def _pieces(self, position: int) -> AsyncGenerator[tuple[int, ResponseTokens], None]:
        """Pieces of one prompt, each with its choice."""
        reused = None
        async with contextlib.aclosing(self._with_a_guide_that_is_taken(position)) as pieces:
            async for piece in pieces:
                if piece.reused_blocks is not None:
                    reused = max(reused or 0, piece.reused_blocks)
                yield position * self.asked.n + piece.sequence, piece
        if reused is not None:
            self.usage.cached = (self.usage.cached or 0) + reused * self.model.manifest.page_size

    async def _with_a_guide_that_is_taken(self, position: int) -> AsyncGenerator[ResponseTokens, None]:
        """Pieces of one prompt; where the engine refuses the guide and there is a looser one, by that."""
        asked = self.asked
        for template, suffix in ((asked.template, ""), (asked.looser, ".looser")):
            assert template is not None
            request_id = f"{self.request_id}.{position}{suffix}"
            request = infer_request(template, request_id, asked.prompts[position], self.draft_scope)
            began = False
            try:
                async with contextlib.aclosing(self.triton.generate(request, asked.names)) as pieces:
                    async for piece in pieces:
                        began = True
                        yield piece
                return
            except ApiError as error:
                is_guides = error.status == 400 and error.param is not None and error.param == asked.names.get(GUIDE)
                if began or not is_guides or asked.looser is None or template is asked.looser:
                    raise
                self.left = asked.left_by_looser

    async def _merged(self) -> AsyncGenerator[tuple[int, ResponseTokens], None]:
        """Pieces of all prompts as they come; the first error ends all."""
        queue: asyncio.Queue[tuple[int, ResponseTokens] | BaseException | None] = asyncio.Queue(
            MAX_WAITING * len(self.asked.prompts)
        )

        async def follow(position: int) -> None:
            try:
                async with contextlib.aclosing(self._pieces(position)) as pieces:
                    async for item in pieces:
                        await queue.put(item)
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        tasks = [asyncio.ensure_future(follow(position)) for position in range(len(self.asked.prompts))]
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


def _pushed(stream: TextStream | MarkedText, output: SequenceOutput) -> str:
    """The text that tokens make certain. Raises ApiError where the tokenizer fails on them."""
    try:
        return stream.push(output)
    except RequestError as error:
        raise ApiError(500, f"the generated tokens cannot be written: {error}") from None
