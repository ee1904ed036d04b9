"""A function that an answer may call."""

from dataclasses import dataclass
from typing import Any

MAX_NAME = 128
"""Characters of its name, as OpenAI's newer endpoint and MCP allow."""


@dataclass(frozen=True)
class Function:
    """A function whose calls keep to `parameters`, a JSON schema without descriptions: to all of it where it is
    `strict`, else to what a guide can keep. `field` is what the request calls the schema."""

    name: str
    parameters: dict[str, Any]
    strict: bool = False
    field: str = "tools"
