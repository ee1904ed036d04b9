"""A server without the decoupled mode: each request has one response, so `infer` of Triton's own clients works."""

import dataclasses
import functools
import json
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from kvforge import LLM, SamplingParams
from kvforge.manifest import load_manifest, save_manifest
from kvforge.serving.client import StreamingClient, input_datatypes
from kvforge.serving.health.probe import generate
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.serving.fake_server import encode, fake_text, fake_tokens
from tests.support.serving.serve_process import FAKE, ServeProcess
from tests.support.serving.server import ENDLESS, ask, client_process, started, used_pages, wait_until, without_end

MODELS = ["tensorrt_llm", "ensemble", "tensorrt_llm_bls"]
PROMPT, MAX_TOKENS = "hello there", 12
Infer = Callable[[str, dict[str, np.ndarray], str], Any]


@pytest.fixture(scope="module")
def one_response(engine_dir: Path) -> Iterator[TritonServer]:
    with started(TritonServer(engine_dir, ServerOptions(kv_cache_gib=0.25, decoupled=False))) as running:
        yield running


def arrays(llm: LLM, model: str, **more: Any) -> dict[str, np.ndarray]:
    """The inputs of a request for MAX_TOKENS tokens after PROMPT."""
    inputs = ask(model, llm.tokenizer.encode(PROMPT) if model == "tensorrt_llm" else PROMPT, MAX_TOKENS, False, **more)
    kinds = {"BYTES": object, "INT32": np.int32, "BOOL": bool, "FP32": np.float32}
    found = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value.encode() if isinstance(value, str) else value]
        found[name] = np.array([values], dtype=kinds[input_datatypes()[name]])
    return found


def _tensors(kind: Any, inputs: dict[str, np.ndarray]) -> list[Any]:
    tensors = []
    for name, array in inputs.items():
        tensor = kind.InferInput(name, list(array.shape), input_datatypes()[name])
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return tensors


def infer_grpc(server: TritonServer, model: str, inputs: dict[str, np.ndarray], request_id: str = "") -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        return client.infer(model, _tensors(grpcclient, inputs), request_id=request_id)


def infer_grpc_async(server: TritonServer, model: str, inputs: dict[str, np.ndarray], request_id: str = "") -> Any:
    done, found = threading.Event(), []

    def callback(result: Any, error: Any) -> None:
        found.extend([result, error])
        done.set()

    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.async_infer(model, _tensors(grpcclient, inputs), callback, request_id=request_id)
        assert done.wait(120)
    if found[1] is not None:
        raise found[1]
    return found[0]


def infer_http(server: TritonServer, model: str, inputs: dict[str, np.ndarray], request_id: str = "") -> Any:
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        return client.infer(model, _tensors(httpclient, inputs), request_id=request_id)


def infer_http_async(server: TritonServer, model: str, inputs: dict[str, np.ndarray], request_id: str = "") -> Any:
    with httpclient.InferenceServerClient(server.http_url.removeprefix("http://")) as client:
        return client.async_infer(model, _tensors(httpclient, inputs), request_id=request_id).get_result()


DOORS = {"grpc": infer_grpc, "grpc async": infer_grpc_async, "http": infer_http, "http async": infer_http_async}


def answer(result: Any, model: str) -> Any:
    """The text, read as TensorRT-LLM's clients read it, or the tokens."""
    if model != "tensorrt_llm":
        return result.as_numpy("text_output")[0].decode()
    length = result.as_numpy("sequence_length")[0][0]
    return result.as_numpy("output_ids")[0][0][:length].tolist()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("door", DOORS)
def test_infer(one_response: TritonServer, llm: LLM, door: str, model: str) -> None:
    (offline,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)
    prompt = offline.prompt_token_ids if model == "tensorrt_llm" else PROMPT
    expected = list(offline.outputs[0].token_ids) if model == "tensorrt_llm" else offline.outputs[0].text
    infer = functools.partial(DOORS[door], one_response, model)
    assert answer(infer(arrays(llm, model)), model) == prompt + expected  # the default of this mode
    assert answer(infer(arrays(llm, model, exclude_input_in_output=True)), model) == expected
    assert answer(infer(arrays(llm, model, exclude_input_in_output=False)), model) == prompt + expected


def test_drafts_that_the_client_brings(one_response: TritonServer, llm: LLM) -> None:
    """As TensorRT-LLM's client of a draft and a target model: answers begin with the prompt, which becomes longer."""
    total, num_drafts = 24, 5
    params = SamplingParams(temperature=0.0, max_tokens=total, ignore_eos=True)
    (offline,) = llm.generate([PROMPT], params, use_tqdm=False)
    prompt = offline.prompt_token_ids

    def extend(ids: list[int], length: int, drafts: list[int]) -> list[int]:
        inputs = arrays(llm, "tensorrt_llm", end_id=-1)
        inputs |= {"input_ids": np.array([ids], np.int32), "input_lengths": np.array([[len(ids)]], np.int32)}
        inputs["request_output_len"] = np.array([[length]], np.int32)
        if drafts:
            inputs["draft_input_ids"] = np.array([drafts], np.int32)
        return answer(infer_grpc(one_response, "tensorrt_llm", inputs), "tensorrt_llm")

    ids = prompt
    while len(ids) < len(prompt) + total:
        wanted = min(num_drafts, len(prompt) + total - len(ids) - 1)
        drafts = extend(ids, wanted, [])[len(ids) :] if wanted else []
        ids = extend(ids, len(drafts) + 1, drafts)
    assert ids == prompt + list(offline.outputs[0].token_ids)


@pytest.mark.parametrize("model", MODELS)
def test_a_stream_and_generate_work_too(one_response: TritonServer, llm: LLM, model: str) -> None:
    inputs = ask(model, llm.tokenizer.encode(PROMPT) if model == "tensorrt_llm" else PROMPT, MAX_TOKENS, False)
    with StreamingClient(one_response.grpc_url) as client:
        (response,) = client.generate(model, inputs)
    assert response.final
    if model != "tensorrt_llm":
        assert generate(one_response.http_url, model, inputs)["text_output"] == response.text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("door", ["grpc", "http"])
def test_what_needs_more_than_one_response_is_refused(
    one_response: TritonServer, llm: LLM, door: str, model: str
) -> None:
    streaming = "streaming" if model == "tensorrt_llm" else "stream"
    for more, message in (
        ({streaming: True}, "Streaming is only supported if model is deployed using decoupled mode"),
        ({"num_return_sequences": 2}, "start the server without --no-decoupled"),
    ):
        inputs = arrays(llm, model) | {
            name: np.array([[value]], bool if value is True else np.int32) for name, value in more.items()
        }
        with pytest.raises(Exception, match=message):
            DOORS[door](one_response, model, inputs)
    pair = {name: np.concatenate([array, array]) for name, array in arrays(llm, model).items()}
    with pytest.raises(Exception, match="start the server without --no-decoupled"):
        DOORS[door](one_response, model, pair)


@pytest.mark.parametrize("model", MODELS)
def test_stop_ends_it_with_what_there_is(one_response: TritonServer, llm: LLM, model: str) -> None:
    inputs = arrays(llm, model, end_id=-1, exclude_input_in_output=True)
    inputs["request_output_len" if model == "tensorrt_llm" else "max_tokens"][:] = ENDLESS
    stop = {"input_ids": np.zeros((1, 1), np.int32), "input_lengths": np.zeros((1, 1), np.int32)}
    stop |= {"request_output_len": np.zeros((1, 1), np.int32), "stop": np.ones((1, 1), bool)}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer_grpc, one_response, model, inputs, "mine")
        wait_until(lambda: used_pages(one_response) > 0, "the request runs")
        assert infer_grpc(one_response, "tensorrt_llm", stop, "mine").as_numpy("output_ids") is None
        assert len(answer(running.result(), model)) > 0
    wait_until(lambda: used_pages(one_response) == 0, "pages free")


@pytest.mark.parametrize("model", MODELS)
def test_200_at_once(one_response: TritonServer, llm: LLM, model: str) -> None:
    prompts = [f"{index} {PROMPT}" for index in range(200)]
    offline = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS), use_tqdm=False)

    def one(index: int) -> Any:
        inputs = arrays(llm, model, exclude_input_in_output=True)
        if model == "tensorrt_llm":
            ids = offline[index].prompt_token_ids
            inputs |= {"input_ids": np.array([ids], np.int32), "input_lengths": np.array([[len(ids)]], np.int32)}
        else:
            inputs["text_input"] = np.array([[prompts[index].encode()]], object)
        return answer(DOORS[list(DOORS)[index % 4]](one_response, model, inputs), model)

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(one, range(200)))
    outputs = [output.outputs[0] for output in offline]
    assert answers == [without_end(o) if model == "tensorrt_llm" else o.text for o in outputs]
    wait_until(lambda: used_pages(one_response) == 0, "all pages free")


@pytest.mark.parametrize("model", MODELS)
def test_a_client_that_is_killed_gives_its_pages_back(one_response: TritonServer, model: str) -> None:
    prompt = [5, 6, 7, 8] if model == "tensorrt_llm" else PROMPT
    process = client_process(one_response, model, json.dumps(ask(model, prompt, ENDLESS, False)))
    try:
        wait_until(lambda: used_pages(one_response) > 0, "the request runs")
    finally:
        process.kill()
    process.wait()
    wait_until(lambda: used_pages(one_response) == 0, "pages free", 30)


def test_what_was_accepted_is_answered_after_sigterm(engine_dir: Path, llm: LLM) -> None:
    long = 600
    text, tokens = fake_text(engine_dir, PROMPT, long), fake_tokens(engine_dir, encode(engine_dir, PROMPT), long)
    expected = {model: tokens if model == "tensorrt_llm" else text for model in MODELS}
    options = ("--no-decoupled", "--drain-timeout", "600")
    with ServeProcess(engine_dir, *options, program=FAKE) as running, ThreadPoolExecutor(9) as pool:

        def answer_times(model: str) -> list[float]:
            """When each answer was there, one request after the other until one is refused."""
            inputs = arrays(llm, model, end_id=-1, exclude_input_in_output=True)
            inputs["request_output_len" if model == "tensorrt_llm" else "max_tokens"][:] = long
            times = []
            while True:
                try:
                    answered = infer_grpc(running, model, inputs)
                except Exception as error:
                    assert re.search("shutting down|UNAVAILABLE|failed to connect", str(error)), error
                    return times
                assert answer(answered, model) == expected[model]
                times.append(time.monotonic())

        asking = [pool.submit(answer_times, model) for model in MODELS * 3]
        wait_until(lambda: used_pages(running) > 0, "requests run")
        signalled = time.monotonic()
        running.signal(signal.SIGTERM)
        times = [when for future in asking for when in future.result()]
        assert any(when > signalled for when in times)
        assert running.wait() == (0, "")


def test_the_mode_that_an_engine_was_built_for(engine_dir: Path, llm: LLM, tmp_path: Path) -> None:
    own = tmp_path / "engine"
    shutil.copytree(engine_dir, own)
    save_manifest(dataclasses.replace(load_manifest(own), decoupled_mode=False), own)
    expected = fake_text(own, PROMPT, MAX_TOKENS)
    for option, start in (("--no-exclude-input-in-output", PROMPT), ("--exclude-input-in-output", "")):
        with ServeProcess(own, "--kv-cache-gib", "0.1", option, program=FAKE) as running:
            assert answer(infer_grpc(running, "ensemble", arrays(llm, "ensemble")), "ensemble") == start + expected
    decoupled = ServeProcess(own, "--kv-cache-gib", "0.1", "--decoupled", program=FAKE)
    with decoupled as running, pytest.raises(Exception, match="decoupled transaction policy"):
        infer_grpc(running, "ensemble", arrays(llm, "ensemble"))
