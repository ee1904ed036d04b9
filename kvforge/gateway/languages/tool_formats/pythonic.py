"""Llama 3.2 and 4, and Gemma 3, with prompts that ask for a list of calls in Python's notation, perhaps between
<|python_start|> and <|python_end|>."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.python_format import PythonListFormat

_MARKS = ("<|python_start|>", "<|python_end|>")

FORMAT = PythonListFormat(
    name="pythonic",
    signs=("[func_name1(",),
    foreign=("<tool_call>", "[TOOL_CALLS]"),
    notation=Notation(begins="[", separates=",", closes="]", ignored=_MARKS),
    marks=_MARKS,
    wraps=("", "]"),
    joins=", ",
)
