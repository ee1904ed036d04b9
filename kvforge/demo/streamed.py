"""Asks running servers questions, over gRPC streaming on `ensemble`: several at once, or two servers by turns."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvforge.demo.needles import MAX_ANSWER_TOKENS
from kvforge.serving.client import StreamingClient


@dataclass(frozen=True)
class StreamedAnswer:
    """A whole streamed answer; `ttft_s` is seconds from sending to the first piece."""

    text: str
    ttft_s: float
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True)
class StreamedRun:
    """All answers in the questions' order, and the seconds from the first request to the last piece."""

    answers: tuple[StreamedAnswer, ...]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Prompt and output tokens together."""
        tokens = sum(answer.num_prompt_tokens + answer.num_output_tokens for answer in self.answers)
        return tokens / self.seconds


def ask_all(
    grpc_url: str, prompts: Sequence[str], concurrency: int, on_answer: Callable[[int, StreamedAnswer], None]
) -> StreamedRun:
    """Stream every prompt's answer on `concurrency` connections; `on_answer(index, answer)` as each is whole."""
    connections = threading.local()
    opened: list[StreamingClient] = []

    def ask(index: int) -> StreamedAnswer:
        if not hasattr(connections, "client"):
            connections.client = StreamingClient(grpc_url)
            opened.append(connections.client)
        answer = _ask(connections.client, prompts[index])
        on_answer(index, answer)
        return answer

    started = time.monotonic()
    try:
        with ThreadPoolExecutor(concurrency) as pool:
            answers = tuple(pool.map(ask, range(len(prompts))))
        return StreamedRun(answers, time.monotonic() - started)
    finally:
        for client in opened:
            client.close()


def ask_in_turns(grpc_urls: tuple[str, str], prompts: Sequence[str]) -> list[tuple[float, float]]:
    """Return the seconds to the first token of two servers for each prompt, one request at a time. Which of them is
    asked first changes from prompt to prompt, so that what else the machine does meets both alike."""
    clients = [StreamingClient(url) for url in grpc_urls]
    pairs: list[tuple[float, float]] = []
    try:
        for index, prompt in enumerate(prompts):
            found = [0.0, 0.0]
            for which in (index % 2, 1 - index % 2):
                found[which] = _ask(clients[which], prompt).ttft_s
            pairs.append((found[0], found[1]))
    finally:
        for client in clients:
            client.close()
    return pairs


def _ask(client: StreamingClient, prompt: str) -> StreamedAnswer:
    inputs = {
        "text_input": prompt,
        "max_tokens": MAX_ANSWER_TOKENS,
        "stream": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    sent = time.monotonic()
    responses = list(client.generate("ensemble", inputs))
    last = responses[-1].tensors
    return StreamedAnswer(
        text="".join(response.text for response in responses),
        ttft_s=responses[0].arrived - sent,
        num_prompt_tokens=int(last["num_input_tokens"].item()),
        num_output_tokens=int(last["num_output_tokens"].item()),
    )
