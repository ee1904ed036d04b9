"""Gemma 4: a channel named thought, which comes first. Its templates write an empty one where it shall not think."""

from kvforge.gateway.languages.marked_reasoning import MarkedReasoning
from kvforge.gateway.languages.reasoning_format import ReasoningFormat

_BEGINS, _ENDS = "<|channel>", "<channel|>"
_NAME = "thought\n"

FORMAT = ReasoningFormat(
    name="gemma4",
    signs=(_BEGINS, _ENDS),
    foreign=(),
    markers=(_BEGINS, _ENDS),
    reader=lambda opened, marker, calls: MarkedReasoning(marker(_BEGINS) + _NAME, marker(_ENDS), opened),
    begins=_BEGINS,
    ends=_ENDS,
    around=(_BEGINS + _NAME, _ENDS),
)
