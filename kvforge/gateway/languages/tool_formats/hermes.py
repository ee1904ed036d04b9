"""Qwen 2.5, Qwen 3 and Hermes: <tool_call>, the object and </tool_call> on lines of their own."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.object_format import ObjectFormat

FORMAT = ObjectFormat(
    name="hermes",
    signs=("<tool_call>", "arguments"),
    foreign=("<function=", "<arg_key>", "<tool_sep>"),
    notation=Notation(begins="<tool_call>", closes="</tool_call>"),
    gap="\n",
)
