"""Wrapping: a policy around another one."""

from abc import ABC, abstractmethod
from typing import ClassVar


class Wrapping(ABC):
    """A policy that does what another one does, in a way of its own, called with the other one's class and the
    parameters of both. ``--kv-policy`` has the other one's name, ``+`` and ``wrapper_name``."""

    wrapper_name: ClassVar[str]

    @classmethod
    @abstractmethod
    def can_wrap(cls, policy: type) -> bool:
        """Return whether it goes around policies of this class."""
