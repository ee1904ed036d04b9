"""Parameters as they were given."""

from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    DELTA = 1


class StructuredOutputsParams:
    def __init__(self, **fields: Any) -> None:
        self.fields = fields


class SamplingParams:
    """Raises ValueError for what vLLM refuses: here a temperature above 2."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        if fields["temperature"] > 2:
            raise ValueError(f"temperature must be in [0, 2], got {fields['temperature']}.")
