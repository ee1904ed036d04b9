"""kvforge chat and kvforge generate --chat: from a pipe and at a terminal."""

import io
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvforge import LLM, AsyncLLM, SamplingParams
from kvforge.cli import main
from kvforge.manifest import TOKENIZER_DIR
from tests.support.models.chat import with_chat_template
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
OPTIONS = ["--max-tokens", "6", "--kv-cache-gib", "0.1"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def engine(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(engines.engine(SWIFTKV), tmp_path_factory.mktemp("chat") / "engine")


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, kv_cache_gib=0.1)


def conversation(llm: LLM, *texts: str, system: str | None = None) -> list[str]:
    """The answers to messages of one conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for text in texts:
        messages.append({"role": "user", "content": text})
        answers.append(llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_a_pipe_has_a_message_a_line(engine: Path, llm: LLM, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n\nAnd you?\n/reset\nAnd you?\n/exit\nnever asked\n"))
    assert main(["chat", str(engine), "--system", "Be brief.", *OPTIONS]) == 0
    captured = capsys.readouterr()
    answers = conversation(llm, "Hello", "And you?", system="Be brief.")
    answers += conversation(llm, "And you?", system="Be brief.")
    assert captured.out == "".join(f"{answer}\n" for answer in answers) and captured.err == ""
    assert answers[1] != answers[2], "the first conversation has a history"


def test_a_pipe_ends_at_an_error(engine: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("x" * 600 + "\nHello\n"))
    assert main(["chat", str(engine), *OPTIONS]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvforge: error: the prompt has ")
    assert captured.err.count("\n") == 1


def test_a_terminal_goes_on_after_an_error(engine: Path, llm: LLM, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(f"Hello\n{'x' * 600}\n/help\nAnd you?\n"))
    assert main(["chat", str(engine), *OPTIONS]) == 0
    captured = capsys.readouterr()
    first, second = conversation(llm, "Hello", "And you?")
    assert captured.out == f"> {first}\n> > > {second}\n> \n", "what was refused is not part of the conversation"
    assert captured.err.count("/exit or Ctrl-D leaves") == 2, "at the start and for /help"
    assert "kvforge: error: the prompt has " in captured.err


class Interrupted(FakeSession):
    """Interrupts the process in the tenth step that gives a token, and ends that step once `given_up` says that the
    answer is; `prompts` are the lengths of what was computed."""

    def __init__(self, given_up: Callable[[], bool], **changes: Any) -> None:
        super().__init__(**changes)
        self.given_up, self.prompts = given_up, list[int]()

    def lower(self, step, pools):
        if step.positions[0] == 0:
            self.prompts.append(len(step.input_ids))
        return super().lower(step, pools)

    def upper(self, step, pools):
        logits = super().upper(step, pools)
        if self.num_upper_calls == 10:
            os.kill(os.getpid(), signal.SIGINT)
            while not self.given_up():  # the test's own time limit is the bound
                time.sleep(0.001)
        return logits


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_stops_the_answer_and_not_the_conversation(engine: Path, capsys, monkeypatch) -> None:
    tokenizer = byte_level()
    made: list[AsyncLLM] = []
    session = Interrupted(
        lambda: not made[0]._thread._calls.empty(),
        vocab_size=tokenizer.backend.get_vocab_size(), max_position=4096, max_seq_len=4096, eos_token_ids=(),
    )  # fmt: skip

    def make(*_: object, **__: object) -> AsyncLLM:
        made.append(AsyncLLM(session=session, tokenizer=tokenizer, num_pages=2000, enable_prefix_cache=False))
        made[0]._folder = engine / TOKENIZER_DIR
        return made[0]

    monkeypatch.setattr("kvforge.runtime.async_llm.AsyncLLM", make)
    monkeypatch.setattr("sys.stdin", Terminal("Hello\nAgain\n"))
    assert main(["chat", str(engine), "--max-tokens", "60"]) == 0
    captured = capsys.readouterr()
    assert captured.err.endswith(" …") and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    first, second = captured.out.split("\n> ")[:2]
    assert 0 < len(tokenizer.encode(first.removeprefix("> "))) < 60
    assert second, "the conversation goes on"
    lengths = [len(tokenizer.encode(f"<s>[user]{text}", add_special_tokens=False)) for text in ("Hello", "Again")]
    assert session.prompts[1] > sum(lengths), "with what was written of the answer"


def test_an_interrupt_at_the_prompt_gives_up_the_line(engine: Path, llm: LLM, capsys, monkeypatch) -> None:
    class Interrupting(Terminal):
        def readline(self, *args: int) -> str:
            line = super().readline(*args)
            if line == "half\n":
                raise KeyboardInterrupt
            return line

    monkeypatch.setattr("sys.stdin", Interrupting("half\nHello\n"))
    assert main(["chat", str(engine), *OPTIONS]) == 0
    assert capsys.readouterr().out == f"> \n> {conversation(llm, 'Hello')[0]}\n> \n"


def test_generate_answers_messages(engine: Path, llm: LLM, tmp_path: Path, capsys) -> None:
    (answer,) = conversation(llm, "Hello", system="Be brief.")
    command = ["generate", str(engine), "--prompt", "Hello", *OPTIONS]
    assert main([*command, "--chat", "--system", "Be brief."]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    thinking = '{"enable_thinking": false}'
    assert main([*command, "--chat", "--json", "--chat-template-kwargs", thinking]) == 0
    assert r'[assistant]<think></think>"' in capsys.readouterr().out
    (tmp_path / "other.jinja").write_text("{{ messages[0].content }}!")
    assert main([*command, "--chat", "--json", "--chat-template", str(tmp_path / "other.jinja")]) == 0
    assert '"prompt": "Hello!"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["generate", "--prompt", "x", "--system", "y"], "--system is for conversations; add --chat"),
        (["generate", "--prompt", "x", "--chat", "--chat-template", "/none"], "cannot be read as a chat template"),
        (["chat", "--chat-template-kwargs", "[]"], "--chat-template-kwargs is no JSON object"),
        (["chat", "--chat-template-kwargs", "{"], "--chat-template-kwargs is no JSON "),
        (["chat", "--temperature", "nan"], "temperature is nan"),
    ],
)
def test_errors_are_one_sentence(engine: Path, command: list[str], says: str, capsys) -> None:
    assert main([command[0], str(engine), *command[1:]]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("kvforge: error: ") and says in captured.err
    assert captured.err.count("\n") == 1 and captured.err.endswith(".\n")


@pytest.mark.parametrize("command", [["chat"], ["generate", "--chat", "--prompt", "x"]])
def test_an_engine_without_a_template(engines: EngineShelf, command: list[str], capsys) -> None:
    assert main([command[0], str(engines.engine(SWIFTKV)), *command[1:]]) == 1
    assert capsys.readouterr().err.startswith(
        "kvforge: error: this engine has no chat template; generate from plain text, or give one, "
    )
