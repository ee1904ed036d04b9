"""Conversations offline: the prompt is transformers', the answer the engine's to that prompt."""

from pathlib import Path

import pytest

from kvforge import LLM, SamplingParams
from kvforge.common.errors import KvforgeError
from kvforge.manifest import TOKENIZER_DIR
from tests.support.models.chat import TEMPLATE, with_chat_template
from tests.support.models.engines import SWIFTKV
from tests.support.models.shelf import EngineShelf
from tests.support.models.text_tokenizers import byte_level
from tests.support.sessions.fake import FakeSession

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
USER = [{"role": "user", "content": " Where is the fox? "}]
LONGER = [{"role": "system", "content": "Be brief."}, *USER, {"role": "assistant", "content": "There 😀"}, *USER]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def engine(engines: EngineShelf, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_chat_template(engines.engine(SWIFTKV), tmp_path_factory.mktemp("chat") / "engine")


@pytest.fixture(scope="module")
def llm(engine: Path) -> LLM:
    return LLM(engine, kv_cache_gib=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"tools": TOOLS},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"},
    ],
)
def test_the_prompt_is_that_of_transformers(llm: LLM, engine: Path, options: dict) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(engine / TOKENIZER_DIR)
    rest = {name: value for name, value in options.items() if name != "chat_template_kwargs"}
    expected = theirs.apply_chat_template(
        LONGER, tokenize=True, return_dict=False,
        **{"add_generation_prompt": True, **rest, **options.get("chat_template_kwargs", {})},
    )  # fmt: skip
    (result,) = llm.chat(LONGER, GREEDY, use_tqdm=False, **options)
    assert result.prompt_token_ids == expected
    assert result.prompt == llm.chat_prompt(LONGER, **options).text


def test_the_answer_is_the_engines_to_that_prompt(llm: LLM) -> None:
    one, other = llm.chat([USER, LONGER], [GREEDY, SamplingParams(temperature=0.0, max_tokens=3)], use_tqdm=False)
    again = llm.generate([one.prompt_token_ids, other.prompt_token_ids], GREEDY, use_tqdm=False)
    assert one.outputs[0].text == again[0].outputs[0].text and len(other.outputs[0].token_ids) <= 3
    (streamed,) = [o for o in llm.generate_stream(llm.chat_prompt(USER), GREEDY) if o.finished]
    assert (streamed.outputs[0].text, streamed.prompt) == (one.outputs[0].text, one.prompt)
    parts = [
        {"role": "user", "content": [{"type": "text", "text": " Where is"}, {"type": "text", "text": " the fox? "}]}
    ]
    assert llm.chat_prompt(parts) == llm.chat_prompt(USER)


@pytest.mark.parametrize(
    ("messages", "options", "says"),
    [
        ([], {}, "messages must be a list of at least one message"),
        ("hello", {}, "messages is of type str"),
        ([{"role": "robot", "content": "x"}], {}, r"messages\[0\].role must be one of system, developer, user"),
        ([{"role": "user", "content": None}], {}, r"messages\[0\].content must be text"),
        ([{"role": "user", "content": "x", "mood": 1}], {}, r"messages\[0\].mood is not known; remove it"),
        (USER, {"chat_template_kwargs": {"messages": []}}, "is given to the chat template already"),
        (USER, {"chat_template_kwargs": {"x": object()}}, "must hold what JSON can hold"),
        (USER, {"continue_final_message": True}, "continue_final_message excludes add_generation_prompt"),
        (USER, {"chat_template": "{{ raise_exception('no') }}"}, r"refuses this conversation \(no\)"),
        (USER, {"chat_template": "{{"}, "The chat template is not valid"),
        ([{"role": "user", "content": "x" * 600}], {}, "the engine takes at most 511"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(llm: LLM, messages: list, options: dict, says: str) -> None:
    with pytest.raises(KvforgeError, match=says) as caught:
        llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert not llm.engine.has_unfinished()


def test_an_engine_without_a_template_says_so(engines: EngineShelf) -> None:
    tokenizer = byte_level()
    session = FakeSession(vocab_size=tokenizer.backend.get_vocab_size())
    for llm in (
        LLM(engines.engine(SWIFTKV), kv_cache_gib=0.1),
        LLM(session=session, tokenizer=tokenizer, num_pages=200),
    ):
        with pytest.raises(
            KvforgeError, match=r"^this engine has no chat template; generate from plain text, or give one, [^.]*\.$"
        ):
            llm.chat(USER)
        (result,) = llm.chat(USER, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
        assert result.outputs[0].token_ids
