"""A chat template computes text and nothing else: the ways out of jinja2's sandbox that are known are shut."""

import pytest

from kvforge.common.errors import KvforgeError
from kvforge.tokenization.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "{{ 7 * 7 }}"}]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__['__builtins__'] }}",
    "{{ lipsum.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['json'] }}",
    "{{ strftime_now.__closure__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ messages|attr('__class__') }}",
    "{{ ''['__class__'] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': messages}) }}",
    "{{ ('{0.__cl' ~ 'ass__}').format(messages) }}",
    "{{ ['{0.__class__}'.format]|map('call', messages)|list }}",
    "{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ config.__class__ }}",
    "{% for x in ().__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    "{{ messages.append({}) }}",
    "{{ messages[0].update(a=1) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends '/etc/passwd' %}",
    "{{ tojson.__globals__ }}",
    "{{ (messages|tojson).__class__ }}",
    "{{ messages|tojson(default=lipsum) }}",
    "{{ messages|tojson(cls=cycler) }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% set f = cycler %}{{ f.__call__.__func__ }}",
]
INSIDE = ("<class", "<built-in", "<function", "<module", "<code", "root:", "uid=", "0x", "<bound")


@pytest.mark.parametrize("template", ESCAPES)
def test_escapes(template: str) -> None:
    """Refused in a sentence, or rendered without anything from outside in it."""
    try:
        text = ChatTemplate(template).render(MESSAGES)
    except KvforgeError as error:
        assert "\n" not in str(error)
        assert "Traceback" not in str(error)
    else:
        assert not any(word in text for word in INSIDE), text
    assert MESSAGES == [{"role": "user", "content": "{{ 7 * 7 }}"}]


def test_what_clients_say_is_no_template() -> None:
    assert ChatTemplate("{{ messages[0].content }}").render(MESSAGES) == "{{ 7 * 7 }}"


BOMBS = [
    "{{ 'a' * 10**11 }}",
    "{{ 'a'|center(10**11) }}",
    "{% set x = 'a' * 10**11 %}",
    "{% if 'a' * 10**11 == 'b' %}{% endif %}",
    "{{ '%99999999999d' % 1 }}",
    "{% for x in 'a' * 10**11 %}{% endfor %}",
    "{% set x = 10**(10**9) %}",
    "{{ ('a' * 10**11)|length }}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_nothing_is_computed_before_a_template_is_rendered(template: str, monkeypatch) -> None:
    """jinja2 computes expressions of constants when it compiles; a server that only reads a template must not."""
    from jinja2 import nodes

    def refuse(*args: object) -> None:
        raise AssertionError("computed")

    for kind in (nodes.BinExpr, nodes.Filter, nodes.Call, nodes.Compare):
        monkeypatch.setattr(kind, "as_const", refuse)
    ChatTemplate(template)
