"""Refusals, from the runtime or the engine, as answers of HTTP in the words of the request's fields."""

from collections.abc import Mapping

from kvforge.common.refusals import (
    CONTEXT_LENGTH,
    GUIDE_GAVE_UP,
    GUIDES_FULL,
    NO_TOKEN_LEFT,
    PROMPT,
    QUEUE_FULL,
    SERVER_ENDS,
    SHUTTING_DOWN,
    TOO_LARGE,
    Refusal,
)
from kvforge.gateway.errors import ApiError, bad_field

GUIDE, LENGTH, OF_PROMPT = "guided_decoding", "max_tokens", "prompt_logprobs"
"""Fields of SamplingParams whose names differ between endpoints and requests, as PROMPT's does."""
_NAMES: Mapping[str, str] = {
    GUIDE: "structured_outputs", "stop_words_ids": "stop", "return_log_probs": "logprobs", "streaming": "stream",
}  # fmt: skip
"""What clients call the others, where they do not call them so."""
_BUSY = "engine_unavailable"
_FIXED = {
    TOO_LARGE: (413, TOO_LARGE, "the request is too large; shorten it"),
    QUEUE_FULL: (429, QUEUE_FULL, "too many requests wait for the model; send the request again later"),
    GUIDES_FULL: (429, QUEUE_FULL, "too many new forms wait to be checked; send the request again later"),
    SHUTTING_DOWN: (503, _BUSY, SERVER_ENDS.words),
}
"""Codes that say all: status, code and words."""
_PUBLIC = (CONTEXT_LENGTH, GUIDE_GAVE_UP, NO_TOKEN_LEFT)
"""Other codes that clients are given."""


def api_error(refusal: Refusal, names: Mapping[str, str] | None = None, detail: str | None = None) -> ApiError:
    """The refusal for the client; `names` are what the request calls fields, and `detail` is for the log. What only
    helps whoever runs the server is left out."""
    if refusal.code in _FIXED:
        status, code, words = _FIXED[refusal.code]
        return ApiError(status, words, code=code, detail=detail)
    known = {**_NAMES, **(names or {})}
    known.update(input_ids=known.get(PROMPT, PROMPT), input_lengths=known.get(PROMPT, PROMPT))
    field, reason, remedy = refusal.field, refusal.reason, refusal.remedy
    if refusal.code == GUIDE_GAVE_UP:
        reason, remedy = "asks for a form that became too complex to keep to", "simplify it"
    elif refusal.code == NO_TOKEN_LEFT:
        field = GUIDE if known[GUIDE] else "logit_bias"
        reason, remedy = "leaves no token to generate at some place of the text", "relax it"
    said = Refusal(reason, remedy).sentence("", lambda name: known.get(name, name))
    public = refusal.code if refusal.code in _PUBLIC else None
    if field is None:
        return ApiError(400, said, None, public, detail)
    return bad_field(known.get(field, field), said, public, detail)
