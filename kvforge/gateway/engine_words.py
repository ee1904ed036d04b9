"""What the engine and its server say of a request, in the words of OpenAI's fields.

They speak of input tensors, of guides and of options that a client cannot know. What is still in such words after
all is left out: the log has it.
"""

import re
from collections.abc import Mapping

from kvforge.gateway.errors import ApiError

GUIDE, PROMPT, LENGTH, OF_PROMPT = "guide", "prompt", "length", "of_prompt"
"""Keys of the names that differ between endpoints and requests."""
_NAMES = {GUIDE: "structured_outputs", PROMPT: "prompt", LENGTH: "max_tokens", OF_PROMPT: "prompt_logprobs"}
_FIELDS = {
    "request_output_len": LENGTH, "input_ids": PROMPT, "input_lengths": PROMPT, "guided_decoding_guide": GUIDE,
    "guided_decoding_guide_type": GUIDE, "num_return_sequences": "n", "runtime_top_k": "top_k",
    "runtime_top_p": "top_p", "stop_strings": "stop", "stop_words_list": "stop", "end_id": "ignore_eos",
    "embedding_bias": "logit_bias", "num_top_log_probs": "logprobs", "return_log_probs": "logprobs",
    "streaming": "stream", "num_prompt_log_probs": OF_PROMPT,
}  # fmt: skip
_SAME = frozenset(
    {"temperature", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
     "stop_token_ids"}
)  # fmt: skip
_INPUT = re.compile(r"(?:input tensor|the request parameter) '(\w+)'(?: \('\w+' of ensemble\))?\s*")
_INNER = re.compile(r"tensor|ensemble|--[a-z]|llguidance|runtime_|request_output_len|num_return|guided_decoding|guide_|"
                    r"jobs? wait|worker|rebuild|Traceback")  # fmt: skip
_GUIDE = re.compile(r"the guide of \w+ ")
_PLACE = re.compile(r"^at \d+\(\d+\): | \d+ \| .*$")


def refusal(message: str, names: Mapping[str, str]) -> ApiError:
    """A request's refusal; `names` are those that differ from _NAMES."""
    known = {**_NAMES, **names}
    found = _INPUT.match(message)
    rest = message[found.end() :] if found else message
    field = None
    if found:
        key = _FIELDS.get(found[1], found[1])
        field = known.get(key, key if key in _SAME or key in _FIELDS.values() else None)
    if message.startswith(("the request's tensors have", "the request is too large")):
        return ApiError(413, "the request is too large; shorten it", code="request_too_large", detail=message)
    if rest.startswith("the prompt has "):
        amount = rest.partition(",")[0]
        return ApiError(400, f"{amount}, more than the model's context holds; shorten it", known[PROMPT],
                        "context_length_exceeded", detail=message)  # fmt: skip
    if rest.startswith("the prompt "):
        return ApiError(400, f"'{known[PROMPT]}' cannot be used: {_plain(rest.partition(';')[0])}", known[PROMPT])
    if field == known[GUIDE] or rest.startswith(("the guide ", "the schema ", "the ebnf_grammar ", "guided_decoding ")):
        return guide_refusal(rest, known[GUIDE])
    said = _plain(rest)
    if field is not None:
        return ApiError(400, f"'{field}' {said}" if said else f"'{field}' cannot be used", field, detail=message)
    return ApiError(400, said or "the request cannot be served as asked; change it", detail=message)


def guide_refusal(message: str, field: str) -> ApiError:
    """The refusal of the form that a field asks for."""
    said = message.removeprefix("cannot be used: ")
    said = _GUIDE.sub("", said).removeprefix("cannot be used: ")
    if size := re.search(r"has (\d+) bytes; give at most (\d+)", said):
        said = f"the form it asks for takes {size[1]} bytes, and {size[2]} are the most; give less"
    said = _plain(_PLACE.sub("", said))
    return ApiError(400, f"'{field}' cannot be kept to: {said or 'the form is too complex; simplify it'}", field,
                    detail=message)  # fmt: skip


def _plain(words: str) -> str:
    """Words without those clauses that only whoever runs the server understands; empty where nothing is left."""
    clauses = re.split(r"(?<=[;,:]) ", words.strip().removesuffix("."))
    kept: list[str] = []
    for clause in clauses:
        if _INNER.search(clause):
            break
        kept.append(clause)
    return " ".join(kept).rstrip(";,:. ")
