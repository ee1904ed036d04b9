"""The endpoints whose requests are read beside the event loop: they generate text, or count its tokens."""

import enum


class Endpoint(enum.IntEnum):
    """What reads a body; the number is what workers are told."""

    COMPLETIONS = 0
    CHAT = 1
    RESPONSES = 2
    MESSAGES = 3
    COUNT_TOKENS = 4
    TOKENIZE = 5
    DETOKENIZE = 6


RENDERING = frozenset(Endpoint) - {Endpoint.COMPLETIONS, Endpoint.DETOKENIZE}
"""Those whose requests a chat template may write."""
