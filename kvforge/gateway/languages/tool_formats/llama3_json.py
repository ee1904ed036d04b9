"""Llama 3.1 to 3.3: the bare object, perhaps after <|python_tag|>."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.object_format import ObjectFormat

FORMAT = ObjectFormat(
    name="llama3_json",
    signs=("<|start_header_id|>", '"parameters": '),
    foreign=("<tool_call>", "<function=", "[TOOL_CALLS]"),
    notation=Notation(begins='{"name": "', is_object=True, ignored=("<|python_tag|>",)),
    key="parameters",
)
