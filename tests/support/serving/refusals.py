"""What a client of Triton is told of a request that a part of the contract refuses."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvforge.common.errors import RequestError
from kvforge.serving.contract.refusal_words import sentence


@contextmanager
def refused(match: str) -> Iterator[None]:
    """What runs inside refuses a request, in a sentence for Triton that the expression matches somewhere."""
    with pytest.raises(RequestError) as found:
        yield
    assert re.search(match, sentence(found.value.refusal)), sentence(found.value.refusal)
