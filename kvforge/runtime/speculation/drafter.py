"""What guesses tokens, and the one place that chooses the code for a method."""

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from kvforge.common.errors import EngineError
from kvforge.manifest import Manifest
from kvforge.runtime.config import RuntimeConfig
from kvforge.runtime.requests.sequence import Sequence
from kvforge.runtime.speculation.config import BY_HEAD, SpeculativeConfig
from kvforge.runtime.step.work import WorkListener

_MODULES: dict[str, str] = {
    "ngram": "kvforge.runtime.speculation.prompt_lookup",
    "suffix": "kvforge.runtime.speculation.suffix",
    "draft_model": "kvforge.runtime.speculation.draft_model",
}
"""Modules with a ``make_drafter(config, manifest, runtime_config)``; what drafts within the step needs none."""
WITHIN_STEP: tuple[str, ...] = ("early_exit", *BY_HEAD)
"""Methods whose drafts the runner makes in the step itself, in the room that is planned for them."""
FREE: tuple[str, ...] = ("ngram", "suffix")
"""Methods that draft in no time to speak of, so that how much is computed is decided when the drafts are there."""


@dataclass(frozen=True)
class Draft:
    """A guess of a sequence's next tokens."""

    token_ids: tuple[int, ...]
    probs: Tensor | None = None
    """[len(token_ids), vocab_size] float32: what each token was drawn from; None: not drawn."""
    chances: tuple[float, ...] | None = None
    """How likely each token is once those before it are right; None: nothing is known of it."""

    def first(self, count: int) -> "Draft":
        """Its first ``count`` tokens."""
        if count >= len(self.token_ids):
            return self
        return Draft(self.token_ids[:count], *(x if x is None else x[:count] for x in (self.probs, self.chances)))


class Drafter(Protocol):
    """Guesses the next tokens of sequences whose only token that is not computed is the last one."""

    def draft(self, sequences: list[Sequence], counts: list[int]) -> list[Draft]:
        """Return a draft for each sequence, of at most ``counts[i]`` tokens; fewer, or none, where it has no guess."""

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept of a sequence that was finished, preempted or given up; idempotent."""


@runtime_checkable
class Reporting(Protocol):
    """A drafter with something to report."""

    def stats(self) -> dict[str, Any]:
        """Return gauges by name, for the engine's."""


@runtime_checkable
class Watchable(Protocol):
    """A drafter whose steps take time."""

    def watch(self, listener: WorkListener) -> None:
        """Tell ``listener`` of each step before it begins."""


def make_drafter(config: SpeculativeConfig, manifest: Manifest, runtime: RuntimeConfig) -> Drafter | None:
    """Return the drafter of ``config.method``; None for a method that drafts within the step.

    Raises:
        EngineError: this runtime has no such drafter, or it cannot be loaded for this engine.
    """
    if config.method in WITHIN_STEP:
        return None
    if config.method not in _MODULES:
        raise EngineError(f"speculative method {config.method} is not built into this runtime; choose another.")
    return importlib.import_module(_MODULES[config.method]).make_drafter(config, manifest, runtime)
