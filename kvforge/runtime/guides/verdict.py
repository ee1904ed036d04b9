"""What the judge says of a guide."""

from dataclasses import asdict, dataclass
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.runtime.guides.limits import ParserLimits


@dataclass(frozen=True)
class Verdict:
    """Either ``grammar``, in llguidance's own form, with the limits that its trial passed under, or why it is refused.

    Attributes:
        refusal: one sentence.
    """

    grammar: str = ""
    limits: ParserLimits | None = None
    refusal: str | None = None

    def accepted(self) -> tuple[str, ParserLimits]:
        """Grammar and limits. Raises RequestError where the guide is refused."""
        if self.limits is None:
            raise RequestError(self.refusal or "the guide cannot be used; change it.")
        return self.grammar, self.limits

    def to_json(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Verdict":
        """The inverse of ``to_json``."""
        limits = data["limits"]
        return cls(data["grammar"], None if limits is None else ParserLimits(**limits), data["refusal"])
