"""What the judge says of a guide."""

from dataclasses import asdict, dataclass
from typing import Any

from kvforge.common.errors import RequestError
from kvforge.common.refusals import Refusal
from kvforge.runtime.guides.limits import ParserLimits


@dataclass(frozen=True)
class Verdict:
    """Either ``grammar``, in llguidance's own form, with the limits that its trial passed under, or ``refusal``."""

    grammar: str = ""
    limits: ParserLimits | None = None
    refusal: Refusal | None = None

    def accepted(self) -> tuple[str, ParserLimits]:
        """Grammar and limits. Raises RequestError where the guide is refused."""
        if self.refusal is not None:
            raise RequestError.of(self.refusal)
        assert self.limits is not None
        return self.grammar, self.limits

    def to_json(self) -> dict[str, Any]:
        """As data for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Verdict":
        """The inverse of ``to_json``."""
        limits, refusal = data["limits"], data["refusal"]
        return cls(
            data["grammar"],
            None if limits is None else ParserLimits(**limits),
            None if refusal is None else Refusal.from_json(refusal),
        )
