"""Speculation with drafts of one length, whatever pays."""

from kvforge.runtime import LLMEngine
from perf.speculation.fixed_length import FixedDrafting


def speculative_engine(session, drafter, length=3, **options) -> LLMEngine:
    """An engine on ``session`` that drafts ``length`` tokens in every step."""
    engine = LLMEngine(session=session, **{"num_pages": 64, **options})
    engine.drafting = FixedDrafting(engine, drafter, length)
    return engine
