"""The model's sampling, the command line's and the request's, as they reach the engine and are told to clients."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.gateway.http.server import make_server
from kvforge.gateway.options import GatewayOptions, gateway_command, parse_options
from kvforge.manifest import TOKENIZER_DIR
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import call, post

BODIES = {
    "completions": {"prompt": "x"},
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
}
TENSORS = {"temperature": "temperature", "top_p": "runtime_top_p", "top_k": "runtime_top_k", "min_p": "min_p",
           "repetition_penalty": "repetition_penalty"}  # fmt: skip
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
MODEL = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.25}
CHOSEN = {"top_k": 5, "min_p": 0.125}
ASKED = {"temperature": 0.25, "top_k": 3}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    path = write_engine_files(tmp_path / "tiny")
    (path / TOKENIZER_DIR / "generation_config.json").write_text(json.dumps({**MODEL, "do_sample": True}))
    return path


def sent(url: str, triton: FakeTriton, path: str, **fields: object) -> dict[str, float]:
    """The sampling that the engine is asked for."""
    assert post(f"{url}/v1/{path}", {**BODIES[path], **fields}).status == 200
    request = triton.requests[-1]
    return {
        name: request.value(tensor) if tensor in request.tensors else NEUTRAL[name] for name, tensor in TENSORS.items()
    }


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {**NEUTRAL, **MODEL}),
        (CHOSEN, {**NEUTRAL, **MODEL, **CHOSEN}),
        ({"generation_config": "none"}, NEUTRAL),
        ({"generation_config": "none", **CHOSEN}, {**NEUTRAL, **CHOSEN}),
    ],
)
def test_who_decides(start, triton: FakeTriton, engine: Path, options: dict, expected: dict) -> None:
    url = start(engine=engine, **options)
    for path in BODIES:
        assert sent(url, triton, path) == expected
        assert sent(url, triton, path, **ASKED) == {**expected, **ASKED}
        assert sent(url, triton, path, **dict.fromkeys(NEUTRAL)) == expected, "null says nothing"
    card = json.loads(call(url, "GET", "/v1/models").body)["data"][0]
    assert card["default_sampling_params"] == expected
    assert json.loads(call(url, "GET", "/page/model").body)["sampling"] == expected


def test_a_response_repeats_what_held(start: Callable[..., str], triton: FakeTriton, engine: Path) -> None:
    url = start(engine=engine)
    for fields in ({}, ASKED):
        answer = json.loads(post(f"{url}/v1/responses", {**BODIES["responses"], **fields}).body)
        assert answer["temperature"] == {**MODEL, **fields}["temperature"] and answer["top_p"] == MODEL["top_p"]


def test_without_the_file_it_is_neutral(start: Callable[..., str], triton: FakeTriton) -> None:
    assert sent(start(), triton, "completions") == NEUTRAL


@pytest.mark.parametrize("is_child", [False, True])
def test_a_gateway_by_itself_prints_them(engine: Path, is_child: bool) -> None:
    """Under `kvforge serve` that does."""
    options = GatewayOptions(engine=engine, grpc="127.0.0.1:9", port=0, exit_with_parent=is_child, **CHOSEN)
    process = subprocess.Popen(gateway_command(options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None and b"OpenAI API at" in process.stdout.readline()
        if not is_child:
            assert b"sampled with temperature 0.5" in process.stdout.readline()
    finally:
        process.terminate()
        rest, _ = process.communicate()
    assert rest == b""


def test_options_survive_the_command_line(engine: Path) -> None:
    options = GatewayOptions(engine=engine, generation_config="none", **CHOSEN)
    assert parse_options(gateway_command(options)[3:]) == options


@pytest.mark.parametrize(
    ("options", "words"), [({"top_p": 5.0}, "top_p is 5.0"), ({}, "generation_config.json cannot")]
)
def test_what_cannot_be_used_ends_the_start(engine: Path, options: dict, words: str) -> None:
    if not options:
        (engine / TOKENIZER_DIR / "generation_config.json").write_text('{"temperature": "warm"}')
    with pytest.raises(KvforgeError, match=words):
        make_server(GatewayOptions(engine=engine, **options))
