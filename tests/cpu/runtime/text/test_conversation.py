"""Conversations as a chat template gets them."""

import pytest

from kvforge.tokenization.chat_template import ChatTemplate
from kvforge.tokenization.conversation import FieldError, render_conversation

THOUGHT = "I should look into the basket."
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": '{"what": "pears"}'}}


def replayed(**thoughts: object) -> list[dict]:
    """A conversation whose assistant has thought, called a function and been answered."""
    return [
        {"role": "user", "content": "Count the pears."},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **thoughts},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]


@pytest.mark.parametrize("read", ["reasoning_content", "reasoning"])
def test_reasoning_reaches_the_template_under_either_name(read: str) -> None:
    """Whichever name the client uses and whichever the template reads."""
    template = ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{% if m." + read + " %}<{{ m." + read + " }}>{% endif %}{% endfor %}"
    )
    both = {"reasoning": THOUGHT, "reasoning_content": THOUGHT}
    for thoughts in ({"reasoning": THOUGHT}, {"reasoning_content": THOUGHT}, both, {**both, "reasoning": None}):
        assert render_conversation(template, replayed(**thoughts)) == f"[user][assistant]<{THOUGHT}>[tool]"
    assert render_conversation(template, replayed()) == "[user][assistant][tool]"


@pytest.mark.parametrize(
    ("thoughts", "field"),
    [
        ({"reasoning": "a", "reasoning_content": "b"}, "messages[1].reasoning"),
        ({"reasoning": ["a"]}, "messages[1].reasoning"),
        ({"reasoning_content": 5}, "messages[1].reasoning_content"),
    ],
)
def test_reasoning_that_cannot_be_used(thoughts: dict, field: str) -> None:
    with pytest.raises(FieldError) as error:
        render_conversation(ChatTemplate(""), replayed(**thoughts))
    assert error.value.refusal.field == field
