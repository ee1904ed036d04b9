"""The parameters of the rotary position embedding."""

from dataclasses import dataclass, replace

from model_defs.errors import ModelError


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of the rotary embedding; ``kind`` is ``default``, ``linear``, ``llama3``, ``yarn``, ``longrope``,
    ``proportional`` or ``none``.

    The first ``partial`` of each head rotates, the rest passes through: element i with i plus half of what rotates, or
    2i with 2i + 1 where it is ``interleaved``. What rotates is multiplied by ``amplitude``. ``longrope`` divides by
    ``long_factors`` where ``is_long``, else by ``short_factors``. ``proportional`` pairs elements half a head apart and
    turns the first ``partial`` of the pairs, with the frequencies that they have where all turn.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    interleaved: bool = False
    amplitude: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    is_long: bool = False

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many elements of a head rotate."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.partial)

    def for_length(self, length: int) -> "RopeConfig":
        """Return the embedding of sequences of up to ``length`` tokens: ``longrope`` has other factors for those that
        are longer than ``original_max_position``."""
        return replace(self, is_long=self.kind == "longrope" and length > self.original_max_position)

    def check(self, head_dim: int) -> None:
        """Raise ModelError unless heads of ``head_dim`` elements can be rotated so."""
        rotary_dim = self.rotary_dim(head_dim)
        if rotary_dim < 2 or rotary_dim % 2:
            raise ModelError(
                f"partial_rotary_factor {self.partial:g} rotates {rotary_dim} of {head_dim} elements of a head; "
                "it must be a positive even number of them."
            )
        for name in ("short_factors", "long_factors"):
            count = len(getattr(self, name))
            if self.kind == "longrope" and count != rotary_dim // 2:
                raise ModelError(
                    f"RoPE scaling 'longrope' has {count} numbers as its {name.removesuffix('s')}; "
                    f"{rotary_dim} rotated elements of a head need {rotary_dim // 2}."
                )


UNROTATED = RopeConfig(kind="none")
"""Of heads that do not rotate."""


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by ``1 + beta * ln(1 + floor(p / length))``, that attention to ever more
    tokens stays as sharp (Llama 4's scaling by temperature)."""

    beta: float
    length: int


@dataclass(frozen=True)
class RotaryRows:
    """The rows of a tensor that holds whole heads of q or k in dim 0: in each ``passed`` elements that stay,
    ``head_dim`` that ``rope`` knows of, and ``behind`` that stay. With ``is_last`` no other tensor comes between them
    and the rotation, and they take the amplitude."""

    rope: RopeConfig
    head_dim: int
    is_last: bool = True
    passed: int = 0
    behind: int = 0

    @property
    def size(self) -> int:
        """Rows of a head."""
        return self.passed + self.head_dim + self.behind

    @property
    def has_order(self) -> bool:
        """Whether the engine's rows are in another order than the checkpoint's."""
        return self.rope.interleaved or self.rope.rotary_dim(self.head_dim) != self.head_dim

    @property
    def has_factors(self) -> bool:
        """Whether the engine's rows are the checkpoint's times the amplitude."""
        return self.is_last and self.rope.amplitude != 1.0

    @property
    def is_nothing(self) -> bool:
        """Whether the engine's rows are the checkpoint's."""
        return not self.has_order and not self.has_factors
