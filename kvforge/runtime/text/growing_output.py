"""A request's output as its tokens come."""

from kvforge.runtime.requests.outputs import CompletionOutput, RequestOutput, SequenceOutput, prompt_logprobs
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.prompts import ChatPrompt, Prompt
from kvforge.runtime.text.stream import TextStream
from kvforge.runtime.text.tokenizer import Tokenizer


class GrowingOutput:
    """Collects a request's tokens and text, the latter only with a tokenizer."""

    def __init__(
        self, request_id: str, prompt: Prompt, ids: list[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        text = prompt.text if isinstance(prompt, ChatPrompt) else prompt if isinstance(prompt, str) else None
        completions = [CompletionOutput(index) for index in range(params.n)]
        self.output = RequestOutput(request_id, text, ids, completions, False)
        self._streams = [TextStream(tokenizer, params, ids) for _ in range(params.n)] if tokenizer is not None else None
        self._num_open = params.n

    @property
    def finished(self) -> bool:
        return self.output.finished

    def add(self, output: SequenceOutput) -> None:
        completion = self.output.outputs[output.index]
        completion.token_ids.extend(output.new_token_ids)
        if output.logprobs is not None:
            if completion.logprobs is None:
                completion.logprobs = []
            completion.logprobs.extend(output.logprobs)
            total = sum(entry.logprob for entry in output.logprobs)
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + total
        if output.logits is not None:
            completion.logits = [*(completion.logits or ()), *output.logits]
        if output.prompt_scores is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = prompt_logprobs(output.prompt_scores, self.output.prompt_token_ids)
        if self._streams is not None:
            completion.text += self._streams[output.index].push(output)
        self.output.metrics = output.metrics
        if output.finished:
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
            self._num_open -= 1
            self.output.finished = self._num_open == 0

    def abort(self) -> None:
        """Nothing more comes: what has not finished ends with "abort"."""
        for completion in self.output.outputs:
            completion.finish_reason = completion.finish_reason or "abort"
        self._num_open, self.output.finished = 0, True

    def snapshot(self) -> RequestOutput:
        """A copy that later steps do not change."""
        output = self.output
        copies = [
            CompletionOutput(
                c.index,
                c.text,
                list(c.token_ids),
                None if c.logprobs is None else list(c.logprobs),
                c.cumulative_logprob,
                c.finish_reason,
                c.stop_reason,
                None if c.logits is None else list(c.logits),
            )
            for c in output.outputs
        ]
        return RequestOutput(
            output.request_id, output.prompt, output.prompt_token_ids, copies, output.finished, output.metrics,
            output.prompt_logprobs,
        )  # fmt: skip
