"""Texts that a tokenizer panics on, is slow on, or that are extreme: each is answered, and the neighbours go on."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvforge import LLM
from kvforge.common.errors import KvforgeError
from kvforge.runtime import SamplingParams
from kvforge.serving.client import StreamingClient
from kvforge.serving.server.launcher import ServerOptions, TritonServer
from tests.support.models.engines import with_tokenizer
from tests.support.models.text_tokenizers import PANICKING_TEXT, odd
from tests.support.serving.server import ask, infer_input, started, text_of, used_pages, wait_until

MODELS = ("ensemble", "tensorrt_llm_bls")
MAX_SEQ_LEN = 4096
PANICS = "a" * 26 + "c"
SLOW = " " * (5 * MAX_SEQ_LEN)
"""Cannot be told by its bytes, takes about a second, and is refused."""
UNDECODABLE = {"embedding_bias_words": np.array([[PANICKING_TEXT.encode()]], np.object_),
               "embedding_bias_weights": np.array([[1e4]], np.float32)}  # fmt: skip
EXTREME = {
    "NUL": "\0" * 50, "astral": "😀" * 100, "combining": "e" + "\u0301" * 500, "right to left": "\u202eשלום\u200f" * 20,
    "joined": "👩\u200d👩\u200d👧" * 30, "not characters": "\ufffe\uffff\U0010ffff", "byte order": "\ufeffa",
    "special tokens": "</s><s><unk>" * 40, "byte pieces": "<0x41><0x00>", "lines": "\r\n\u2028\u2029\x85" * 20,
    "one space": " ",
}  # fmt: skip


@pytest.fixture(scope="module")
def odd_server(engine_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    engine = with_tokenizer(engine_dir, tmp_path_factory.mktemp("odd") / "engine", odd)
    with started(TritonServer(engine, ServerOptions(kv_cache_gib=0.1, max_seq_len=MAX_SEQ_LEN))) as running:
        yield running


def refusal(server: TritonServer, model: str, inputs: dict[str, Any]) -> str:
    with StreamingClient(server.grpc_url) as client, pytest.raises(KvforgeError) as caught:
        list(client.generate(model, inputs))
    return str(caught.value)


def listed(name: str, words: list[bytes]) -> dict[str, np.ndarray]:
    return {name: np.array([words], np.object_)}


def send(server: TritonServer, model: str, text: str, lists: dict[str, np.ndarray]) -> str:
    """As text_of, with lists of words."""
    tensors = {"text_input": np.array([[text.encode()]], np.object_), "max_tokens": np.array([[4]], np.int32),
               "stream": np.array([[True]])} | lists  # fmt: skip
    inputs = [_input(name, array) for name, array in tensors.items()]
    with StreamingClient(server.grpc_url) as client:
        return "".join(response.text for response in client.send(model, inputs))


def _input(name: str, array: np.ndarray) -> Any:
    if array.dtype != np.float32:
        return infer_input(name, array)
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return tensor


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("text", [PANICS, "b" * 5000 + PANICS])
def test_a_panic_is_answered_with_one_sentence(odd_server: TritonServer, model: str, text: str) -> None:
    before = text_of(odd_server, ask(model, "hello", 8), model)
    for _ in range(3):
        words = refusal(odd_server, model, ask(model, text, 4))
        assert words.endswith("the model's tokenizer fails on this text; change the text")
        assert "/" not in words and "\n" not in words
    assert text_of(odd_server, ask(model, "hello", 8), model) == before


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_a_panic_in_a_list_of_words(odd_server: TritonServer, model: str, name: str) -> None:
    lists = listed(name, [b"fine", PANICS.encode()])
    if name == "embedding_bias_words":
        lists["embedding_bias_weights"] = np.ones((1, 2), np.float32)
    with pytest.raises(KvforgeError, match=r"the model's tokenizer fails on this text; change the text$"):
        send(odd_server, model, "hello", lists)


@pytest.mark.parametrize("model", MODELS)
def test_tokens_that_cannot_be_decoded(odd_server: TritonServer, model: str) -> None:
    """The engine lets go of the request, which has no reader left."""
    for _ in range(3):
        with pytest.raises(KvforgeError, match=r"fails on these tokens, so they cannot be shown as text$"):
            send(odd_server, model, "hello", UNDECODABLE)
    assert text_of(odd_server, ask(model, "hello", 8), model)
    wait_until(lambda: used_pages(odd_server) == 0, "all pages free")


def test_postprocessing_called_directly(odd_server: TritonServer) -> None:
    tensors = {"TOKENS_BATCH": np.array([[[300]]], np.int32), "SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    inputs = [infer_input(name, array) for name, array in tensors.items()]
    with StreamingClient(odd_server.grpc_url) as client, pytest.raises(KvforgeError, match="fails on these tokens"):
        list(client.send("postprocessing", inputs))


@pytest.mark.parametrize("model", MODELS)
def test_short_texts_pass_long_ones(odd_server: TritonServer, model: str) -> None:
    refused: list[str] = []
    attackers = [
        threading.Thread(target=lambda: refused.append(refusal(odd_server, model, ask(model, SLOW, 4))))
        for _ in range(8)
    ]
    for attacker in attackers:
        attacker.start()
    num_served = 0
    while any(attacker.is_alive() for attacker in attackers):
        assert text_of(odd_server, ask(model, "hello", 2), model)
        num_served += 1
    assert len(refused) == len(attackers)
    assert all("shorten it, or give a larger --max-seq-len" in words for words in refused)
    assert num_served > 2 * len(attackers)


@pytest.mark.parametrize("kind", EXTREME)
def test_extreme_texts_are_served_as_offline(server: TritonServer, llm: LLM, kind: str) -> None:
    (expected,) = llm.generate(EXTREME[kind], SamplingParams(max_tokens=8, temperature=0.0), use_tqdm=False)
    for model in MODELS:
        assert text_of(server, ask(model, EXTREME[kind], 8), model) == expected.outputs[0].text


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["stop_words", "bad_words", "embedding_bias_words"])
def test_extreme_words_are_served_or_refused(server: TritonServer, model: str, name: str) -> None:
    cases = [[text.encode()] for text in EXTREME.values()]
    cases += [[b""] * 4096, [b"x" * 32] * 4096, [b"a" * (1 << 17)], [b"\0", b"\0\0"]]
    cases += [[b"x"] * 4097, [b"x" * 33] * 4096, [b"\xff"], [b"\xed\xa0\x80"]]  # the last: a lone surrogate
    outcomes = []
    for words in cases:
        lists = listed(name, words)
        if name == "embedding_bias_words":
            lists["embedding_bias_weights"] = np.full((1, len(words)), 0.5, np.float32)
        try:
            send(server, model, "hello", lists)
            outcomes.append("")
        except KvforgeError as error:
            outcomes.append(str(error))
    assert outcomes[: len(EXTREME)] == [""] * len(EXTREME), outcomes
    assert [bool(words) for words in outcomes[-4:]] == [True] * 4
    for words in filter(None, outcomes):
        assert f"'{name}'" in words and "\n" not in words
    assert text_of(server, ask(model, "hello", 2), model)
