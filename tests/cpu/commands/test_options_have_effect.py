"""Every option of generate, chat and serve: with it or with another value, something else is asked of the engine, the
server or the gateway."""

import argparse
import io
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvforge.cli import main, make_parser
from kvforge.common.addresses import Address
from kvforge.common.errors import KvforgeError
from kvforge.foreign_options import ALWAYS_ON
from kvforge.manifest import load_manifest, save_manifest
from tests.cpu.gateway.engine_files import write_engine_files
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import changed
from tests.support.sessions.fake_states import STATES

NGRAM = ["--speculative-method", "ngram"]
SUFFIX = ["--speculative-method", "suffix"]
SAMPLING: dict[str, tuple[list[str], ...]] = {
    "--max-tokens": (["3"], ["4"]), "--generation-config": (["auto"], ["none"]), "--temperature": (["0.5"], ["0.6"]),
    "--top-k": (["3"], ["4"]), "--top-p": (["0.5"], ["0.6"]), "--min-p": (["0.5"], ["0.6"]),
    "--repetition-penalty": (["1.5"], ["1.6"]), "--presence-penalty": (["0.5"], ["0.6"]),
    "--frequency-penalty": (["0.5"], ["0.6"]),
    "--min-tokens": (["1"], ["2"]), "--seed": (["3"], ["4"]), "--stop": (["a"], ["b"]),
    "--bad-word": (["a"], ["b"]),
}  # fmt: skip
SPECULATION: dict[str, tuple[list[str], ...]] = {
    "--speculative-method": (["ngram"], ["early_exit"]), "--num-speculative-tokens": (["3"], ["4"], NGRAM),
    "--draft-engine": (["DIR/tiny"], ["DIR/other"], ["--speculative-method", "draft_model"]),
    "--prompt-lookup-max": (["3"], ["5"], NGRAM), "--prompt-lookup-min": (["1"], ["3"], NGRAM),
    "--suffix-sharing": (["all"], ["off"], SUFFIX), "--suffix-max-tokens": (["3"], ["5"], SUFFIX),
    "--early-exit-threshold": (["0.5"], ["0.6"]), "--early-exit-prompts": ([], None, ["--early-exit-threshold", "0.5"]),
    "--exact-first": (["1"], ["2"]), "--exact-last": (["1"], ["2"]), "--exact-share": (["0.5"], ["0.25"]),
}  # fmt: skip
CHAT: dict[str, tuple[list[str], ...]] = {
    "--system": (["a"], ["b"]), "--chat-template": (["DIR/a.jinja"], ["DIR/b.jinja"]),
    "--chat-template-kwargs": (['{"a": 1}'], ['{"a": 2}'], ["--chat-template", "DIR/a.jinja"]),
}  # fmt: skip
LENGTHS = {"--kv-cache-gib": (["1"], ["2"]), "--max-seq-len": (["100"], ["200"])}
PREFIXES = {
    "--prefix-dir": (["a"], ["b"]),
    "--prefix-gib": (["1"], ["2"], ["--prefix-dir", "a"]),
    "--prefix-host-gib": (["1"], ["2"]),
    "--snapshot-every": (["1"], ["0"]),
    "--num-snapshots": (["1"], ["2"]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "generate": {
        **SAMPLING, **SPECULATION, **LENGTHS, **PREFIXES, "--prompt": (["a"], ["b"]), "--chat": ([], None),
        **{name: (*pair[:2], ["--chat", *(pair[2] if len(pair) > 2 else [])]) for name, pair in CHAT.items()},
        "--min-tokens": (["1"], ["2"]), "--n": (["1"], ["2"]), "--json-schema": (["DIR/a.json"], ["DIR/b.json"]),
        "--regex": (["a"], ["b"]), "--grammar": (["DIR/a.json"], ["DIR/b.json"]), "--ignore-eos": ([], None),
        "--logprobs": (["1"], ["2"]), "--json": ([], None),
    },
    "chat": {**SAMPLING, **SPECULATION, **LENGTHS, **PREFIXES, **CHAT},
    "serve": {
        **SPECULATION, **LENGTHS, **PREFIXES, "--async-scheduling": ([], None),
        "--address": (["127.0.0.1"], ["127.0.0.2"]),
        **{f"--{name}-port": (["0"], ["7"]) for name in ("http", "grpc", "metrics", "health")},
        **{f"--{name}-address": (["127.0.0.1"], ["127.0.0.2"]) for name in ("http", "grpc", "metrics", "health")},
        "--openai-address": (["127.0.0.1"], ["127.0.0.2"]),
        "--max-num-seqs": (["2"], ["3"]), "--max-num-tokens": (["9"], ["8"]), "--no-prefix-cache": ([], None),
        "--max-queue-size": (["2"], ["3"]), "--max-request-bytes": (["2000"], ["3000"]),
        "--drain-timeout": (["2"], ["3"]), "--decoupled": ([], None, ["--no-decoupled"]),
        "--stream-interval": (["2"], ["3"]), "--exclude-input-in-output": ([], None), "--wrap-token-ids": ([], None),
        "--no-openai": ([], None), "--openai-port": (["0"], ["18765"]),
        "--api-key-file": (["DIR/a.json"], ["DIR/b.json"]), "--served-model-name": (["a"], ["b"]),
        "--chat-template": (["DIR/a.jinja"], ["DIR/b.jinja"]),
        "--tool-call-format": (["hermes"], ["mistral"]), "--no-page": ([], None),
        "--reasoning-format": (["think"], ["none"]),
        "--open-page": ([], None), "--cors-origin": (["*"], ["http://a"]),
        **{f"--{name}": (["20000"], ["30000"]) for name in ("max-body-bytes", "max-answer-bytes", "max-requests",
           "max-connections", "max-n", "max-prompts", "max-stop")},
        **{f"--{name}": (["2"], ["3"]) for name in ("request-timeout", "header-timeout", "body-timeout",
           "write-timeout", "keep-alive")},
        **{name: SAMPLING[name][:2] for name in ("--generation-config", "--temperature", "--top-k",
           "--top-p", "--min-p", "--repetition-penalty")},
        "--no-restart": ([], None), "--max-restarts": (["2"], ["3"]), "--restart-window": (["2"], ["3"]),
        "--canary-period": (["2"], ["3"]), "--control-apis": ([], None), "--log-file": (["DIR/a.log"], ["DIR/b.log"]),
        "--log-format": (["text"], ["json"]), "--log-level": (["info"], ["error"]),
    },
}  # fmt: skip
BUILDING: dict[str, Any] = {
    "--revision": (["a"], ["b"]), "--target": (["cpu"], ["vllm"]), "--dtype": (["float32"], ["bfloat16"]),
    "--weight-dtype": (["int8"], ["int4"]), "--weight-bits": (["5"], ["6"]),
    "--kv-dtype": (["fp8"], ["int8"]), "--page-size": (["8"], ["16"]),
    "--max-draft-len": (["1"], ["2"]), "--no-early-exit": ([], None), "--kv-policy": (["full"], ["snapkv"]),
    "--engine-python": (["a"], ["b"]), "--tensor-parallel-size": (["1"], ["2"]),
    "--pipeline-parallel-size": (["1"], ["2"]), "--engine-args": (["{}"], ['{"a": 1}']),
    "--copy-checkpoint": ([], None), "--compute-capabilities": (["8.9"], ["current"]),
}  # fmt: skip
"""For checkpoints."""
ENGINES = {
    "--prefix-host-gib": "gpu",
    "--async-scheduling": "gpu",
    "--snapshot-every": "states",
    "--num-snapshots": "states",
}
"""Where it is not "tiny", the engine that the option is for."""
"""For engines of target cuda."""
DISPLAY = {"--help", "--verbose", "--quiet"}
ELSEWHERE = {"--threads", "--api-key", "--model"}
"""Put into the environment, or for servers: tests/cpu/common/test_threads.py, test_serve_gateway.py,
tests/cpu/gateway/test_remote_commands.py."""


class Stop(KvforgeError):
    """Enough is known."""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What commands ask of everything that would cost time, in order."""
    engine = write_engine_files(tmp_path / "tiny")
    save_manifest(changed(load_manifest(engine), max_draft_len=8, early_exit=True, num_layers=2, cut=1), engine)
    (engine / "tokenizer" / "generation_config.json").write_text('{"temperature": 0.75}')
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps({"title": name}))
        (tmp_path / f"{name}.jinja").write_text(f"{name}{{{{ a }}}}{{{{ messages | tojson }}}}")
    for name in ("other", "gpu", "states"):
        shutil.copytree(engine, tmp_path / name)
    save_manifest(changed(load_manifest(engine), target="cuda"), tmp_path / "gpu")
    states = {"linear": STATES, "num_layers": 3, "cut": 3, "early_exit": False}
    save_manifest(changed(load_manifest(engine), **states), tmp_path / "states")
    found: list[Any] = []
    server = SimpleNamespace(ports=dict.fromkeys(("http", "grpc", "metrics"), 0), http_url="")

    def record(name: str) -> Callable[..., Any]:
        def make(*args: Any, **kwargs: Any) -> Any:
            found.append((name, repr(args), repr(sorted(kwargs.items()))))
            nothing = {name: lambda *_: None for name in ("close", "start")}
            return SimpleNamespace(url="", port=0, report=None, run=lambda ready, _: ready(server), **nothing)

        return make

    class Llm:
        tokenizer = byte_level()

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            found.append((args, kwargs))

        def chat_prompt(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

        def generate(self, *args: Any, **kwargs: Any) -> list[Any]:
            found.append(("generate", args))
            return []

        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            found.append(("run", args))
            return []

    class AsyncLlm(Llm):
        async def start(self) -> None: ...

        async def close(self) -> None: ...

        async def chat(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            found.append((args, kwargs))
            raise Stop
            yield

    listen = Address.listen

    def listen_anywhere(self: Address, port: int, *args: Any, **kwargs: Any) -> Any:
        """Another server may have the default ports."""
        found.append(("listen", port))
        return listen(self, 0, *args, **kwargs)

    monkeypatch.setattr(Address, "listen", listen_anywhere)
    monkeypatch.setattr("kvforge.runtime.LLM", Llm)
    monkeypatch.setattr("kvforge.runtime.AsyncLLM", AsyncLlm)
    for path in ("serving.server.supervisor.Supervisor", "gateway.http.process.GatewayProcess",
                 "serving.logs.pump.LogSink", "serving.health.canary.Canary", "serving.health.server.HealthServer",
                 "engine_cache.build.cached_engine", "commands.serve.open_on_desktop"):  # fmt: skip
        monkeypatch.setattr(f"kvforge.{path}", record(path))
    monkeypatch.setattr("kvforge.serving.logs.pump.log_to", lambda *_: nullcontext())
    monkeypatch.setattr("kvforge.commands.sampling_options.display_of", lambda _: SimpleNamespace(note=lambda _: None))
    yield found


def outcome(asked: list[Any], folder: Path, command: str, engine: str, arguments: list[str]) -> str:
    asked.clear()
    given = [text.replace("DIR", str(folder)) for text in arguments]
    args = make_parser().parse_args([command, engine, *given])
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Stop) if command == "chat" else nullcontext():
        patched.setattr("sys.stdin", io.StringIO("Hello\n"))
        args.run(args)
    assert asked
    return re.sub("0x[0-9a-f]+", "", repr(asked))


def declared(command: str) -> set[str]:
    parser = make_parser()
    commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {action.option_strings[-1].replace("--no-decoupled", "--decoupled")
            .replace("--no-exclude-input", "--exclude-input")
            for action in commands.choices[command]._actions
            if action.option_strings and action.help is not argparse.SUPPRESS}  # fmt: skip


@pytest.mark.parametrize("command", OPTIONS)
def test_every_option_is_walked(command: str) -> None:
    known = {*OPTIONS[command], *DISPLAY, *BUILDING}
    missing = (declared(command) - ELSEWHERE) ^ known
    assert not missing, f"{missing}: give each option of {command} two values in OPTIONS, one of sampling in SAMPLING"


@pytest.mark.parametrize(("command", "option"), [(c, option) for c, table in OPTIONS.items() for option in table])
def test_two_values_ask_for_two_things(asked: list[Any], tmp_path: Path, command: str, option: str) -> None:
    one, other, *more = OPTIONS[command][option]
    rest = more[0] if more else []
    engine = str(tmp_path / ENGINES.get(option, "tiny"))
    prompt = ["--prompt", "x"] if command == "generate" and option != "--prompt" else []
    first = outcome(asked, tmp_path, command, engine, [*prompt, *rest, option, *one])
    assert first == outcome(asked, tmp_path, command, engine, [*prompt, *rest, option, *one])
    second = [*prompt, *rest] if other is None else [*prompt, *rest, option, *other]
    assert first != outcome(asked, tmp_path, command, engine, second)


@pytest.mark.parametrize("name", ALWAYS_ON)
def test_what_is_always_on_may_be_asked_for(asked: list[Any], tmp_path: Path, name: str) -> None:
    engine = str(tmp_path / "tiny")
    assert outcome(asked, tmp_path, "serve", engine, [name]) == outcome(asked, tmp_path, "serve", engine, [])


def test_what_is_switched_off_is_not_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "ENGINE", "--no-prefix-cache", "--enable-prefix-caching"])
    assert "not allowed with argument --no-prefix-cache" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "serve"])
@pytest.mark.parametrize("option", BUILDING)
def test_options_of_a_build_are_of_another_engine(
    asked: list[Any], tmp_path: Path, monkeypatch, command: str, option: str
) -> None:
    one, other = BUILDING[option]
    prompt = ["--prompt", "x"] if command == "generate" else []

    def build(name: Path, options: Any, **more: Any) -> Any:
        asked.append((str(name), options, str(more["on_hub"])))
        raise Stop

    monkeypatch.setattr("kvforge.commands.engine_argument.find_checkpoint", lambda *_, **__: Path("SNAPSHOT"))
    monkeypatch.setattr("kvforge.engine_cache.build.cached_engine", build)
    found = []
    for value in (one, other):
        asked.clear()
        arguments = [] if value is None else [option, *value]
        args = make_parser().parse_args([command, "owner/name", *prompt, *arguments])
        with pytest.raises(Stop):
            args.run(args)
        found.append(repr(asked))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "ENGINE", "--prompt", "x", "--system", "x"], "--system is for conversations"),
        (["serve", "ENGINE", "--no-openai", "--openai-port", "0"], "--openai-port is for the OpenAI gateway"),
        (["serve", "ENGINE", "--no-openai", "--temperature", "0"], "--temperature is for the OpenAI gateway"),
        (["serve", "ENGINE", "--no-decoupled", "--generation-config", "none"], "--generation-config is for the OpenAI"),
        (["serve", "ENGINE", "--no-openai", "--keep-alive", "3"], "--keep-alive is for the OpenAI gateway"),
        (["serve", "ENGINE", "--page-size", "8"], "--page-size is fixed when building"),
        (["generate", "ENGINE", "--prompt", "x", "--kv-dtype", "fp8"], "--kv-dtype is fixed when building"),
    ],
)
def test_what_would_have_no_effect_is_refused(asked: list[Any], tmp_path: Path, capsys, arguments, says: str) -> None:
    given = [text.replace("ENGINE", str(tmp_path / "tiny")) for text in arguments]
    assert main(given) == 1
    assert says in capsys.readouterr().err


def test_two_options_of_restarts_exclude_each_other(capsys) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "ENGINE", "--no-restart", "--max-restarts", "3"])
    assert "--max-restarts" in capsys.readouterr().err


def test_serve_prints_how_silent_requests_are_sampled(asked: list[Any], tmp_path: Path, monkeypatch, capsys) -> None:
    server = SimpleNamespace(ports={"http": 1, "grpc": 2, "metrics": 3})
    supervisor = SimpleNamespace(report=None, run=lambda announce, _: announce(server))
    monkeypatch.setattr("kvforge.serving.server.supervisor.Supervisor", lambda *_: supervisor)
    assert main(["serve", str(tmp_path / "tiny"), "--openai", "--openai-port", "0", "--top-k", "4"]) == 0
    printed = capsys.readouterr().out
    assert "sampled with temperature 0.75 (generation_config.json), top_k 4 (command line)" in printed
    assert "tiny as model 'tiny' (Triton's is 'ensemble'), after" in printed, "what clients give as model"
