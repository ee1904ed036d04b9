"""Prompts that an engine serves together, step by step."""

import time
from collections.abc import Sequence

from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams


class Batch:
    """Prompts that are there from the start, and the tokens they have got so far. In place of ``params`` there can be
    the number of greedy tokens that each gets, whatever they are."""

    def __init__(
        self, engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | int
    ) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.num_finished = 0
        self.begun = time.perf_counter()
        if isinstance(params, int):
            params = SamplingParams(temperature=0.0, max_tokens=params, ignore_eos=True)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        for index, (prompt, own) in enumerate(zip(prompts, each, strict=True)):
            engine.add_request(str(index), prompt, own)

    def step(self) -> int:
        """Take one step; returns the number of new tokens.

        Raises:
            KvforgeError: a request fails.
        """
        count = 0
        for output in self.engine.step():
            if output.finish_reason == "error":
                raise KvforgeError(f"request {output.request_id} failed: {output.stop_reason}.")
            self.tokens[int(output.request_id)] += output.new_token_ids
            count += len(output.new_token_ids)
            self.num_finished += output.finish_reason is not None
        return count

    def start(self) -> float:
        """Go on until every request has its first token; returns the seconds since the first was added."""
        while not all(self.tokens):
            self.step()
        return time.perf_counter() - self.begun

    def steps(self) -> list[float]:
        """Go on until a request ends; returns the seconds of each step."""
        seconds = []
        while not self.num_finished:
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return seconds

    def finish(self) -> int:
        """Go on to the end; returns the number of new tokens."""
        count = 0
        while self.engine.has_unfinished():
            count += self.step()
        return count
