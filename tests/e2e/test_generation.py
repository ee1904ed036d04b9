"""Answers of a real server equal the offline ones, through every model and protocol."""

import json
import urllib.request

import numpy as np
import pytest

from kvforge import LLM, SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.health.probe import generate
from kvforge.serving.server.launcher import TritonServer
from tests.support.serving.contract_outputs import LOG_PROBS
from tests.support.serving.server import ENDLESS, WAIT_S, ask, infer_input, text_of

PROMPT = "The secret number of the old mill is 4711."
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module")
def offline(llm: LLM):
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]


def test_tensorrt_llm_streams_new_tokens(server: TritonServer, offline) -> None:
    with StreamingClient(server.grpc_url) as client:
        responses = list(client.generate("tensorrt_llm", ask("tensorrt_llm", offline.prompt_token_ids, 40)))
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert all(r.tensors["sequence_length"].tolist() == [[len(r.token_ids)]] for r in responses)
    assert all(r.tensors["output_ids"].shape == (1, 1, len(r.token_ids)) for r in responses)
    assert [t for r in responses for t in r.token_ids] == list(offline.outputs[0].token_ids)


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
def test_a_stream_begins_before_its_end(server: TritonServer, model: str) -> None:
    """Of a short one all tokens may come together."""
    with StreamingClient(server.grpc_url) as client:
        prompt = [5, 6, 7] if model == "tensorrt_llm" else PROMPT
        assert not next(client.generate(model, ask(model, prompt, ENDLESS))).final


@pytest.mark.parametrize("exclude", [True, False])
def test_tensorrt_llm_whole_answer(server: TritonServer, offline, exclude: bool) -> None:
    inputs = ask("tensorrt_llm", offline.prompt_token_ids, 40, streaming=False, exclude_input_in_output=exclude)
    with StreamingClient(server.grpc_url) as client:
        (response,) = client.generate("tensorrt_llm", inputs)
    expected = [] if exclude else list(offline.prompt_token_ids)
    assert response.token_ids == expected + list(offline.outputs[0].token_ids)
    assert response.final


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
def test_text_models_stream_text(server: TritonServer, offline, model: str) -> None:
    with StreamingClient(server.grpc_url) as client:
        responses = list(client.generate(model, ask(model, PROMPT, 40)))
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    assert "".join(r.text for r in responses) == offline.outputs[0].text


def test_generate_over_http(server: TritonServer, offline) -> None:
    answer = generate(server.http_url, "ensemble", {"text_input": PROMPT, "max_tokens": 40})
    assert answer["text_output"] == offline.outputs[0].text
    whole = {"text_input": PROMPT, "max_tokens": 40, "exclude_input_in_output": False}
    assert generate(server.http_url, "ensemble", whole)["text_output"] == PROMPT + offline.outputs[0].text


def test_generate_stream_over_http(server: TritonServer, offline) -> None:
    request = urllib.request.Request(
        f"{server.http_url}/v2/models/ensemble/generate_stream",
        data=json.dumps({"text_input": PROMPT, "max_tokens": 40, "stream": True}).encode(),
    )
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(event["text_output"] for event in events) == offline.outputs[0].text


def test_generate_stream_begins_before_its_end(server: TritonServer) -> None:
    body = {"text_input": PROMPT, "max_tokens": ENDLESS, "stream": True, "end_id": -1}
    url = f"{server.http_url}/v2/models/ensemble/generate_stream"
    with urllib.request.urlopen(url, data=json.dumps(body).encode(), timeout=WAIT_S) as response:
        assert response.readline().startswith(b"data: ")


def test_log_probs(server: TritonServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
    expected = [entry.logprob for entry in offline.outputs[0].logprobs]
    inputs = ask("ensemble", PROMPT, 12, return_log_probs=True)
    with StreamingClient(server.grpc_url) as client:
        responses = list(client.generate("ensemble", inputs))
    got = np.concatenate([r.tensors["output_log_probs"].reshape(-1) for r in responses])
    rounding = LOG_PROBS * max(map(abs, expected))
    np.testing.assert_allclose(got, expected, rtol=0, atol=rounding)
    total = responses[-1].tensors["cum_log_probs"]
    np.testing.assert_allclose(total, [[sum(expected)]], rtol=0, atol=len(expected) * rounding)


def test_seeded_sampling_and_penalties(server: TritonServer, llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.8, seed=77, repetition_penalty=1.2,
                            presence_penalty=0.3, frequency_penalty=0.2, max_tokens=30)  # fmt: skip
    (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
    inputs = ask("ensemble", PROMPT, 30, temperature=0.9, top_k=20, top_p=0.8, seed=77, repetition_penalty=1.2,
                 presence_penalty=0.3, frequency_penalty=0.2)  # fmt: skip
    assert text_of(server, inputs) == offline.outputs[0].text


def test_end_id_stop_and_bad_words(server: TritonServer, llm: LLM, offline) -> None:
    tokens = list(offline.outputs[0].token_ids)
    end = tokens[10]
    first = tokens.index(end)
    inputs = ask("tensorrt_llm", offline.prompt_token_ids, 40, streaming=False, end_id=end)
    with StreamingClient(server.grpc_url) as client:
        (response,) = client.generate("tensorrt_llm", inputs)
    assert response.token_ids == tokens[:first]

    bad = llm.tokenizer.decode([tokens[0]]) or "t300"
    params = SamplingParams(temperature=0.0, max_tokens=20, bad_words=[bad])
    (without,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert text_of(server, ask("ensemble", PROMPT, 20, bad_words=[bad])) == without.outputs[0].text


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [True, False])
def test_several_sequences(server: TritonServer, llm: LLM, model: str, streaming: bool) -> None:
    params = SamplingParams(n=3, temperature=1.0, top_k=50, seed=5, max_tokens=16)
    (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
    inputs = ask(model, PROMPT, 16, streaming, num_return_sequences=3, top_k=50, seed=5)
    texts = ["", "", ""]
    with StreamingClient(server.grpc_url) as client:
        responses = list(client.generate(model, inputs))
    for response in responses:
        texts[int(response.tensors["sequence_index"].item())] += response.text
    assert texts == [output.text for output in offline.outputs]
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]


@pytest.mark.parametrize("model", ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("streaming", [True, False])
def test_a_batch_of_two_prompts(server: TritonServer, llm: LLM, model: str, streaming: bool) -> None:
    outputs = llm.generate([PROMPT, "short"], SamplingParams(temperature=0.0, max_tokens=10), use_tqdm=False)
    ids = np.zeros((2, len(outputs[0].prompt_token_ids)), np.int32)
    for row, output in enumerate(outputs):
        ids[row, : len(output.prompt_token_ids)] = output.prompt_token_ids
    both = {
        "text": {
            "text_input": np.array([[PROMPT.encode()], [b"short"]], np.object_),
            "max_tokens": np.array([[10], [10]], np.int32),
            "stream": np.array([[streaming], [streaming]]),
        },
        "tensorrt_llm": {
            "input_ids": ids,
            "input_lengths": np.array([[len(o.prompt_token_ids)] for o in outputs], np.int32),
            "request_output_len": np.array([[10], [10]], np.int32),
            "streaming": np.array([[streaming], [streaming]]),
        },
    }
    with StreamingClient(server.grpc_url) as client:
        responses = list(
            client.send(
                model,
                [
                    infer_input(name, array)
                    for name, array in both["tensorrt_llm" if model == "tensorrt_llm" else "text"].items()
                ],
            )
        )
    assert [r.final for r in responses] == [False] * (len(responses) - 1) + [True]
    for row, output in enumerate(outputs):
        mine = [r for r in responses if r.tensors["batch_index"].item() == row]
        if model != "tensorrt_llm":
            assert "".join(r.text for r in mine) == output.outputs[0].text
        else:
            assert [token for r in mine for token in r.token_ids] == list(output.outputs[0].token_ids)
