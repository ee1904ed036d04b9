"""Speculation with drafts of one length, whatever pays."""

from kvforge.runtime import LLMEngine
from kvforge.runtime.speculation.config import SpeculativeConfig
from kvforge.runtime.speculation.drafting import Drafting


class FixedLength:
    """In place of ``DraftLength``."""

    def __init__(self, length):
        self.length = length

    def room(self, sequence):
        return min(self.length, sequence.max_length - sequence.length - 1)

    def is_due(self, num_sequences):
        return True

    def choose(self, num_sequences, available, chances=None):
        return dict(available)

    def observe(self, *args):
        pass

    def forget(self, sequence):
        pass


def speculate(engine: LLMEngine, drafter, length: int) -> LLMEngine:
    """Have an engine draft ``length`` tokens in every step."""
    drafting = Drafting(SpeculativeConfig("early_exit", length), engine.manifest, engine.config)
    drafting.drafter, drafting._lengths = drafter, FixedLength(length)
    engine.drafting = drafting
    return engine


def speculative_engine(session, drafter, length=3, **options) -> LLMEngine:
    """An engine on ``session`` that drafts ``length`` tokens in every step."""
    return speculate(LLMEngine(session=session, **{"num_pages": 64, **options}), drafter, length)
