"""Requests that cannot be served get one clear sentence, and the server goes on."""

import asyncio
import re

import numpy as np
import pytest

from kvforge.common.errors import KvforgeError
from kvforge.gateway.engine.tensors import infer_request, request_template
from kvforge.gateway.engine.triton import Triton
from kvforge.gateway.errors import ApiError
from kvforge.runtime import SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.server import ask, infer_input, text_of, used_pages, wait_until

TEXT = "hello there"
LLM_INPUT = ask("tensorrt_llm", [5, 6, 7], 4)


def refusal(server: TritonServer, model: str, inputs: dict) -> str:
    with StreamingClient(server.grpc_url) as client, pytest.raises(KvforgeError) as caught:
        list(client.generate(model, inputs))
    return str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (ask("ensemble", "", 4), "prompt is empty"),
        (ask("ensemble", TEXT, 0), "'max_tokens'.* is 0; give a whole number of at least 1"),
        (ask("ensemble", TEXT, -3), "'max_tokens'.* is -3; give a whole number of at least 1"),
        (ask("ensemble", "a" * 70000, 4), "the prompt has 70000 tokens, but the engine takes at most 65535"),
        (ask("ensemble", b"\xff\xfe", 4), "'text_input' is not valid UTF-8"),
        (ask("ensemble", TEXT, 4, top_p=1.5), "'top_p' of ensemble. is 1.5; give a finite number"),
        (ask("ensemble", TEXT, 4, top_k=-7), "'top_k' of ensemble. is -7; give a whole number"),
        (ask("ensemble", TEXT, 4, temperature=-1.0), "'temperature' is -1.0; give a finite number of at least 0"),
        (ask("ensemble", TEXT, 4, temperature=float("nan"), top_k=5), "'temperature' is nan; give a finite number"),
        (ask("ensemble", TEXT, 4, repetition_penalty=0.0), "'repetition_penalty' is 0.0; give a finite number"),
        (ask("ensemble", TEXT, 4, num_return_sequences=0), "'num_return_sequences' is 0; give a whole number"),
        (ask("ensemble", TEXT, 4, beam_width=4), "'beam_width' cannot be used: beam search is not supported"),
        ({"text_input": TEXT}, "missing required input.*max_tokens"),
        ({"max_tokens": 4}, "missing required input.*text_input"),
    ],
)  # fmt: skip
def test_ensemble_refuses(server: TritonServer, inputs: dict, words: str) -> None:
    assert re.search(words, refusal(server, "ensemble", inputs))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_lengths": 9}, "'input_lengths' is 9, but 'input_ids' has 3 tokens"),
        ({"input_lengths": 0}, "the prompt is empty"),
        ({"input_ids": [5, 6, 99999]}, "token id 99999"),
        ({"request_output_len": 0}, "is 0; give a whole number of at least 1"),
        ({"beam_width": 2}, "'beam_width' cannot be used"),
        ({"input_ids": None}, "'input_ids' .*is missing"),
        ({"input_lengths": None}, "'input_lengths' is missing"),
    ],
)
def test_tensorrt_llm_refuses(server: TritonServer, changes: dict, words: str) -> None:
    inputs = {name: value for name, value in {**LLM_INPUT, **changes}.items() if value is not None}
    assert re.search(words, refusal(server, "tensorrt_llm", inputs))


@pytest.mark.parametrize(("tokens", "words"), [([], "is empty"), ([5, 99999], "token id 99999")])
def test_refusals_come_as_responses_where_asked_for(server: TritonServer, tokens: list[int], words: str) -> None:
    """Before the request is accepted, and by the engine."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    prompt = np.array([*tokens, *[0] * (not tokens)], dtype=np.int32).tobytes()
    request = infer_request(request_template(params, 320, streaming=True), "odd", prompt)
    if not tokens:
        lengths = [tensor.name for tensor in request.inputs].index("input_lengths")
        request.raw_input_contents[lengths] = bytes(4)

    async def answer() -> None:
        triton = Triton(server.grpc_url)
        try:
            with pytest.raises(ApiError, match=words) as found:
                [piece async for piece in triton.generate(request)]
            assert found.value.status == 400
        finally:
            await triton.close()

    asyncio.run(answer())


UNSUPPORTED = {
    "lora_task_id": np.array([[3]], np.uint64),
    "prompt_embedding_table": np.ones((1, 2, 2), np.float16),
    "return_context_logits": np.array([[True]]),
    "prompt_table_extra_id": np.array([[7]], np.uint64),
    "decoder_text_input": np.array([[b"a"]], np.object_),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_tensors_are_refused_by_name(server: TritonServer, name: str) -> None:
    tensors = {
        "text_input": np.array([[TEXT.encode()]], np.object_),
        "max_tokens": np.array([[4]], np.int32),
        name: UNSUPPORTED[name],
    }
    with StreamingClient(server.grpc_url) as client, pytest.raises(KvforgeError, match=f"'{name}'.* cannot be used"):
        list(client.send("ensemble", [infer_input(n, array) for n, array in tensors.items()]))


def test_the_server_goes_on(server: TritonServer) -> None:
    refusal(server, "ensemble", ask("ensemble", TEXT, 0))
    assert text_of(server, ask("ensemble", TEXT, 8)) == text_of(server, ask("ensemble", TEXT, 8))
    wait_until(lambda: used_pages(server) == 0, "all pages free")
