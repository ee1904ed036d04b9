"""What a request asks of its text's form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvforge.common.errors import RequestError
from kvforge.common.refusals import GUIDE_GAVE_UP

GuideKind = Literal["json", "json_schema", "regex", "ebnf_grammar", "structural_tag", "after_reasoning"]
KINDS: tuple[str, ...] = get_args(GuideKind)
AFTER_REASONING: GuideKind = "after_reasoning"
MAX_GUIDE_BYTES = 64 * 1024
MAX_OUTER_BYTES = 2 * MAX_GUIDE_BYTES + 4096
"""Of a guide that holds another one, as JSON text."""


@dataclass(frozen=True)
class GuidedDecoding:
    """Every generated text is of this form, in TensorRT-LLM's guide types and one more (docs/sampling.md says what each
    takes).

    Attributes:
        kind: "json" (any JSON object), "json_schema", "regex", "ebnf_grammar" or "structural_tag"; or
            "after_reasoning", which holds one of these.
        guide: the schema, expression, grammar or tag as text of at most 64 KiB; what is JSON may be given as data.
            "json" has none.

    Raises:
        RequestError: the kind is unknown, or its guide is missing, too long or not text.
    """

    kind: GuideKind
    guide: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in KINDS:
            raise guide_error(f"is of kind {self.kind!r}", f"give one of {', '.join(KINDS)}")
        object.__setattr__(self, "guide", _as_text(self.kind, self.guide))

    @classmethod
    def of(cls, value: Any) -> "GuidedDecoding | None":
        """Return ``value``, or what the mapping {"kind": ..., "guide": ...} says; None stays None.

        Raises:
            RequestError: it is neither.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or "kind" not in value or not set(value) <= {"kind", "guide"}:
            raise guide_error("is no guide", "give its kind and guide")
        return cls(value["kind"], value.get("guide"))


def guide_error(reason: str, remedy: str = "", operator: str = "") -> RequestError:
    """The refusal of a guide; the arguments are those of a Refusal."""
    return RequestError(reason, remedy, field="guided_decoding", operator=operator)


def gave_up(why: str) -> RequestError:
    """The end of a text that a guide cannot be followed through."""
    return RequestError(f"gave up: {why}", "simplify it", field="guided_decoding", code=GUIDE_GAVE_UP)


NEEDS_TOKENIZER = guide_error("needs a tokenizer and this engine has none", "leave it out").refusal
NEEDS_LLGUIDANCE = guide_error("cannot be used here", "leave it out", "install kvforge[serve] for llguidance").refusal


def _as_text(kind: str, guide: Any) -> str | None:
    if kind in ("json_schema", "structural_tag", AFTER_REASONING) and isinstance(guide, (Mapping, bool)):
        try:
            guide = json.dumps(guide, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise guide_error("is not JSON data", "give it as JSON text") from None
    if guide is not None and not isinstance(guide, str):
        raise guide_error(f"is of type {type(guide).__name__}", "give text")
    if kind == "json":
        if guide:
            raise guide_error("of kind json takes no guide", "give json_schema for a schema")
        return None
    if not guide:
        raise guide_error(f"of kind {kind} has no guide", "give one")
    try:
        size = len(guide.encode())
    except UnicodeEncodeError:
        raise guide_error("is not Unicode text", "give UTF-8 text") from None
    maximum = MAX_OUTER_BYTES if kind == AFTER_REASONING else MAX_GUIDE_BYTES
    if size > maximum:
        raise guide_error(f"asks for a guide of {size} bytes", f"give at most {maximum}")
    return guide
