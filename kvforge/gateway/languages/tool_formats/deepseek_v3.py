"""DeepSeek V3 and R1: calls between marks, the arguments in a block of code."""

from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.named_format import NamedFormat

CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
MARKS = (*CALLS, *CALL, SEPARATOR)

FORMAT = NamedFormat(
    name="deepseek_v3",
    signs=(CALLS[0], "```json"),
    foreign=(),
    notation=Notation(begins=CALL[0], closes="```", ignored=(*CALLS, CALL[1])),
    marks=MARKS,
    wraps=CALLS,
    joins="\n",
    before=f"function{SEPARATOR}",
    after="\n```json\n",
    ends=f"\n```{CALL[1]}",
)
