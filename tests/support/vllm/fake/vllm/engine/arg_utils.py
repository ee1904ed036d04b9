"""Arguments as they were given."""

from typing import Any


class EngineArgs:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        if "no_such_argument" in arguments:
            raise TypeError("EngineArgs.__init__() got an unexpected keyword argument 'no_such_argument'")
