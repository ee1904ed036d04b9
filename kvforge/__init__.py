"""kvforge: compile KV-compressed language models into engines and serve them with in-flight batching.

``from kvforge import LLM, AsyncLLM, SamplingParams`` is the Python API; ``kvforge --help`` lists the commands.
"""

from typing import TYPE_CHECKING, Any

from kvforge.version import __version__

__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "SpeculativeConfig", "__version__"]

if TYPE_CHECKING:
    from kvforge.engine_cache.llm import LLM
    from kvforge.runtime import AsyncLLM, RequestOutput, SamplingParams, SpeculativeConfig


def __getattr__(name: str) -> Any:
    """Import the runtime (and torch) only when it is asked for, so that ``kvforge --help`` is quick."""
    if name == "LLM":
        from kvforge.engine_cache.llm import LLM

        return LLM
    if name in __all__:
        import kvforge.runtime

        return getattr(kvforge.runtime, name)
    raise AttributeError(f"module 'kvforge' has no attribute {name!r}")
