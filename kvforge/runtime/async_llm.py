"""An engine for asyncio: many callers at once, each with a stream of its own."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kvforge.common.errors import EngineError, RequestError
from kvforge.common.sampling_fields import AUTO
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime.engine_thread import EngineThread
from kvforge.runtime.interface import CompiledGuide
from kvforge.runtime.loading import load_engine
from kvforge.runtime.requests.defaults import SamplingDefaults
from kvforge.runtime.requests.outputs import RequestOutput, SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.growing_output import GrowingOutput
from kvforge.runtime.text.prompts import ChatPrompt, Prompt, PromptReader
from kvforge.runtime.text.tokenizer import LONG_TEXT, Tokenizer

T = TypeVar("T")


class AsyncLLM:
    """An engine whose requests are asynchronous generators::

        async with AsyncLLM(engine_dir) as llm:
            async for output in llm.generate("Once upon", SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    Takes the keyword arguments of ``LLMEngine``, and ``generation_config`` as ``LLM`` does. The engine runs in a
    thread. All methods belong to the event loop that started it.
    """

    def __init__(
        self, engine_dir: str | Path | None = None, *, generation_config: str = AUTO, **engine_options: Any
    ) -> None:
        self._load = lambda: load_engine(engine_dir, **engine_options)
        self._folder = None if engine_dir is None else Path(engine_dir) / TOKENIZER_DIR
        self._defaults = SamplingDefaults.read(self._folder, generation_config)
        self._ids = itertools.count()
        self._open: dict[str, _Open] = {}
        self._by_request_id: dict[str, _Open] = {}
        self._thread: EngineThread | None = None
        self._prompts: PromptReader

    async def start(self) -> None:
        """Load the engine; ``async with`` does it. Raises EngineError where that fails, or it is loaded already."""
        if self._thread is not None:
            raise EngineError("the engine is loaded already; close it before it is started again.")
        loop = asyncio.get_running_loop()

        def in_loop(function: Callable[[T], None]) -> Callable[[T], None]:
            def hand_over(value: T) -> None:
                with contextlib.suppress(RuntimeError):  # a loop that was closed has nobody who waits
                    loop.call_soon_threadsafe(function, value)

            return hand_over

        self._thread = EngineThread(self._load, in_loop(self._take), in_loop(self._end_all))
        try:
            engine = await asyncio.wrap_future(self._thread.loaded)
        except BaseException:
            await self.close()
            raise
        self._prompts = PromptReader.of(engine.tokenizer, engine.config.max_seq_len, self._folder)

    async def close(self) -> None:
        """End the engine after the step it is in; open requests end with EngineError. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.shield(asyncio.to_thread(thread.close))

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, if it has one."""
        return self._running().loaded.result().tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As ``LLM.get_default_sampling_params``."""
        return self._defaults.params

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the request's output each time it has grown; the last one has ``finished`` set.

        A caller that is slow gets several tokens at once. Closing the generator, or cancelling the task that waits for
        it, gives the request up and frees its pages.

        Raises:
            RequestError: it cannot be served as asked, or its id is in use; others are not disturbed.
            EngineError: the engine is not loaded, was closed, or failed.
        """
        thread = self._running()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError("sampling_params are not SamplingParams", "give one for each request")
        ids = await self._encode(prompt)
        guide = await self._guide(params)
        request = self._admit(request_id, prompt, ids, params)
        try:
            await asyncio.wrap_future(thread.call(lambda e: e.add_request(request.engine_id, ids, params, guide)))
            while not request.finished:
                yield await request.grown()
        finally:
            self._forget(request)
            if not request.finished:
                thread.call(lambda engine: engine.abort(request.engine_id))

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **template_options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """``generate`` for a conversation, whose ``template_options`` are those of ``chat_prompt``."""
        prompt = self.chat_prompt(messages, **template_options)
        async with contextlib.aclosing(self.generate(prompt, sampling_params, request_id)) as outputs:
            async for output in outputs:
                yield output

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> ChatPrompt:
        """A conversation as a prompt for ``generate``; see ``PromptReader.chat``."""
        self._running()
        return self._prompts.chat(messages, **template_options)

    async def abort(self, request_id: str) -> bool:
        """End a request: its generator yields what there is, with the finish reason "abort". False if there is none."""
        thread = self._running()
        request = self._by_request_id.get(request_id)
        if request is None:
            return False
        aborted = await asyncio.wrap_future(thread.call(lambda engine: engine.abort(request.engine_id)))
        if aborted:
            request.abort()
        return aborted

    async def stats(self) -> dict[str, Any]:
        """``LLMEngine.stats()`` between two steps, after everything that was asked before."""
        return await asyncio.wrap_future(self._running().call(lambda engine: engine.stats()))

    def _running(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("the engine is not loaded; use `async with AsyncLLM(…)`, or await start() first.")
        return self._thread

    async def _encode(self, prompt: Prompt) -> list[int]:
        text = prompt.text if isinstance(prompt, ChatPrompt) else prompt
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._prompts.encode, prompt)
        return self._prompts.encode(prompt)

    async def _guide(self, params: SamplingParams) -> CompiledGuide | None:
        """Compiled beside the event loop and the steps."""
        if params.guided_decoding is None:
            return None
        return await asyncio.to_thread(self._running().loaded.result().guides.compile, params.guided_decoding)

    def _admit(self, request_id: str | None, prompt: Prompt, ids: list[int], params: SamplingParams) -> "_Open":
        engine_id = f"async-{next(self._ids)}"
        request_id = engine_id if request_id is None else request_id
        if request_id in self._by_request_id:
            raise RequestError(f"request id {request_id!r} is in use", "give another")
        request = _Open(engine_id, GrowingOutput(request_id, prompt, ids, params, self.tokenizer))
        self._open[engine_id] = self._by_request_id[request_id] = request
        return request

    def _forget(self, request: "_Open") -> None:
        del self._open[request.engine_id]
        del self._by_request_id[request.growing.output.request_id]

    def _take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            if output.request_id in self._open:  # else its caller has gone
                self._open[output.request_id].push(output)

    def _end_all(self, error: EngineError) -> None:
        for request in self._open.values():
            request.fail(error)


class _Open:
    """A request between the engine's thread, whose outputs the event loop pushes, and its caller.

    ``engine_id`` is never used again, so that no output of an earlier request of the same name is taken for its own.
    """

    def __init__(self, engine_id: str, growing: GrowingOutput) -> None:
        self.engine_id = engine_id
        self.growing = growing
        self._pushed: list[SequenceOutput] = []
        self._error: EngineError | None = None
        self._aborted = False
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        return self.growing.finished

    def push(self, output: SequenceOutput) -> None:
        self._pushed.append(output)
        self._changed.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._changed.set()

    def abort(self) -> None:
        self._aborted = True
        self._changed.set()

    async def grown(self) -> RequestOutput:
        """What there is once there is more. Raises the error that the request ended with, after its last output."""
        await self._changed.wait()
        self._changed.clear()
        pushed, self._pushed = self._pushed, []
        for output in pushed:
            self.growing.add(output)
        if self._aborted:
            self.growing.abort()
        elif self._error is not None and not self.growing.finished:
            raise self._error
        return self.growing.snapshot()
