"""Log-probabilities of generated tokens, as text."""

import json

from kvforge.gateway.token_bytes import TokenBytes
from kvforge.runtime.requests.outputs import CompletionOutput
from kvforge.runtime.text.tokenizer import Tokenizer


def logprobs_table(completion: CompletionOutput, tokenizer: Tokenizer) -> str:
    """Return a line for each token: it, its log-probability (natural) and its rank, then the most probable ones."""
    token_bytes = TokenBytes(tokenizer, json.loads(tokenizer.backend.to_str())["decoder"])

    def shown(token_id: int) -> str:
        return repr(token_bytes[token_id].decode(errors="backslashreplace"))

    entries = completion.logprobs or []
    width = max((len(shown(entry.token_id)) for entry in entries), default=0)
    return "\n".join(
        f"{shown(entry.token_id):{width}}  {entry.logprob:8.4f}  rank {entry.rank:<4}"
        + "".join(f"  {shown(token)} {logprob:.4f}" for token, logprob in entry.top.items())
        for entry in entries
    )
