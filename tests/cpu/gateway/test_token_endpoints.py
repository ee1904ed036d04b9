"""/tokenize and /detokenize in vLLM's fields and llama.cpp's."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lm_eval.utils import RemoteTokenizer
from tokenizers import Tokenizer, processors

from kvforge.gateway.answers.token_answers import AT_ONCE
from kvforge.manifest import TOKENIZER_DIR
from tests.cpu.gateway.chat_template import TEMPLATE
from tests.cpu.gateway.engine_files import write_engine_files
from tests.cpu.gateway.fake_triton import FakeTriton
from tests.cpu.gateway.http_calls import call, post
from tests.cpu.gateway.test_openai_refusals import check

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIRST = 1


@pytest.fixture(scope="module")
def url(start_shared: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A gateway whose tokenizer puts a token before a text."""
    folder = tmp_path_factory.mktemp("tokens")
    (folder / "template.jinja").write_text(TEMPLATE)
    engine = write_engine_files(folder / "tiny")
    file = str(engine / TOKENIZER_DIR / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    first = (tokenizer.id_to_token(FIRST), FIRST)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokenizer.save(file)
    return start_shared(engine=engine, chat_template=folder / "template.jinja")


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = post(f"{url}/{path}", body)
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    return json.loads(answer.body)


def ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "hé"}, [FIRST, *ids("hé")]),
        ({"model": "tiny", "prompt": "hé", "add_special_tokens": False}, ids("hé")),
        ({"prompt": ""}, [FIRST]),
        ({"prompt": "", "add_special_tokens": False}, []),
        ({"content": "hé"}, ids("hé")),
        ({"content": "hé", "add_special": True, "parse_special": True}, [FIRST, *ids("hé")]),
        ({"content": ""}, []),
        ({"messages": HELLO}, ids("[user]hi[a]")),
        ({"messages": HELLO, "add_generation_prompt": False}, ids("[user]hi")),
        ({"messages": HELLO, "add_generation_prompt": False, "continue_final_message": True}, ids("[user]hi")),
        ({"messages": HELLO, "add_special_tokens": True}, [FIRST, *ids("[user]hi[a]")]),
        ({"messages": HELLO, "chat_template_kwargs": {"colour": "red"}}, ids("red[user]hi[a]")),
        ({"messages": HELLO, "reasoning_effort": "low"}, ids("low[user]hi[a]")),
        ({"messages": HELLO, "tools": [TOOL]}, ids(f"{json.dumps(TOOL)}[user]hi[a]")),
    ],
)
def test_tokenize(url: str, triton: FakeTriton, body: dict[str, Any], tokens: list[int]) -> None:
    answer = ask(url, "tokenize", body)
    assert answer == {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}
    assert triton.requests == []


def test_tokens_are_those_of_a_request(url: str, triton: FakeTriton) -> None:
    post(f"{url}/v1/completions", {"prompt": "hé"})
    assert ask(url, "tokenize", {"prompt": "hé"})["tokens"] == triton.requests[-1].prompt
    post(f"{url}/v1/chat/completions", {"messages": HELLO})
    assert ask(url, "tokenize", {"messages": HELLO})["tokens"] == triton.requests[-1].prompt


def test_strings_and_pieces(url: str) -> None:
    answer = ask(url, "tokenize", {"prompt": "hé", "return_token_strs": True})
    assert answer["token_strs"] == ["<s>", "<0x68>", "<0xC3>", "<0xA9>"]
    answer = ask(url, "tokenize", {"content": "hé", "with_pieces": True})
    assert answer["tokens"] == [
        {"id": ord("h") + 3, "piece": "h"}, {"id": 0xC3 + 3, "piece": [0xC3]}, {"id": 0xA9 + 3, "piece": [0xA9]},
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_there_and_back(url: str, seed: int) -> None:
    """Texts up to the context, over several parts of an answer."""
    rng = random.Random(seed)
    text = "".join(rng.choices('aé😀\n"\\ ', k=rng.randrange(1, 1400)))
    tokens = ask(url, "tokenize", {"content": text})["tokens"]
    assert tokens == ids(text)
    if len(tokens) <= 4096:
        answer = ask(url, "detokenize", {"tokens": tokens})
        assert answer == {"prompt": text, "content": text}


def test_more_than_fits_is_counted(url: str) -> None:
    for num in (4095, 4096, AT_ONCE + 1, 8000):
        answer = ask(url, "tokenize", {"content": "x" * num, "return_token_strs": True})
        assert (answer["count"], answer["tokens"], answer["token_strs"]) == (num, ids("x" * num), ["<0x78>"] * num)
    check(post(f"{url}/tokenize", {"content": "x" * 20000}), 400, "content", "has more than 8192 tokens")


def test_special_tokens_are_shown(url: str) -> None:
    assert ask(url, "detokenize", {"model": "tiny", "tokens": [FIRST, *ids("x")]})["prompt"] == "<s>x"
    assert ask(url, "detokenize", {"tokens": []}) == {"prompt": "", "content": ""}


def test_the_harness_tokenizes_remotely(start: Callable[..., str], triton: FakeTriton, tmp_path: Path) -> None:
    """lm-evaluation-harness' own client of vLLM's endpoints."""
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
    )
    url = start(chat_template=file)
    remote = RemoteTokenizer(f"{url}/v1/completions", max_retries=1)
    assert remote.encode("hé") == ids("hé") and remote.decode([FIRST, *ids("hé")]) == "<s>hé"
    assert remote.batch_decode([ids("a"), ids("b")]) == ["a", "b"]
    assert (remote.bos_token, remote.bos_token_id, remote.eos_token_id) == ("<s>", FIRST, 2)
    post(f"{url}/v1/chat/completions", {"messages": HELLO})
    assert remote.encode(remote.apply_chat_template(HELLO)) == triton.requests[-1].prompt


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("tokenize", {}, "prompt", "must be given, one of them"),
        ("tokenize", {"prompt": "x", "content": "x"}, "prompt", "one of them"),
        ("tokenize", {"prompt": ["x"]}, "prompt", "must be text"),
        ("tokenize", {"content": 5}, "content", "must be text"),
        ("tokenize", {"messages": []}, "messages", "must be a list"),
        ("tokenize", {"prompt": "x", "with_pieces": True}, "with_pieces", "is not for prompt"),
        ("tokenize", {"prompt": "x", "tools": []}, "tools", "is not for prompt"),
        ("tokenize", {"content": "x", "with_pieces": "yes"}, "with_pieces", "must be true or false"),
        ("tokenize", {"prompt": "x", "return_token_strs": 1}, "return_token_strs", "must be true or false"),
        ("tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "must be true or false"),
        ("tokenize", {"content": "x", "add_special": 1}, "add_special", "must be true or false"),
        ("tokenize", {"content": "x", "parse_special": False}, "parse_special", "is not supported"),
        ("tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template", "is not supported"),
        ("tokenize", {"prompt": "x", "colour": "red"}, "colour", "Unknown field"),
        ("detokenize", {}, "tokens", "must be a list of token ids"),
        ("detokenize", {"tokens": "x"}, "tokens", "must be a list of token ids"),
        ("detokenize", {"tokens": [5, "x"]}, "tokens", "must be a list of token ids"),
        ("detokenize", {"tokens": [True]}, "tokens", "must be a list of token ids"),
        ("detokenize", {"tokens": [-1]}, "tokens", "none of the model's, 0 to 319"),
        ("detokenize", {"tokens": [320]}, "tokens", "none of the model's, 0 to 319"),
        ("detokenize", {"tokens": [2**70]}, "tokens", "none of the model's"),
        ("detokenize", {"tokens": [5] * 4097}, "tokens", "holds 4097 ids; 4096, the model's context, are the most"),
        ("detokenize", {"tokens": [5], "prompt": "x"}, "prompt", "Unknown field"),
    ],
)
def test_refusals(url: str, path: str, body: dict[str, Any], param: str, words: str) -> None:
    check(post(f"{url}/{path}", body), 400, param, words)


@pytest.mark.parametrize(("path", "body"), [("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [5]})])
def test_another_model(url: str, path: str, body: dict[str, Any]) -> None:
    check(post(f"{url}/{path}", {"model": "large", **body}), 404, "model", "does not exist")


def test_without_a_template(start: Callable[..., str], tmp_path: Path) -> None:
    """Texts are tokenized, and conversations are refused."""
    engine = write_engine_files(tmp_path / "tiny")
    (engine / TOKENIZER_DIR / "chat_template.jinja").unlink()
    url = start(engine=engine)
    assert ask(url, "tokenize", {"prompt": "x"})["tokens"] == ids("x")
    assert ask(url, "detokenize", {"tokens": ids("x")})["prompt"] == "x"
    check(post(f"{url}/tokenize", {"messages": HELLO}), 400, "messages", "has no chat template")
    assert json.loads(call(url, "GET", "/tokenizer_info").body) == {"chat_template": None}


def test_they_need_a_key(start: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret\n")
    url = start(api_key_file=tmp_path / "keys")
    for path, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [5]})):
        assert post(f"{url}/{path}", body).status == 401 == call(url, "GET", "/tokenizer_info").status
        assert post(f"{url}/{path}", body, {"Authorization": "Bearer secret"}).status == 200
