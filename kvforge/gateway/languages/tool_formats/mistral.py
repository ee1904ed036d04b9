"""Models of Mistral before version 11 of its tokenizer: [TOOL_CALLS] and a list of objects. Their templates take
ids of calls with nine letters and digits only."""

from kvforge.gateway.languages.call_ids import short_ids
from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.object_format import ObjectFormat

FORMAT = ObjectFormat(
    name="mistral",
    signs=("[TOOL_CALLS]",),
    foreign=("[ARGS]", "[CALL_ID]", "<tool_call>"),
    notation=Notation(begins="[TOOL_CALLS]", opens="[", separates=",", closes="]"),
    template_ids=short_ids,
)
