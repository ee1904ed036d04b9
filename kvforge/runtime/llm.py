"""Offline use: prompts in, texts out."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kvforge.common.errors import RequestError
from kvforge.common.sampling_fields import AUTO
from kvforge.manifest import TOKENIZER_DIR
from kvforge.runtime.loading import load_engine
from kvforge.runtime.requests.defaults import SamplingDefaults
from kvforge.runtime.requests.outputs import RequestOutput, SequenceOutput
from kvforge.runtime.requests.params import SamplingParams
from kvforge.runtime.text.growing_output import GrowingOutput
from kvforge.runtime.text.prompts import ChatPrompt, Prompt, PromptReader, listed_prompts
from kvforge.runtime.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """An engine with texts: ``LLM(engine_dir).generate("Once upon", SamplingParams(max_tokens=20))``.

    Takes the keyword arguments of ``LLMEngine``. ``generation_config`` is "auto", where prompts without sampling
    parameters are sampled as the model's generation_config.json says, or "none", where that file is not read. One
    caller at a time.

    Raises:
        EngineError: the engine cannot be loaded.
        KvforgeError: generation_config.json cannot be used.
    """

    def __init__(
        self, engine_dir: str | Path | None = None, *, generation_config: str = AUTO, **engine_options: Any
    ) -> None:
        folder = None if engine_dir is None else Path(engine_dir) / TOKENIZER_DIR
        self._defaults = SamplingDefaults.read(folder, generation_config)
        self.engine = load_engine(engine_dir, **engine_options)
        self._ids = itertools.count()
        self.prompts = PromptReader.of(self.tokenizer, self.engine.config.max_seq_len, folder)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer, if it has one."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How a prompt without sampling parameters is sampled: as the model's generation_config.json says."""
        return self._defaults.params

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Generate for one prompt (a string or a list of token ids) or a list of them; results in order.

        Raises:
            RequestError: a prompt cannot be served; none is started then.
        """
        listed = listed_prompts(prompts)
        results: dict[int, RequestOutput] = {}
        with tqdm(total=len(listed), desc="Requests", disable=None if use_tqdm else True, dynamic_ncols=True) as bar:
            num_tokens = 0
            for position, output in self.run(listed, sampling_params, stream=False):
                results[position] = output
                num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                bar.update()
                bar.set_postfix_str(f"{num_tokens} tokens")
        return [results[position] for position in range(len(listed))]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of {"role", "content"}) or a list of them; results in order.

        ``template_options`` are those of ``chat_prompt``, for all conversations.

        Raises:
            RequestError: a conversation cannot be served; none is started then.
            KvforgeError: there is no chat template, or it cannot be read.
        """
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = messages if several else [messages]
        prompts = [self.chat_prompt(conversation, **template_options) for conversation in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **template_options: Any) -> ChatPrompt:
        """A conversation as a prompt for ``generate`` and ``generate_stream``; see ``PromptReader.chat``."""
        return self.prompts.chat(messages, **template_options)

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
        positions = {request_id: position for position, request_id in enumerate(requests)}
        try:
            while requests:
                grown = dict.fromkeys(output.request_id for output in self._step(requests))
                for request_id in grown:
                    request = requests[request_id]
                    if request.finished:
                        del requests[request_id]
                    if stream or request.finished:
                        yield positions[request_id], request.snapshot()
        finally:
            for request_id in requests:
                self.engine.abort(request_id)

    def _start(self, prompts: Sequence[Prompt], sampling_params: Params) -> dict[str, GrowingOutput]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params or self.get_default_sampling_params()] * len(prompts)
        if not isinstance(sampling_params, Sequence) or not all(isinstance(p, SamplingParams) for p in sampling_params):
            raise RequestError("sampling_params are not SamplingParams", "give one for all or a list of them")
        if len(sampling_params) != len(prompts):
            raise RequestError(
                f"there are {len(prompts)} prompts and {len(sampling_params)} sampling params",
                "give one for all or one for each",
            )
        requests: dict[str, GrowingOutput] = {}
        try:
            for prompt, params in zip(prompts, sampling_params, strict=True):
                request_id = f"llm-{next(self._ids)}"
                ids = self.prompts.encode(prompt)
                self.engine.add_request(request_id, ids, params)
                requests[request_id] = GrowingOutput(request_id, prompt, ids, params, self.tokenizer)
        except BaseException:
            for request_id in requests:
                self.engine.abort(request_id)
            raise
        return requests

    def _step(self, requests: dict[str, GrowingOutput]) -> list[SequenceOutput]:
        num_iterations = self.engine.num_iterations
        outputs = [output for output in self.engine.step() if output.request_id in requests]
        if not outputs and self.engine.num_iterations == num_iterations:
            raise RequestError("an open iterator of scored logits holds the engine's pages", "close it first")
        for output in outputs:
            requests[output.request_id].add(output)
        return outputs
