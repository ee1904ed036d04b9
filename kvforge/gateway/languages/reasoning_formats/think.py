"""Qwen 3, DeepSeek R1, GLM 4.5, SmolLM 3 and others: <think> and </think> around the reasoning, which comes first. Some
templates write <think> themselves, at the end of the prompt."""

from kvforge.gateway.languages.marked_reasoning import MarkedReasoning
from kvforge.gateway.languages.reasoning_format import ReasoningFormat

_BEGINS, _ENDS = "<think>", "</think>"

FORMAT = ReasoningFormat(
    name="think",
    signs=(_ENDS,),
    foreign=("<|channel|>", "<response>"),
    markers=(_BEGINS, _ENDS),
    reader=lambda opened, marker, calls: MarkedReasoning(marker(_BEGINS), marker(_ENDS), opened),
    begins=_BEGINS,
    ends=_ENDS,
    breaks=3,
)
