"""Chat templates against transformers, and what is wrong with one as a sentence."""

from pathlib import Path

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.tokenization.chat_template import ChatTemplate

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"  # noqa: E501


@pytest.mark.parametrize("content", ["", "e", "The best answer is", "spaces  ", "{{ x }} é"])
@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>\n{% endfor %}",
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}END{% endfor %}",
        "{% for m in messages %}{{ m.content | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    ],
)
def test_conversations_are_rendered_as_in_transformers(source: str, content: str) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    template = ChatTemplate(source, {"bos_token": "<s>"})
    history = [{"role": "system", "content": "e"}, {"role": "user", "content": "Where?"}]
    answered = [*history, {"role": "assistant", "content": content}]

    def expected(messages: list[dict[str, str]], **options: bool) -> str:
        return rendering.render_jinja_template([messages], chat_template=source, bos_token="<s>", **options)[0][0]

    assert template.render(history, add_generation_prompt=True) == expected(history, add_generation_prompt=True)
    assert template.render(answered) == expected(answered)
    assert template.render_open(answered) == expected(answered, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        (TEMPLATE, True),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% if messages[1].role == 'system' %}{{ raise_exception('too late') }}{% endif %}{{ messages }}", False),
        ("{% for m in messages %}{{ m.no.such }}{% endfor %}", False),
    ],
)
def test_templates_say_whether_they_take_later_texts_of_the_system(source: str, takes: bool) -> None:
    template = ChatTemplate(source)
    assert [template.takes_later_system(None) for _ in range(2)] == [takes, takes]


def test_a_last_message_that_a_template_changes_cannot_be_continued() -> None:
    for change in ("{{ m.content | upper }}", "{{ m.content.split('|')[-1] }}", ""):
        template = ChatTemplate(f"{{% for m in messages %}}{change}{{% endfor %}}")
        with pytest.raises(KvforgeError, match="changes the last message, so it cannot be continued"):
            template.render_open([{"role": "assistant", "content": "thought|answer"}])


@pytest.mark.parametrize(
    ("content", "message"), [("{", "cannot be read as JSON"), ("[]", "does not hold a JSON object")]
)
def test_damaged_tokenizer_files_are_one_sentence(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(KvforgeError, match=message):
        ChatTemplate.from_dir(tmp_path)


PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (PARTS, "<system>Be short.<user>Hi<a>"),
        (EITHER, "Be short.Hi"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "Be short.Hi"),
    ],
)
def test_a_template_that_writes_parts_alone_is_given_parts(source: str, written: str) -> None:
    """transformers would leave out what was said; another template gets texts as they are."""
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    template = ChatTemplate(source)
    assert template.render(messages, add_generation_prompt=True) == written
    answered = [*messages, {"role": "assistant", "content": "So"}]
    assert template.render_open(answered).endswith("So")
    assert messages[1] == {"role": "user", "content": "Hi"}
