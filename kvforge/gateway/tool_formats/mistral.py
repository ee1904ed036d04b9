"""Models of Mistral before version 11 of its tokenizer: [TOOL_CALLS] and a list of objects. Their templates take
ids of calls with nine letters and digits only."""

import hashlib

from kvforge.gateway.call_reader import Notation
from kvforge.gateway.tool_format import ToolFormat

_ID_LENGTH = 9


def _short(call_id: str) -> str:
    """The id itself where it fits, else one that only it gives."""
    if len(call_id) == _ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_ID_LENGTH]


FORMAT = ToolFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    foreign=("[ARGS]", "[CALL_ID]", "<tool_call>"),
    notation=Notation(begins="[TOOL_CALLS]", opens="[", separates=",", closes="]"),
    template_id=_short,
)
