"""What a flavour of TensorRT has to offer, beside the API that both share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Contexts(Protocol):
    """Makes the execution contexts of one plan on the current GPU."""

    def make(self, repeated: bool) -> Any:
        """Return a context whose working memory the caller gives, None where TensorRT makes none. One that is
        ``repeated`` runs the same sizes at the same addresses again and again."""

    def keep(self) -> None:
        """Keep what was compiled for this GPU for the next start, where anything is."""


class Flavour(Protocol):
    """A module with these names."""

    NAME: str
    """The extra that brings it, and what manifests call it."""

    IS_CHECKED: bool
    """Whether networks and logs are held against what they should be: where a builder has shown what they look like."""

    RECORDS_RUNS: bool
    """Whether a repeated context records its run as a CUDA graph by itself."""

    def contexts(self, engine: Any, plan: Path) -> Contexts:
        """Return what makes the contexts of an ``ICudaEngine``, which was loaded from the file ``plan``."""

    def load(self) -> Any:
        """Return its Python module; raises MissingToolError where it cannot be imported."""

    def capabilities(self, asked: str, kv_dtype: "torch.dtype") -> tuple[int, ...]:
        """Return the compute capabilities (90: 9.0) that plans with such a cache are built for.

        ``asked`` is the option ``compute_capabilities``. Imports nothing of TensorRT.

        Raises:
            BuildError: it builds for no such GPU, such a GPU has no such cache, or it needs a GPU and there is none.
        """

    def is_portable(self, asked: str) -> bool:
        """Return whether plans also run on GPUs that are later than those that ``capabilities`` returns."""

    def register_plugins(self) -> None:
        """Make the plugins known in this process."""

    def network_flags(self) -> int:
        """Return the flags that networks are created with."""

    def build(self, builder: Any, network: Any, config: Any, plan: Path) -> bool:
        """Build a plan and write it to a file; returns whether there is one."""

    def configure(self, config: Any, asked: str) -> Callable[[], None]:
        """Set what only this builder knows on an ``IBuilderConfig``; the result is called once a plan is built."""
