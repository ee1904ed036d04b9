"""The runtime: serves an engine directory; knows nothing of how it was compiled.

    request -> Scheduler (which tokens, which pages) -> Runner (lower, upper) -> sampler -> outputs

Names are imported when first used: parts such as the tokenizer do not need torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvforge.runtime.async_llm import AsyncLLM
    from kvforge.runtime.engine import LLMEngine
    from kvforge.runtime.llm import LLM
    from kvforge.runtime.requests.outputs import CompletionOutput, RequestOutput, SequenceOutput, TokenLogprobs
    from kvforge.runtime.requests.params import SamplingParams
    from kvforge.runtime.speculation.config import SpeculativeConfig

_MODULES = {
    "AsyncLLM": "async_llm",
    "LLM": "llm",
    "LLMEngine": "engine",
    "CompletionOutput": "requests.outputs",
    "RequestOutput": "requests.outputs",
    "SequenceOutput": "requests.outputs",
    "TokenLogprobs": "requests.outputs",
    "SamplingParams": "requests.params",
    "SpeculativeConfig": "speculation.config",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "SequenceOutput",
    "SpeculativeConfig",
    "TokenLogprobs",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"kvforge.runtime.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'kvforge.runtime' has no attribute {name!r}")
