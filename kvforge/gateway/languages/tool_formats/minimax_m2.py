"""MiniMax-M2: all calls between two marks, the function and each argument between others that look like XML."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.tagged_call import Tags
from kvforge.gateway.languages.tagged_format import TaggedFormat

_CALLS = ("<minimax:tool_call>", "</minimax:tool_call>")
_NOTATION = Notation(begins='<invoke name="', closes="</invoke>", ignored=_CALLS)

FORMAT = TaggedFormat(
    name="minimax_m2",
    signs=(_CALLS[0], "<invoke name="),
    foreign=(),
    notation=_NOTATION,
    marks=_CALLS,
    wraps=(f"{_CALLS[0]}\n", f"\n{_CALLS[1]}"),
    joins="\n",
    tags=Tags(("", '">'), ('<parameter name="', '">'), ("", "</parameter>"), ""),
)
