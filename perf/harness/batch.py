"""Prompts that an engine serves together, step by step."""

from collections.abc import Sequence

from kvforge.common.errors import KvforgeError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.params import SamplingParams


class Batch:
    """Prompts that are there from the start, and the tokens they have got so far."""

    def __init__(
        self, engine: LLMEngine, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> None:
        self.engine = engine
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.num_finished = 0
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

    def start(self) -> None:
        """Go on until every request has its first token."""
        while not all(self.tokens):
            self.step()

    def finish(self) -> int:
        """Go on to the end; returns the number of new tokens."""
        count = 0
        while self.engine.has_unfinished():
            count += self.step()
        return count
