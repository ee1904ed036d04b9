"""What reasoning means for one request."""

from collections.abc import Sequence

from kvforge.gateway.model import ServedModel
from kvforge.gateway.parsed_request import Thinking

_LAST_TOKENS = 32
"""Of a prompt, in which the mark that begins the reasoning would be."""


def thinking_after(
    model: ServedModel, prompt: Sequence[int], is_guided: bool, continued: str | None = None
) -> Thinking | None:
    """How to read the reasoning of an answer to this prompt, whose last message, if the answer goes on with that, is
    ``continued``; None where the model has none. What a guide writes goes on with no reasoning that the prompt has
    begun."""
    form = model.reasoning_format
    if form is None:
        return None
    end = model.tokenizer.backend.decode(list(prompt[-_LAST_TOKENS:]), skip_special_tokens=False).rstrip()
    begun = continued is not None and continued.lstrip().startswith(form.begins) and form.ends not in continued
    opened = not is_guided and bool(form.begins) and (begun or end.endswith(form.begins))
    return Thinking(form.name, opened, model.marker_tokens(form.markers))
