"""What a guide may cost, where it is judged and where it runs."""

from dataclasses import dataclass

MAX_LEXER_STATES = 12_000
"""Of one lexer, some 2 kB each."""
MAX_GRAMMAR_SIZE = 20_000
"""Symbols."""
JUDGE_CPU_S = 1.5
"""Processor time of the whole judgement; what it accepts, an engine compiles in less."""
JUDGE_WALL_S = 30.0
"""For a busy machine."""
JUDGE_MEMORY_BYTES = 512 << 20
TRIAL_CPU_S = 0.25
"""Of the walks through one grammar."""
MAX_TRIAL_STEP_S = 0.1
"""Processor time of the slowest step of a walk."""


@dataclass(frozen=True)
class ParserLimits:
    """What one step of the parser may take: Earley items in a row of its chart, and in all rows that it looks at for a
    mask. Together they bound a step's time, which for ambiguous grammars grows with the third power of a row."""

    max_items_in_row: int
    step_max_items: int


NARROW = ParserLimits(500, 10_000)
"""Under these no grammar of 10,000 random ones took a step of 60 ms (Zen 3)."""
WIDE = ParserLimits(1000, 20_000)
"""For grammars that NARROW does not let pass and whose trial is quick all the same."""
WIDE_JSON = ParserLimits(2000, 50_000)
"""The same for what is made of a JSON schema, where a wide row comes of many properties rather than of ambiguity."""


def tiers(kind: str) -> tuple[ParserLimits, ParserLimits]:
    """The limits to try for a kind of guide, in order."""
    return NARROW, WIDE_JSON if kind in ("json", "json_schema", "structural_tag") else WIDE
