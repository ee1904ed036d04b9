"""The endpoints whose requests generate text."""

import enum


class Endpoint(enum.IntEnum):
    """What reads a body; the number is what workers are told."""

    COMPLETIONS = 0
    CHAT = 1
    RESPONSES = 2
