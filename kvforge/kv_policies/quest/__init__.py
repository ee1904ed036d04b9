"""Quest: the whole cache is kept, and each decode step reads the chunks of the prompt that can matter most."""

from kvforge.kv_policies.quest.policy import Quest

__all__ = ["Quest"]
