"""Devstral, Magistral and others from version 11 of their maker's tokenizer on: [TOOL_CALLS], the name, [ARGS] and the
arguments, for each call. Some of them write an id behind [CALL_ID], in between."""

from kvforge.gateway.languages.call_ids import short_ids
from kvforge.gateway.languages.call_reader import Notation
from kvforge.gateway.languages.named_format import NamedFormat

_BEGINS, _AFTER, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

FORMAT = NamedFormat(
    name="mistral_args",
    signs=(_BEGINS, _AFTER),
    foreign=(),
    notation=Notation(begins=_BEGINS),
    template_ids=short_ids,
    marks=(_BEGINS, _AFTER, _ID),
    after=_AFTER,
    id_mark=_ID,
)
