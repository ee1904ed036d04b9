"""Offline use: prompts in, texts out."""

import itertools
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import RequestError
from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.requests.outputs import CompletionOutput, RequestOutput, SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.limits import TextLimits
from kvforge.runtime.text.stream import TextStream
from kvforge.runtime.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine with texts: ``LLM(engine_dir).generate("Once upon", SamplingParams(max_tokens=20))``.

    Takes the keyword arguments of ``LLMEngine``. One caller at a time.
    """

    def __init__(self, engine_dir: str | Path | None = None, **engine_options: Any) -> None:
        self.engine = LLMEngine(engine_dir, **engine_options)
        self._ids = itertools.count()
        self._limits = self.tokenizer and TextLimits.of(self.tokenizer, self.engine.config.max_seq_len)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, if it has one."""
        return self.engine.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Generate for one prompt (a string or a list of token ids) or a list of them; results in order.

        Raises:
            RequestError: a prompt cannot be served; none is started then.
        """
        listed = _listed(prompts)
        results: dict[int, RequestOutput] = {}
        with tqdm(total=len(listed), desc="Requests", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:
            num_tokens = 0
            for position, output in self.run(listed, sampling_params, stream=False):
                results[position] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens")
        return [results[position] for position in range(len(listed))]

    def generate_stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the request's output each time it has grown; the last one has ``finished`` set.

        Closing the iterator early gives the request up and frees its pages.
        """
        for _, output in self.run([prompt], sampling_params, stream=True):
            yield output

    def run(
        self, prompts: Sequence[Prompt], sampling_params: Params, stream: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Serve prompts together; yield (position, output) when one finishes, or grows if ``stream``."""
        requests = self._start(prompts, sampling_params)
        try:
            while requests:
                grown = dict.fromkeys(output.request_id for output in self._step(requests))
                for request_id in grown:
                    request = requests[request_id]
                    if request.finished:
                        del requests[request_id]
                    if stream or request.finished:
                        yield request.position, request.snapshot()
        finally:
            for request_id in requests:
                self.engine.abort(request_id)

    def _start(self, prompts: Sequence[Prompt], sampling_params: Params) -> dict[str, "_OpenRequest"]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or SamplingParams()] * len(prompts)
        if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise RequestError("sampling_params are not SamplingParams; give one for all or a list of them.")
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling "
                "params; give one for all or one for each."
            )
        requests: dict[str, _OpenRequest] = {}
        try:
            for position, (prompt, params) in enumerate(zip(prompts, sampling_params, strict=True)):
                request_id = f"llm-{next(self._ids)}"
                ids = self._encode(prompt)
                self.engine.add_request(request_id, ids, params)
                requests[request_id] = _OpenRequest(request_id, position, prompt, ids, params, self.tokenizer)
        except BaseException:
            for request_id in requests:
                self.engine.abort(request_id)
            raise
        return requests

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _plain_list(prompt, "a prompt")
        if not prompt:
            raise RequestError("the prompt is empty; give text, or the beginning-of-text token's id.")
        if self._limits is None:
            raise RequestError("this engine has no tokenizer; give the prompt as a list of token ids.")
        return self._limits.encode(prompt)

    def _step(self, requests: dict[str, "_OpenRequest"]) -> list[SequenceOutput]:
        num_iterations = self.engine.num_iterations
        outputs = [output for output in self.engine.step() if output.request_id in requests]
        if not outputs and self.engine.num_iterations == num_iterations:
            raise RequestError("an open iterator of scored logits holds the engine's pages; close it first.")
        for output in outputs:
            requests[output.request_id].add(output)
        return outputs


class _OpenRequest:
    """Collects a request's tokens and text."""

    def __init__(
        self,
        request_id: str,
        position: int,
        prompt: Prompt,
        ids: list[int],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.position = position
        self.output = RequestOutput(
            request_id,
            prompt if isinstance(prompt, str) else None,
            ids,
            [CompletionOutput(index) for index in range(params.n)],
            False,
        )
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
        if self._streams is not None:
            completion.text += self._streams[output.index].push(output)
        self.output.metrics = output.metrics
        if output.finished:
            completion.finish_reason, completion.stop_reason = output.finish_reason, output.stop_reason
            self._num_open -= 1
            self.output.finished = self._num_open == 0

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
            output.request_id, output.prompt, output.prompt_token_ids, copies, output.finished, output.metrics
        )


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A string or a flat list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    listed = _plain_list(prompts, "the list of prompts")
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _plain_list(values: Any, name: str) -> list:
    """A list, tuple, range or array (but no bytes) as a list."""
    if hasattr(values, "tolist") and not isinstance(values, memoryview):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray, memoryview)):
        raise RequestError(
            f"{name} is of type {type(values).__name__}; give a string or a list of token ids for each prompt."
        )
    return list(values)
