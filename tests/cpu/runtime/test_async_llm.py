"""An engine for asyncio: the texts of LLM, one caller's end or error is no other's, and every page comes back."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvforge import LLM, AsyncLLM, SamplingParams
from kvforge.common.errors import EngineError, RequestError
from kvforge.runtime.requests.guided_decoding import GuidedDecoding
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENIZER = byte_level()
ENDLESS = SamplingParams(max_tokens=10_000, ignore_eos=True)
"""Until the sequence is as long as it may be, unless given up."""
PROMPTS = ["The fox", "naïve 😀", "dog", [5, 6, 7], "The quick brown fox jumps over the lazy dog"]


def options(**changes: Any) -> dict[str, Any]:
    session = FakeSession(vocab_size=TOKENIZER.backend.get_vocab_size(), **changes)
    return {"session": session, "tokenizer": TOKENIZER, "num_pages": 200}


def run(test: Callable[[AsyncLLM], Awaitable[None]], **changes: Any) -> None:
    """Run ``test`` with an engine that afterwards has no request, no page in use, and no thread left."""

    async def main() -> None:
        async with AsyncLLM(**options(**changes)) as llm:
            await test(llm)
            stats = await llm.stats()
            assert (stats["num_waiting"], stats["num_running"], stats["num_used_pages"]) == (0, 0, 0)
            assert llm._open == llm._by_request_id == {}

    asyncio.run(asyncio.wait_for(main(), 120))
    assert not any(thread.name == "engine" for thread in threading.enumerate())


async def last(outputs: Any) -> Any:
    async for output in outputs:
        found = output
    return found


def test_many_callers_get_the_texts_of_llm() -> None:
    params = [SamplingParams(seed=i, max_tokens=20 + i, n=1 + i % 2) for i in range(20)]
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(20)]
    expected = LLM(**options()).generate(prompts, params, use_tqdm=False)

    async def test(llm: AsyncLLM) -> None:
        results = await asyncio.gather(*(last(llm.generate(*pair)) for pair in zip(prompts, params, strict=True)))
        for result, wanted in zip(results, expected, strict=True):
            assert result.finished and result.outputs == wanted.outputs
            assert (result.prompt, result.prompt_token_ids) == (wanted.prompt, wanted.prompt_token_ids)

    run(test)


def test_outputs_grow() -> None:
    async def test(llm: AsyncLLM) -> None:
        texts, finished = [""], []
        async for output in llm.generate("The fox", SamplingParams(seed=5, max_tokens=40, ignore_eos=True), "mine"):
            assert output.request_id == "mine" and output.outputs[0].text.startswith(texts[-1])
            texts.append(output.outputs[0].text)
            finished.append(output.finished)
            await asyncio.sleep(0)
        assert len(texts) > 2 and finished == [*[False] * (len(finished) - 1), True]

    run(test)


def test_a_caller_that_goes_gives_its_request_up() -> None:
    async def test(llm: AsyncLLM) -> None:
        closed = llm.generate("The fox", ENDLESS)
        await anext(closed)
        task = asyncio.create_task(last(llm.generate("dog", ENDLESS)))
        unborn = asyncio.create_task(last(llm.generate("dog", ENDLESS)))
        kept = llm.generate("dog", SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
        await anext(kept)
        assert (await llm.stats())["num_used_pages"] > 0
        await closed.aclose()
        task.cancel()
        unborn.cancel()
        for cancelled in (task, unborn):
            with pytest.raises(asyncio.CancelledError):
                await cancelled
        assert len((await last(kept)).outputs[0].token_ids) == 30
        async for _ in llm.generate("The fox", ENDLESS):
            break
        while llm._open:  # the event loop closes what nobody holds, in its next rounds
            await asyncio.sleep(0)
        never_read = llm.generate("The fox", ENDLESS)
        await never_read.aclose()

    run(test)


def test_abort_by_id() -> None:
    async def test(llm: AsyncLLM) -> None:
        outputs = llm.generate("The fox", SamplingParams(max_tokens=10_000, ignore_eos=True, n=2), "a")
        first = await anext(outputs)
        assert await llm.abort("a") and not await llm.abort("b")
        end = await last(outputs)
        assert end.finished and {completion.finish_reason for completion in end.outputs} == {"abort"}
        assert end.outputs[0].text.startswith(first.outputs[0].text)
        assert not await llm.abort("a")
        again = await last(llm.generate("The fox", SamplingParams(max_tokens=2, ignore_eos=True), "a"))
        assert len(again.outputs[0].token_ids) == 2, "the name is free again"

    run(test, max_seq_len=512)


def test_errors_belong_to_their_caller() -> None:
    async def test(llm: AsyncLLM) -> None:
        good = llm.generate("dog", SamplingParams(seed=2, max_tokens=60, ignore_eos=True), "taken")
        await anext(good)
        bad: list[tuple[Any, ...]] = [
            ("",), ("half \udcc3",), ([10**6],), ("x", {"max_tokens": 1}), ("x", None, "taken"),
            ("x", SamplingParams(guided_decoding=GuidedDecoding("regex", "("))), ("x " * 300,),
        ]  # fmt: skip
        for arguments in bad:
            with pytest.raises(RequestError):
                await last(llm.generate(*arguments))
        assert len((await last(good)).outputs[0].token_ids) == 60

    run(test)


def test_a_step_that_fails_ends_its_requests_as_offline() -> None:
    made = options()
    made["session"].fail_on = lambda session: session.num_lower_calls == 2

    async def main() -> None:
        async with AsyncLLM(**made) as llm:
            failed = await last(llm.generate("The fox", ENDLESS))
            assert failed.outputs[0].finish_reason == "error" and "on fire" in failed.outputs[0].stop_reason
            assert len((await last(llm.generate("dog", SamplingParams(max_tokens=3)))).outputs[0].token_ids) <= 3

    asyncio.run(main())


def test_an_engine_that_dies_ends_everything_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvforge.runtime.engine import LLMEngine

    async def main() -> None:
        async with AsyncLLM(**options()) as llm:
            open_request = llm.generate("The fox", ENDLESS)
            await anext(open_request)
            monkeypatch.setattr(LLMEngine, "step", lambda self: 1 / 0)
            for outputs in (open_request, llm.generate("dog", ENDLESS)):
                with pytest.raises(EngineError, match=r"the engine failed \(ZeroDivisionError: .*\); start it again\."):
                    await last(outputs)
            monkeypatch.undo()
            await llm.close()
            await llm.start()
            assert (await last(llm.generate("dog", SamplingParams(max_tokens=1)))).finished

    asyncio.run(main())


def test_closing_ends_open_requests() -> None:
    async def main() -> None:
        llm = AsyncLLM(**options())
        with pytest.raises(EngineError, match="the engine is not loaded"):
            await anext(llm.generate("x"))
        await llm.start()
        with pytest.raises(EngineError, match="loaded already"):
            await llm.start()
        task = asyncio.create_task(last(llm.generate("The fox", ENDLESS)))
        outputs = llm.generate("dog", ENDLESS)
        await anext(outputs)
        await llm.close()
        await llm.close()
        for waiting in (task, last(outputs)):
            with pytest.raises(EngineError, match="the engine was shut down"):
                await waiting

    asyncio.run(main())


def test_an_engine_that_cannot_be_loaded_leaves_no_thread() -> None:
    async def main() -> None:
        with pytest.raises(EngineError, match="no engine was given"):
            async with AsyncLLM():
                pass
        with contextlib.suppress(EngineError):
            await AsyncLLM("/nowhere").start()

    asyncio.run(main())
    assert not any(thread.name == "engine" for thread in threading.enumerate())
