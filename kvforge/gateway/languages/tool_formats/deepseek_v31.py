"""DeepSeek V3.1: as V3, but with nothing but the separator between name and arguments."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.named_format import NamedFormat
from kvforge.gateway.languages.tool_formats.deepseek_v3 import CALL, CALLS, MARKS, SEPARATOR

FORMAT = NamedFormat(
    name="deepseek_v31",
    signs=(CALLS[0], SEPARATOR),
    foreign=("```json",),
    notation=Notation(begins=CALL[0], closes=CALL[1], ignored=CALLS),
    marks=MARKS,
    wraps=CALLS,
    after=SEPARATOR,
    ends=CALL[1],
)
