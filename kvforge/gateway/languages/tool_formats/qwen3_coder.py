"""Qwen3-Coder: the function and each argument between marks that look like XML."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.tagged_call import Tags
from kvforge.gateway.languages.tagged_format import TaggedFormat

_NOTATION = Notation(begins="<tool_call>", closes="</tool_call>")

FORMAT = TaggedFormat(
    name="qwen3_coder",
    signs=("<tool_call>", "<function=", "<parameter="),
    foreign=(),
    notation=_NOTATION,
    marks=(_NOTATION.begins, _NOTATION.closes),
    gap="\n",
    joins="\n",
    tags=Tags(("<function=", ">"), ("<parameter=", ">"), ("", "</parameter>"), "</function>", breaks=True),
)
