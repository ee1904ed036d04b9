"""Bounds on what one request may bring and on what it may be answered with."""

from dataclasses import dataclass

from kvforge.common.errors import RequestError
from kvforge.common.refusals import TOO_LARGE
from kvforge.runtime.requests.checks import check_prompt_length
from kvforge.serving.contract.request import GenerationRequest
from kvforge.serving.contract.tensors import Tensors

MAX_LOGITS_BYTES = 512 << 20
"""Of all generation logits of one request: they wait in memory, and pass through shared memory."""
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SizeLimits:
    """`vocab_size` and `max_seq_len` 0 mean unknown; then nothing that depends on them is checked here."""

    max_request_bytes: int
    vocab_size: int
    max_seq_len: int = 0

    def check_tensors(self, tensors: Tensors) -> None:
        """Raises RequestError when the tensors are too large together, a prompt is too long or a bias does not fit the
        vocabulary."""
        size = sum(array.nbytes for array in tensors.values())  # of texts, what the array itself takes
        if size <= self.max_request_bytes:
            size += sum(sum(map(len, array.flat)) for array in tensors.values() if array.dtype == object)
        check_request_bytes("tensors", size, self.max_request_bytes)
        ids, lengths = tensors.get("input_ids"), tensors.get("input_lengths")
        if self.max_seq_len and ids is not None and lengths is not None and lengths.size:
            check_prompt_length(min(int(lengths.max()), ids.shape[-1]), self.max_seq_len)
        bias = tensors.get("embedding_bias")
        if bias is not None and self.vocab_size and bias.size and bias.shape[-1] != self.vocab_size:
            raise RequestError(
                f"has {bias.shape[-1]} numbers a prompt, but the model's vocabulary has {self.vocab_size}",
                field="logit_bias",
            )

    def check_logits(self, prompts: list[GenerationRequest]) -> None:
        """Raises RequestError when the generation logits asked for could be too many."""
        tokens = sum(p.params["max_tokens"] * p.num_sequences for p in prompts if p.return_generation_logits)
        size = tokens * self.vocab_size * _FLOAT_BYTES
        if size > MAX_LOGITS_BYTES:
            raise RequestError(
                f"asks for {size >> 20} MiB of logits, but at most {MAX_LOGITS_BYTES >> 20} MiB are kept for a request",
                "lower the number of tokens",
                field="return_logits",
            )


def check_request_bytes(what: str, size: int, maximum: int) -> None:
    """Raises RequestError where the request's `what` have more than `maximum` bytes."""
    if size > maximum:
        raise RequestError(
            f"the request's {what} have {size} bytes, but at most {maximum} are taken",
            "send less",
            code=TOO_LARGE,
            operator="raise --max-request-bytes",
        )
