"""Granite 3: <|tool_call|> and a list of objects. Granite 3.1 writes <tool_call> in the mark's place. Granite 4 writes
hermes."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.object_format import ObjectFormat

_BEGINS = "<|tool_call|>"

FORMAT = ObjectFormat(
    name="granite",
    signs=("<|start_of_role|>", _BEGINS),
    foreign=(),
    notation=Notation(begins=_BEGINS, opens="[", separates=",", closes="]", also=("<tool_call>",)),
)
