"""An engine that counts: a prompt takes one step for each ``max_num_batched_tokens`` of it, then a token a step."""

import math
import os
from types import SimpleNamespace
from typing import Any

VOCABULARY = 100
LARGE = 1e3
NUM_BLOCKS = 65
BLOCK_BYTES = 4096
FAILING_TOKEN = 1663
"""A prompt that ends with it breaks the engine, as a worker's end does."""


class _Request:
    num_preemptions = 0

    def __init__(self, name: str, prompt: list[int], fields: dict[str, Any], priority: int) -> None:
        self.name, self.request_id, self.fields, self.priority = name, f"{name}-0a1b2c3d", fields, priority
        self.tokens, self.num_prompt, self.num_computed_tokens = list(prompt), len(prompt), 0

    def next_token(self) -> int:
        biases = {token: bias for token, bias in (self.fields.get("logit_bias") or {}).items() if bias >= LARGE}
        return next(iter(biases), (self.tokens[-1] + 1) % VOCABULARY)


class _Pool:
    def __init__(self, engine: "LLMEngine") -> None:
        self._engine = engine

    def get_num_free_blocks(self) -> int:
        size = self._engine.arguments["block_size"]
        used = sum(-(-request.num_computed_tokens // size) for request in self._engine.running)
        return NUM_BLOCKS - 1 - used


class LLMEngine:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.running: list[_Request] = []
        scheduler = SimpleNamespace(
            waiting=[],
            running=self.running,
            kv_cache_config=SimpleNamespace(
                num_blocks=NUM_BLOCKS, kv_cache_tensors=[SimpleNamespace(size=NUM_BLOCKS * BLOCK_BYTES)]
            ),
            kv_cache_manager=SimpleNamespace(block_pool=_Pool(self)),
        )
        self.executor = SimpleNamespace(is_failed=False)
        core = SimpleNamespace(scheduler=scheduler, model_executor=self.executor)
        self.engine_core = SimpleNamespace(engine_core=core)
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        parallel = SimpleNamespace(**{name: arguments[name] for name in sizes})
        self.vllm_config = SimpleNamespace(parallel_config=parallel)

    @classmethod
    def from_engine_args(cls, args: Any) -> "LLMEngine":
        return cls(args.arguments)

    def add_request(self, name: str, prompt: dict[str, list[int]], params: Any, priority: int = 0) -> None:
        self.running.append(_Request(name, prompt["prompt_token_ids"], params.fields, priority))

    def abort_request(self, names: list[str]) -> None:
        self.running[:] = [request for request in self.running if request.name not in names]

    def step(self) -> list[Any]:
        outputs = []
        for request in list(self.running):
            if request.tokens[request.num_prompt - 1] == FAILING_TOKEN:
                os._exit(9)
            length = len(request.tokens)
            done = request.num_computed_tokens + self.arguments["max_num_batched_tokens"]
            request.num_computed_tokens = min(done, length)
            if request.num_computed_tokens == length:
                outputs.append(self._output(request))
        return outputs

    def _output(self, request: _Request) -> Any:
        token = request.next_token()
        request.tokens.append(token)
        reason = None
        if token in request.fields["stop_token_ids"]:
            reason = "stop"
        elif len(request.tokens) - request.num_prompt == request.fields["max_tokens"]:
            reason = "length"
        if reason is not None:
            self.running.remove(request)
        logprobs = None
        if request.fields["logprobs"] is not None:
            entry = {token: SimpleNamespace(logprob=math.log(0.5), rank=1)}
            for rank in range(2, request.fields["logprobs"] + 1):
                other = (token + rank) % VOCABULARY
                entry[other] = SimpleNamespace(logprob=math.log(0.5) - rank, rank=rank)
            logprobs = [entry]
        completion = SimpleNamespace(token_ids=[token], logprobs=logprobs, finish_reason=reason, stop_reason=None)
        times = SimpleNamespace(scheduled_ts=1.5, queued_ts=1.25)
        return SimpleNamespace(
            request_id=request.name,
            outputs=[completion],
            finished=reason is not None,
            num_cached_tokens=0,
            metrics=times,
        )
