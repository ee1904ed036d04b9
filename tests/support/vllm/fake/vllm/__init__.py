"""Stands in for vLLM where tests need no model: the names that kvforge uses, over an engine that counts.

The token after ``[..., a]`` is ``(a + 1) % VOCABULARY``; a bias at least as large as LARGE on a token wins over it.
"""

from vllm.sampling_params import SamplingParams

__all__ = ["SamplingParams"]
