"""What one client asks of a server to hold up all others: each finding's case, and as many of its kind as wanted."""

import contextlib
import http.client
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvforge.common.errors import KvforgeError
from kvforge.serving.client import StreamingClient
from tests.support.hostile.neighbours.guides import KNOWN, random_guide
from tests.support.serving.gateway_process import MODEL
from tests.support.serving.server import ask

TOKENS = 24
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Doors:
    """Where a server takes requests."""

    grpc_url: str
    gateway_url: str


@dataclass(frozen=True)
class Attack:
    """`run` sends it and returns the answer's beginning; whatever it is, there must be one."""

    kind: str
    name: str
    run: Callable[[Doors], str]


def known_attacks(answer_tokens: int = 1200) -> Iterator[Attack]:
    """Each finding's own case; that of long answers takes as long as their tokens, half a minute on two cores."""
    for name, guide in KNOWN.items():
        yield _post("guide", name, {"prompt": "a", "max_tokens": TOKENS, **guide})
    million = list(range(1_000_000))
    yield _post("list", "a million stop tokens", {"prompt": "a", "max_tokens": TOKENS, "stop_token_ids": million})
    yield _triton("list", "a million stop words", {"stop_words_list": _table(1_000_000)})
    yield _triton("list", "half a million bad words", {"bad_words_list": _table(500_000)})
    strings = [f"s{i}" for i in range(400_000)]
    yield _triton("list", "many stop strings", {"stop_strings": strings})
    yield _post("answer", "log-probabilities", {"prompt": "a", "n": 128, "max_tokens": answer_tokens, "logprobs": 20,
                                                "ignore_eos": True})  # fmt: skip
    yield _raw("body", "8 MiB of lists", b'{"model": "tiny", "prompt": ' + b"[" * 100 + b"0," * 4_000_000 + b"0")
    yield _raw("body", "8 MiB of objects", b'{"model": "tiny", "x": [' + b"{}," * 2_700_000 + b"{}]}")
    yield _post("text", "8 MB of text", {"prompt": "word " * 1_600_000, "max_tokens": 4})
    yield _text("15 MB of text", "word " * 3_000_000)
    yield _text("one word of 15 MB", "x" * 15_000_000)


def random_attack(seed: int) -> Attack:
    """One more of a kind."""
    rng = random.Random(seed)
    if seed % 4:
        return _post("guide", f"guide {seed}", {"prompt": "a", "max_tokens": TOKENS, **random_guide(seed - seed // 4)})
    kind = seed // 4 % 5
    size = rng.choice([1 << 16, 1 << 20, 7 << 20])
    if kind == 0:
        part = rng.choice([b"[", b'{"a":', b'"\\u0041",', b"1e9,", b"-0,", b"[[],[]],", b'{"b":0},'])
        return _raw("body", f"body {seed}", b'{"model": "tiny", "prompt": [' + part * (size // len(part)))
    if kind == 1:
        text = rng.choice(["a", "a ", "\u0301", "😀", "\u0000", ".\n", "日本"]) * (size // 4)
        return _text(f"text {seed}", text)
    if kind == 2:
        field = rng.choice(["stop", "stop_token_ids", "logit_bias", "messages", "prompt", "user"])
        values: Any = [rng.randrange(300) for _ in range(size // 16)]
        if field in ("stop", "prompt"):
            values = [str(value) for value in values]
        if field == "logit_bias":
            values = {str(i): 1.0 for i in range(size // 16)}
        return _post("list", f"{field} {seed}", {"prompt": "a", "max_tokens": TOKENS, field: values})
    if kind == 3:
        names = ["stop_words_list", "bad_words_list", "embedding_bias", "draft_input_ids"]
        name = rng.choice(names)
        tables: dict[str, Any] = {
            "embedding_bias": np.ones(size // 4, np.float32), "draft_input_ids": np.ones(size // 4, np.int32),
        }  # fmt: skip
        return _triton("list", f"{name} {seed}", {name: tables.get(name, _table(size // 8))})
    choices = {"n": rng.choice([1, 16, 128]), "logprobs": rng.choice([0, 5, 20]), "ignore_eos": True}
    return _post("answer", f"answer {seed}", {"prompt": "a", "max_tokens": rng.choice([50, 400]), **choices})


def _table(words: int) -> np.ndarray:
    return np.stack([np.arange(words) % 300, np.arange(1, words + 1)]).astype(np.int32)


def _post(kind: str, name: str, fields: dict[str, Any]) -> Attack:
    return _raw(kind, name, json.dumps({"model": MODEL, "temperature": 0, **fields}).encode())


def _raw(kind: str, name: str, body: bytes) -> Attack:
    def run(doors: Doors) -> str:
        parts = urlsplit(doors.gateway_url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read(500).decode(errors="replace")
            while response.read(1 << 20):
                pass
            return f"{response.status} {answer}"
        except (ConnectionResetError, BrokenPipeError, http.client.RemoteDisconnected):
            return "the connection was closed"
        except TimeoutError as error:
            raise AssertionError(f"{name}: no answer in {TIMEOUT_S} s") from error
        finally:
            connection.close()

    return Attack(kind, name, run)


def _text(name: str, text: str) -> Attack:
    return _ask("text", name, "ensemble", ask("ensemble", text, TOKENS))


def _triton(kind: str, name: str, more: dict[str, Any]) -> Attack:
    return _ask(kind, name, "tensorrt_llm", ask("tensorrt_llm", [5, 9], TOKENS, **more))


def _ask(kind: str, name: str, model: str, inputs: dict[str, Any]) -> Attack:
    def run(doors: Doors) -> str:
        with StreamingClient(doors.grpc_url) as client:
            try:
                return f"{len(list(client.generate(model, inputs, timeout_s=TIMEOUT_S)))} responses"
            except KvforgeError as error:
                assert "the server sent nothing" not in str(error), name
                return str(error)

    return Attack(kind, name, run)
