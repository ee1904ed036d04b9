"""What a request asks of its text's form."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvforge.common.errors import RequestError

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
            raise RequestError(f"the guide type is {self.kind!r}; give one of {', '.join(KINDS)}.")
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
            raise RequestError("guided_decoding is no guide; give its kind and guide.")
        return cls(value["kind"], value.get("guide"))


def _as_text(kind: str, guide: Any) -> str | None:
    if kind in ("json_schema", "structural_tag", AFTER_REASONING) and isinstance(guide, (Mapping, bool)):
        try:
            guide = json.dumps(guide, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise RequestError(f"the guide of {kind} is not JSON data; give it as JSON text.") from None
    if guide is not None and not isinstance(guide, str):
        raise RequestError(f"the guide of {kind} is of type {type(guide).__name__}; give text.")
    if kind == "json":
        if guide:
            raise RequestError("the guide type json takes no guide; give json_schema for a schema.")
        return None
    if not guide:
        raise RequestError(f"guided_decoding of kind {kind} has no guide; give one.")
    try:
        size = len(guide.encode())
    except UnicodeEncodeError:
        raise RequestError(f"the guide of {kind} is not Unicode text; give UTF-8 text.") from None
    maximum = MAX_OUTER_BYTES if kind == AFTER_REASONING else MAX_GUIDE_BYTES
    if size > maximum:
        raise RequestError(f"the guide of {kind} has {size} bytes; give at most {maximum}.")
    return guide
