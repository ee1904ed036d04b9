"""How far one follows a request, or options, through the code: a stay is a file whose functions are handed them, until
one of another file is. Each function counts once, where it is entered first. A climb calls from a lower module a higher
one, which imports it however far."""

import argparse
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvforge.cli import make_parser
from kvforge.common.records import from_text
from kvforge.compiler import build
from kvforge.compiler.options import BuildOptions, ResolvedOptions
from kvforge.compiler.targets import cpu
from kvforge.gateway.endpoints import Endpoint
from kvforge.gateway.model import ServedModel
from kvforge.gateway.options import GatewayOptions
from kvforge.gateway.requests.request_reader import RequestReader
from kvforge.serving.options import EngineOptions
from kvforge.serving.server import launcher
from kvforge.serving.stub.config import StubConfig
from kvforge.serving.triton_config import TritonConfig
from tests.cpu.gateway.engine_files import write_engine_files
from tests.support.import_graph import ROOT, TOPS, layers, module_graph, module_name
from tests.support.models.checkpoints import make_checkpoint


class Stop(Exception):
    """Far enough."""


def stop(*_: Any, **__: Any) -> None:
    raise Stop


@cache
def module_of(file: str) -> str | None:
    """The module of the product that a file is."""
    path = Path(file)
    inside = ROOT in path.parents and path.relative_to(ROOT).parts[0] in TOPS
    return module_name(path.relative_to(ROOT)) if inside else None


@cache
def floors() -> dict[str, int]:
    """How many modules lie below each one, one upon the other."""
    return {module: number for number, floor in enumerate(layers(module_graph())) for module in floor}


def walk(call: Callable[[], object], is_it: Callable[[Any], bool]) -> tuple[list[str], list[tuple[str, str]]]:
    """The stays, and the climbs from one module to another, of a second call: the first one imports."""
    stays: list[str] = []
    steps: list[tuple[str, str]] = []
    seen = set()

    def enter(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        module = None if event != "call" or code in seen else module_of(code.co_filename)
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if module is None or code.co_name[0] == "<" or not any(is_it(frame.f_locals.get(name)) for name in arguments):
            return
        seen.add(code)
        if stays[-1:] != [module]:
            stays.append(module)
        if frame.f_back is not None and (caller := module_of(frame.f_back.f_code.co_filename)) is not None:
            steps.append((caller, module))

    for profiler in (None, enter):
        sys.setprofile(profiler)
        try:
            call()
        except Stop:
            pass
        finally:
            sys.setprofile(None)
    return stays, [(low, high) for low, high in steps if floors()[low] < floors()[high]]


def test_a_chat_request(tmp_path: Path) -> None:
    options = GatewayOptions(engine=write_engine_files(tmp_path / "tiny"))
    reader = RequestReader(ServedModel.load(options), options)
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0.5, "stream": True}
    data = json.dumps(body).encode()
    stays, climbs = walk(
        lambda: reader.read(data, Endpoint.CHAT), lambda it: it is data or (isinstance(it, dict) and "messages" in it)
    )
    assert 5 < len(stays) <= 15 and not climbs, (stays, climbs)


def test_options_of_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setattr(cpu, "write_graphs", stop)
    options = BuildOptions(kv_policy="snapkv", kv_dtype="int8", weight_dtype="int8")
    stays, climbs = walk(
        lambda: build.build_engine(checkpoint, tmp_path / "engine", options),
        lambda it: isinstance(it, (BuildOptions, ResolvedOptions)),
    )
    assert 5 < len(stays) <= 20 and not climbs, (stays, climbs)


def test_options_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to Triton's start, and in the models and the engine's process."""
    engine = write_engine_files(tmp_path / "tiny")
    ports = [word for name in ("http", "grpc", "metrics", "health", "openai") for word in (f"--{name}-port", "0")]
    args = make_parser().parse_args(["serve", str(engine), *ports])
    monkeypatch.setattr(launcher.subprocess, "Popen", stop)
    run_dir = tmp_path / "run"
    (run_dir / "models").mkdir(parents=True)
    parameters = {"gpt_model_path": str(engine), "run_dir": str(run_dir)}
    config = {"input": [], "max_batch_size": 4, "parameters": {k: {"string_value": v} for k, v in parameters.items()}}
    given = {"model_name": "tensorrt_llm", "model_version": "1", "model_config": json.dumps(config)}

    def serve() -> None:
        with pytest.raises(Stop):
            args.run(args)
        command = StubConfig.of(TritonConfig.of(given)).engine_command
        assert from_text(EngineOptions, command[command.index("--options") + 1]).of_engine() == {}

    kinds = (argparse.Namespace, EngineOptions, GatewayOptions, TritonConfig)
    stays, climbs = walk(serve, lambda it: isinstance(it, kinds) or it is given)
    assert 10 < len(stays) <= 30 and not climbs, (stays, climbs)


def test_the_count_is_able_to_fail() -> None:
    found: dict[str, Any] = {}
    for file, source in (
        ("cli", "def high(it): low(None, it)"),
        ("common/errors", "def low(then, it): then and then(it)"),
    ):
        exec(compile(source, f"{ROOT}/kvforge/{file}.py", "exec"), found)
    assert walk(lambda: found["high"](1), lambda it: it == 1) == (["kvforge.cli", "kvforge.common.errors"], [])
    climb = [("kvforge.common.errors", "kvforge.cli")]
    assert walk(lambda: found["low"](found["high"], 1), lambda it: it == 1)[1] == climb
    assert walk(lambda: found["high"](2), lambda it: it == 1) == ([], [])
