"""GLM-4.5 and later: the function's name, then names and values of arguments in turn."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.tagged_call import Tags
from kvforge.gateway.languages.tagged_format import TaggedFormat

_NOTATION = Notation(begins="<tool_call>", closes="</tool_call>")
_KEY, _VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")

FORMAT = TaggedFormat(
    name="glm45",
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    foreign=(),
    notation=_NOTATION,
    marks=(_NOTATION.begins, _NOTATION.closes, *_KEY, *_VALUE),
    joins="\n",
    tags=Tags(("", ""), _KEY, _VALUE, ""),
)
