"""Gemma 3 whose prompt asks for calls in Python's notation in blocks of code named tool_code, one in each."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.python_format import PythonFormat

_NOTATION = Notation(begins="```tool_code", closes="```")

FORMAT = PythonFormat(
    name="gemma3",
    signs=(_NOTATION.begins,),
    foreign=(),
    notation=_NOTATION,
    joins="\n",
    gap="\n",
    ends="\n```",
)
