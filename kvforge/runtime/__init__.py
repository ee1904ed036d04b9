"""The runtime: serves an engine directory; knows nothing of how it was compiled.

    request -> Scheduler (which tokens, which pages) -> Runner (lower, upper) -> sampler -> outputs
"""

from kvforge.runtime.engine import LLMEngine
from kvforge.runtime.llm import LLM
from kvforge.runtime.outputs import CompletionOutput, RequestOutput, SequenceOutput, TokenLogprobs
from kvforge.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "LLMEngine", "RequestOutput", "SamplingParams", "SequenceOutput",
           "TokenLogprobs"]
