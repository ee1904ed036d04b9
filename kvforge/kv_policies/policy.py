"""The interface of a KV policy: its parameters, what it needs of everything else, and the bytes it keeps and reads."""

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


class Need(Enum):
    """What a policy asks of the rest of an engine; ``compatibility`` derives from it which mechanisms go together."""

    ATTENTION_SCORES = "the attention that every key receives"
    WHOLE_PROMPT = "all K,V of the prompt at its end"
    EXACT_PROMPT = "the model's own K,V of the prompt"
    WHOLE_PREFILL = "a prefill that runs all layers, to take its place"
    HISTORY_MUTATION = "to change K,V that are already written"
    PER_HEAD_LENGTHS = "another length for each KV head"
    CACHE_PER_LAYER = "K,V of every layer"
    ONE_QUERY = "one query per sequence and step"
    PLAIN_ELEMENTS = "K,V in the model's dtype"
    TOKEN_GROUPS = "groups of tokens that are complete"
    GLOBAL_ATTENTION = "layers that attend to all tokens"
    SEQUENCE_STATE = "state of each sequence beside its pages"
    CACHE_POSITIONS = "keys rotated at their index in the cache"


@dataclass(frozen=True)
class OwnerCache:
    """The cache of one owner: pages of ``page_size`` tokens, ``num_kv_heads`` heads of ``head_dim`` numbers for K and
    for V, each number in ``element_bytes`` bytes; ``scale_bytes`` a token and head, for K and for V, beside them."""

    num_kv_heads: int
    head_dim: int
    page_size: int
    element_bytes: int
    scale_bytes: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of K, V and their scales of one token."""
        return 2 * self.num_kv_heads * (self.head_dim * self.element_bytes + self.scale_bytes)

    def padded(self, num_tokens: int) -> int:
        """Return the tokens in the pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size) * self.page_size


@dataclass(frozen=True)
class KVPolicy(ABC):
    """One policy; its fields are its parameters, all integers.

    Bytes are those of one sequence in one owner, or of one decode step in one layer: callers multiply. They are of a
    sequence with ``num_prompt_tokens`` of prompt and ``num_generated_tokens`` after it, its prompt computed.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]]

    @property
    def parameters(self) -> dict[str, int]:
        """The parameters by name, in the order they are declared."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        """The policy as ``--kv-policy`` takes it, every parameter named; equal text means an equal policy."""
        given = ",".join(f"{name}={value}" for name, value in self.parameters.items())
        return f"{self.name}:{given}" if given else self.name

    @abstractmethod
    def check(self, num_kv_heads: int, head_dim: int, page_size: int) -> None:
        """Raise BuildError unless the parameters suit such heads and pages."""

    @abstractmethod
    def device_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept where attention runs, pages that are not full counted whole."""

    @abstractmethod
    def prefill_bytes(self, cache: OwnerCache, num_prompt_tokens: int) -> int:
        """Return the bytes beside ``device_bytes`` that a prompt takes where attention runs, until it is computed."""

    @abstractmethod
    def host_bytes(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the bytes kept in the host's memory."""

    @abstractmethod
    def device_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer reads of device memory for the next token."""

    @abstractmethod
    def host_bytes_read(self, cache: OwnerCache, num_prompt_tokens: int, num_generated_tokens: int = 0) -> int:
        """Return the most bytes that a layer fetches from the host's memory for the next token."""
