"""Load on a server: when requests go out, how many are open, and what becomes of each."""

import asyncio
import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvforge.bench.traces import Goals, RequestTrace, percentiles
from kvforge.common.errors import KvforgeError
from kvforge.remote.server import RefusedError, RemoteServer
from kvforge.tokenization.calibration import CHECK_TEXT

TEXT_LETTERS = 1000
"""Of the text whose tokens and words are those of prompts."""
_FALLBACKS = (
    (("continuous_usage_stats",), "tokens of a chunk are shared out evenly"),
    (("ignore_eos", "min_tokens"), "lengths are not forced"),
)
"""What is left out in turn for a server that answers 400, and what that means."""


@dataclass(frozen=True)
class Level:
    """``rate`` requests a second arrive by chance (Poisson), infinity: at once; ``concurrency`` are open at a time,
    None: all."""

    rate: float
    concurrency: int | None


@dataclass(frozen=True)
class TimedAnswer:
    """One whole answer; ``prompt_tokens`` is None, and tokens are chunks, where the server sends no usage."""

    trace: RequestTrace
    prompt_tokens: int | None


def arrivals(rate: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """When requests of a Poisson process go out, seconds after the first, float64 [num]: stretched so that the mean
    gap is 1 / ``rate``, as few requests would not have it by chance."""
    waits = np.zeros(num)
    if math.isfinite(rate) and num > 1:
        waits[1:] = np.cumsum(rng.exponential(size=num - 1))
        waits *= (num - 1) / rate / waits[-1]
    return waits


class Load:
    """Prompts of ``input_len`` random tokens, or words where the server takes no token ids, and ``output_len`` tokens
    for each."""

    def __init__(self, server: RemoteServer, model: str, input_len: int, output_len: int, seed: int) -> None:
        self._server, self._input_len, self._output_len, self._seed = server, input_len, output_len, seed
        self._fields: dict[str, Any] = {
            "model": model, "max_tokens": output_len, "min_tokens": output_len, "ignore_eos": True, "temperature": 0,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        self._ids: list[int] = []
        self._words = CHECK_TEXT.read_text(encoding="utf-8")[:TEXT_LETTERS].split()

    async def prepare(self, num_warmups: int) -> list[str]:
        """Find out what the server takes, warm it up, and return what a reader of the numbers must know. Raises
        KvforgeError."""
        text, notes = " ".join(self._words), []
        for name in ("prompt", "content"):  # vLLM's field and llama.cpp's
            with contextlib.suppress(KvforgeError):
                body = {"model": self._fields["model"], name: text, "add_special_tokens": False}
                found = (await self._server.ask(f"{self._server.root}/tokenize", body)).get("tokens")
                if found and isinstance(found, list) and all(type(token) is int for token in found):
                    self._ids = sorted(set(found))
                    break
        if not self._ids:
            notes.append(f"prompts are {self._input_len} words, as the server has no /tokenize to tell its token ids")
        rng = np.random.default_rng([self._seed, 1])
        answer = await self._first(rng, notes)
        if answer.prompt_tokens is None:
            notes.append("the server sends no usage: tokens are streamed chunks, and prompts are as long as asked for")
        if answer.trace.tokens[-1] != self._output_len:
            notes.append(f"answers have {answer.trace.tokens[-1]} tokens in place of {self._output_len}")
        for _ in range(num_warmups - 1):
            await self._ask(self._prompt(rng))
        return notes

    async def _first(self, rng: np.random.Generator, notes: list[str]) -> TimedAnswer:
        """Ask once, with fewer fields where the server refuses some, which ``notes`` say then."""
        for names, note in _FALLBACKS:
            try:
                return await self._ask(self._prompt(rng))
            except RefusedError as error:
                if error.status != 400:
                    raise
            notes.append(f"the server refuses {' or '.join(names)}: {note}")
            for name in names:
                self._fields.pop(name, None)
            self._fields["stream_options"] = {"include_usage": True}
        return await self._ask(self._prompt(rng))

    async def run(self, level: Level, index: int, num_prompts: int, goals: Goals | None) -> dict[str, Any]:
        """Return the numbers of one level, named as by ``vllm bench serve``; ``index`` makes its prompts its own."""
        rng = np.random.default_rng([self._seed, 2, index])
        prompts = [self._prompt(rng) for _ in range(num_prompts)]
        waits = arrivals(level.rate, num_prompts, rng)
        gate, num_open, peak = asyncio.Semaphore(level.concurrency or num_prompts), 0, 0
        begin = time.perf_counter()

        async def one(prompt: Any, wait: float) -> TimedAnswer | KvforgeError:
            nonlocal num_open, peak
            await asyncio.sleep(begin + wait - time.perf_counter())
            async with gate:
                num_open += 1
                peak = max(peak, num_open)
                try:
                    return await self._ask(prompt)
                except KvforgeError as error:
                    return error
                finally:
                    num_open -= 1

        found = await asyncio.gather(*map(one, prompts, waits.tolist()))
        seconds = time.perf_counter() - begin
        answers = [answer for answer in found if isinstance(answer, TimedAnswer)]
        failures = [str(error) for error in found if isinstance(error, KvforgeError)]
        return {
            "request_rate": level.rate if math.isfinite(level.rate) else "inf",
            "max_concurrency": level.concurrency,
            "max_concurrent_requests": peak,
            "failed": len(failures),
            "errors": sorted(set(failures)),
            **self._numbers(answers, seconds, goals),
        }

    def _numbers(self, answers: list[TimedAnswer], seconds: float, goals: Goals | None) -> dict[str, Any]:
        traces = [answer.trace for answer in answers]
        num_in = sum(self._input_len if each.prompt_tokens is None else each.prompt_tokens for each in answers)
        num_out = sum(trace.tokens[-1] for trace in traces)
        times = {
            "ttft": [trace.ttft for trace in traces],
            "tpot": [trace.tpot for trace in traces if trace.tpot is not None],
            "itl": [gap for trace in traces for gap in trace.inter_token],
            "e2el": [trace.end_to_end for trace in traces],
        }
        found = {
            "completed": len(answers),
            "short": sum(trace.tokens[-1] < self._output_len for trace in traces),
            "duration": seconds,
            "total_input_tokens": num_in,
            "total_output_tokens": num_out,
            "request_throughput": len(answers) / seconds,
            "output_throughput": num_out / seconds,
            "total_token_throughput": (num_in + num_out) / seconds,
        }
        if goals is not None:
            found["request_goodput"] = sum(map(goals.are_met, traces)) / seconds
        for kind, values in times.items():
            for name, value in percentiles(values).items():
                found[f"{'median' if name == 'p50' else name}_{kind}_ms"] = 1e3 * value
        return found

    def _prompt(self, rng: np.random.Generator) -> Any:
        if self._ids:
            return rng.choice(self._ids, self._input_len).tolist()
        return " ".join(rng.choice(self._words, self._input_len))

    async def _ask(self, prompt: Any) -> TimedAnswer:
        chunks: list[_Chunk] = []
        prompt_tokens, total = None, None
        sent = time.perf_counter()
        async with contextlib.aclosing(
            self._server.events("completions", {**self._fields, "prompt": prompt})
        ) as events:
            async for event in events:
                now = time.perf_counter()
                try:
                    asked, count = _usage(event.get("usage") or {})
                    if event.get("choices"):
                        chunks.append(_Chunk(now, bool(event["choices"][0].get("text")), count))
                except (AttributeError, LookupError, TypeError, ValueError):
                    raise self._server.strange_answer() from None
                prompt_tokens = prompt_tokens if asked is None else asked
                total = total if count is None else count
        arrivals, counts = _counted(chunks)
        if not arrivals:
            raise KvforgeError(f"{self._server.url} answered without a token.")
        if total is not None and total != counts[-1]:
            counts = [round(total * (index + 1) / len(arrivals)) for index in range(len(arrivals))]
        return TimedAnswer(RequestTrace(sent, tuple(arrivals), tuple(counts)), prompt_tokens)


@dataclass(frozen=True)
class _Chunk:
    """A piece of an answer: when it came, and the tokens so far if the server says so in it."""

    at: float
    has_text: bool
    tokens: int | None


def _usage(found: dict[str, Any]) -> tuple[int | None, int | None]:
    """The tokens of a prompt and of its answer so far. Raises AttributeError or ValueError for what is no count."""
    asked, answered = found.get("prompt_tokens"), found.get("completion_tokens")
    if any(count is not None and (type(count) is not int or count < 0) for count in (asked, answered)):
        raise ValueError
    return asked, answered


def _counted(chunks: Sequence[_Chunk]) -> tuple[list[float], list[int]]:
    """When tokens came, and how many by then: as the server counts, or a token for a text where some chunk has no
    count, for then the others' is that of the end."""
    arrivals, counts = [], []
    is_told, last = all(chunk.tokens is not None for chunk in chunks), 0
    for chunk in chunks:
        count = chunk.tokens if is_told and chunk.tokens is not None else last + chunk.has_text
        if count > last:
            arrivals.append(chunk.at)
            counts.append(count)
            last = count
    return arrivals, counts
