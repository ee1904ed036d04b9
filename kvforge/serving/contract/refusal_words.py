"""How a refusal reads to a client of Triton: in the names of inputs and request parameters."""

from kvforge.common.refusals import PROMPT, UNKNOWN_TOKEN, Refusal
from kvforge.serving.contract.inputs import TENSORS, display_name
from kvforge.serving.contract.parameters import OWN, STOP_TOKEN_IDS, TIMEOUT


def sentence(refusal: Refusal) -> str:
    """One sentence, without a full stop."""
    said = refusal.sentence(_subject(refusal.field), lambda name: display_name(TENSORS.get(name, name)))
    if refusal.code == UNKNOWN_TOKEN:
        return f"{said}, or start the server with --wrap-token-ids for a load test"
    return said


def _subject(field: str | None) -> str:
    if field is None:
        return ""
    if field == PROMPT:
        return "the prompt"
    if field == STOP_TOKEN_IDS:  # the tokens of both
        return f"input tensor '{TENSORS[field]}' or the request parameter '{field}'"
    if field in OWN or field == TIMEOUT:
        return f"the request parameter '{field}'"
    return f"input tensor {display_name(TENSORS.get(field, field))}"
