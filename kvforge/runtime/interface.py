"""What serving, LLM and AsyncLLM ask of an engine, whichever computes: ours, the one in a process, or vLLM's."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvforge.manifest import Manifest
from kvforge.runtime.guides.verdict import Verdict
from kvforge.runtime.requests.guided_decoding import GuidedDecoding

if TYPE_CHECKING:  # an engine's process answers its server before it has read torch and numpy
    from kvforge.runtime.config import RuntimeConfig
    from kvforge.runtime.requests.outputs import SequenceOutput
    from kvforge.runtime.requests.params import SamplingParams
    from kvforge.runtime.step.work import WorkListener
    from kvforge.runtime.text.tokenizer import Tokenizer

CompiledGuide = Any
"""What an engine makes of a guide; only that engine looks into it."""


class Guides(Protocol):
    """Compiles guides, on any thread."""

    def known(self, guided: GuidedDecoding) -> CompiledGuide | None:
        """As ``compile`` where that is quick, else None."""

    def compile(self, guided: GuidedDecoding, verdict: Verdict | None = None) -> CompiledGuide:
        """Return a guide for one request. Raises RequestError where it is refused; without ``verdict`` it is judged."""


class Engine(Protocol):
    """Serves many requests at once. Not thread-safe: one thread calls it."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def tokenizer(self) -> "Tokenizer | None": ...
    @property
    def config(self) -> "RuntimeConfig": ...
    @property
    def guides(self) -> Guides: ...
    @property
    def num_iterations(self) -> int:
        """Steps since the engine was loaded."""

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: "SamplingParams",
        guide: CompiledGuide | None = None,
    ) -> None:
        """Queue a request; its tokens come from later ``step()`` calls. ``guide``: what ``guides`` made of that of
        ``params``. Raises RequestError for what can never be served as asked; nothing of it is kept."""

    def abort(self, request_id: str) -> bool:
        """Give up a request, without further output; False if it is not there."""

    def has_unfinished(self) -> bool:
        """Requests are waiting or running."""

    def step(self) -> "list[SequenceOutput]":
        """Run one step, or wait for one; return what is new of sequences. Raises EngineError where the engine ended."""

    def stats(self) -> dict[str, Any]:
        """Counters, gauges and histograms since the engine was loaded, see ``LLMEngine.stats``."""


class WatchedEngine(Engine, Protocol):
    """An engine in this process, whose steps can be followed."""

    def watch(self, listener: "WorkListener") -> None:
        """Tell ``listener`` of each piece of a step's work before it begins."""
