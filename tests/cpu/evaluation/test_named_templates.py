"""Named chat templates, special tokens and the filters of templates, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.compiler import BuildOptions, build_engine
from kvforge.hub import download
from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import FieldError, checked_arguments
from tests.support.models.checkpoints import make_checkpoint, write_byte_tokenizer

TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TOOLS_SHOWN = "{{ tools | tojson }}" + TURNS
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
MESSAGES = [{"role": "user", "content": "hi"}]
FOLDER = "additional_chat_templates"
NAMED = [{"name": "default", "template": TURNS}, {"name": "tool_use", "template": TOOLS_SHOWN}]

LAYOUTS: dict[str, dict[str, Any]] = {
    "list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "object": {"tokenizer_config.json": {"chat_template": {"default": TURNS, "tool_use": TOOLS_SHOWN}}},
    "one name": {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": TOOLS_SHOWN}]}},
    "folder": {"chat_template.jinja": TURNS, f"{FOLDER}/tool_use.jinja": TOOLS_SHOWN},
    "folder beside a list": {
        "tokenizer_config.json": {"chat_template": NAMED},
        f"{FOLDER}/default.jinja": "D" + TOOLS_SHOWN,
    },
    "both files are default": {"chat_template.jinja": TURNS, f"{FOLDER}/default.jinja": "D" + TOOLS_SHOWN},
    "a file beside a list": {
        "tokenizer_config.json": {"chat_template": NAMED},
        "chat_template.jinja": "F" + TOOLS_SHOWN,
    },
    "only tool_use": {f"{FOLDER}/tool_use.jinja": TOOLS_SHOWN, "tokenizer_config.json": {"chat_template": TURNS}},
    "other names": {"tokenizer_config.json": {"chat_template": [*NAMED, {"name": "rag", "template": "r"}]}},
    "a name twice": {
        "tokenizer_config.json": {"chat_template": [*NAMED, {"name": "default", "template": "2" + TURNS}]}
    },
    "no template": {},
}


def write(path: Path, files: dict[str, Any]) -> Path:
    """A tokenizer with these files; an object is merged into the file's own."""
    path.mkdir(exist_ok=True)
    write_byte_tokenizer(path)
    for name, content in files.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | content)
        file.write_text(content)
    return path


def both(path: Path, tools: Any) -> tuple[str | None, str | None]:
    """What transformers and kvforge make of a conversation; None for a refusal."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        expected = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    except Exception:  # of many kinds
        expected = None
    try:
        template = ChatTemplate.from_dir(path)
        return expected, None if template is None else template.render(MESSAGES, tools=tools)
    except KvforgeError:
        return expected, None


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_templates_are_chosen_as_in_transformers(layout: str, tools: Any, tmp_path: Path) -> None:
    expected, got = both(write(tmp_path, LAYOUTS[layout]), tools)
    assert got == expected
    assert (got is None) == (layout == "no template" or (layout == "only tool_use" and tools is None))


def test_a_processor_s_template_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    path = write(tmp_path, {"chat_template.json": {"chat_template": TURNS}})
    assert both(path, None) == (None, "[user]hi")  # tokenizers of transformers do not look there, processors do
    assert both(write(tmp_path, LAYOUTS["one name"]), TOOLS)[1] == both(path, TOOLS)[0]


def test_tools_that_a_template_does_not_show_are_refused() -> None:
    template = ChatTemplate(TURNS)
    assert template.render(MESSAGES, tools=[]) == "[user]hi"
    with pytest.raises(KvforgeError, match="does not show tools"):
        template.render(MESSAGES, tools=TOOLS)


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "(4)",
        "(true)",
        "(false, 2)",
        "(indent=1)",
        "(true, none, (',', ':'), true)",
        "(separators=('; ', '='))",
        "(sort_keys=true)",
        "(default=1)",
        "(0, '-')",
    ],
)
def test_tojson_has_the_arguments_of_transformers(arguments: str, tmp_path: Path) -> None:
    source = "{{ {'b': 'é<&>', 'a': [1, none]} | tojson" + arguments + " }}"
    expected, got = both(write(tmp_path, {"chat_template.jinja": source}), None)
    assert got == expected and (got is None) == (arguments == "(default=1)")


TOKEN = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TOKEN_FILES: dict[str, dict[str, Any]] = {
    "text": {"tokenizer_config.json": {"bos_token": "<s>", "pad_token": None}},
    "objects": {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **TOKEN}}},
    "a legacy map": {"special_tokens_map.json": {"bos_token": "</s>", "cls_token": TOKEN}},
    "no legacy map": {
        "tokenizer_config.json": {"added_tokens_decoder": {"1": TOKEN | {"special": True}}},
        "special_tokens_map.json": {"bos_token": "</s>"},
    },
    "the model's own": {
        "tokenizer_config.json": {"image_token": "t259", "extra_special_tokens": {"audio_token": "t260"}}
    },
    "its own in the map": {"special_tokens_map.json": {"extra_special_tokens": {"audio_token": "t261", "x": "t262"}}},
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_special_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    names = ("bos_token", "eos_token", "cls_token", "pad_token", "image_token", "audio_token", "x")
    source = ";".join(f"{{{{ {name} }}}}{{{{ {name} is defined }}}}" for name in names)
    expected, got = both(write(tmp_path, {"chat_template.jinja": source, **TOKEN_FILES[case]}), None)
    assert got == expected is not None


def test_a_template_that_cannot_be_parsed_refuses_the_build(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "c")
    for name in ("chat_template.jinja", f"{FOLDER}/tool_use.jinja"):
        write(path, {name: "{% if %}"})
        with pytest.raises(CheckpointError, match=r"chat template.* is not valid.*; correct it") as error:
            build_engine(path, tmp_path / "engine", BuildOptions())
        assert "tool_use" not in name or "tool_use" in str(error.value)
        (path / name).unlink()
    assert not (tmp_path / "engine").exists()


def test_the_folder_of_templates_is_downloaded() -> None:
    assert f"{FOLDER}/*.jinja" in download.TOKENIZER_FILES


@pytest.mark.parametrize(("tools", "reads", "other", "which"), [(None, "a", "b", "default"), (TOOLS, "b", "a", "tool")])
def test_a_template_is_told_only_what_it_reads_itself(tools: Any, reads: str, other: str, which: str) -> None:
    """What another template reads would be dropped in silence."""
    template = ChatTemplate({"default": "{{ a }}" + TURNS, "tool_use": "{{ b }}" + TOOLS_SHOWN})
    assert checked_arguments({reads: 1}, template, tools) == {reads: 1}
    with pytest.raises(FieldError, match=f"is not read by the model's chat template {which}"):
        checked_arguments({other: 1}, template, tools)


def test_arguments_of_a_template_that_is_not_there_are_refused_as_the_conversation_is() -> None:
    template = ChatTemplate({"rag": "{{ a }}"})
    with pytest.raises(FieldError, match="not one is named default"):
        checked_arguments({"a": 1}, template, None)
