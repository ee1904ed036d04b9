"""The numbers by which a request chooses tokens, each described once.

SamplingParams checks them by this table. Inputs of Triton, fields of the HTTP APIs and of vLLM, options of commands,
what a model may say in generation_config.json, and /openapi.json are derived from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LARGEST_INT32 = 2**31 - 1
MAX_PENALTY = 1e4
MIN_TOP_P = 1e-6
"""The nucleus is one token here already, and float32 holds it."""


@dataclass(frozen=True)
class SamplingField:
    """One number.

    Attributes:
        name: in SamplingParams, the HTTP APIs, vLLM and generation_config.json; the option has dashes for underscores.
        neutral: what asks for nothing: the default. Its type is that of the field.
        low, high: the range, ends included.
        about: what it does, in a line for ``--help`` and /openapi.json.
        metavar: what ``--help`` calls the value.
        open_low: ``low`` itself is out of range.
        tensor: the input of `tensorrt_llm`, where it has another name.
        is_default: a model's generation_config.json, and the options of a server, may say it for requests that do not.
        is_in_apis: the HTTP APIs and the commands have it; Triton's inputs and Python have all.
        is_in_vllm: vLLM has it, by the same name; target vllm refuses the others where they ask for something.
    """

    name: str
    neutral: int | float
    low: int | float
    high: int | float
    about: str
    metavar: str = "X"
    open_low: bool = False
    tensor: str = ""
    is_default: bool = False
    is_in_apis: bool = True
    is_in_vllm: bool = True

    @property
    def is_whole(self) -> bool:
        """Whole numbers alone."""
        return isinstance(self.neutral, int)

    @property
    def option(self) -> str:
        """On command lines."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def datatype(self) -> str:
        """Of the input of `tensorrt_llm`."""
        return "INT32" if self.is_whole else "FP32"


SAMPLING_FIELDS: Mapping[str, SamplingField] = {
    field.name: field
    for field in (
        SamplingField("temperature", 1.0, 0.0, 1e4, "of sampling; 0 takes the most probable token", "T",
                      is_default=True),
        SamplingField("top_p", 1.0, 0.0, 1.0, "samples of the fewest tokens that have this probability together", "P",
                      open_low=True, tensor="runtime_top_p", is_default=True),
        SamplingField("top_k", 0, -1, LARGEST_INT32, "samples of the K most probable tokens; 0 and -1: of all", "K",
                      tensor="runtime_top_k", is_default=True),
        SamplingField("min_p", 0.0, 0.0, 1.0, "drops tokens less probable than this share of the most probable one",
                      "P", is_default=True),
        SamplingField("repetition_penalty", 1.0, 1e-3, 1e3, "divides the logits of tokens that are there",
                      is_default=True),
        SamplingField("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY,
                      "subtracted from the logits of tokens that were generated"),
        SamplingField("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY,
                      "subtracted from a token's logit for each time that it was generated"),
        SamplingField("min_tokens", 0, 0, LARGEST_INT32, "tokens before which nothing ends the answer", "N"),
        SamplingField("top_p_decay", 1.0, 0.0, 1.0, "what top_p is multiplied by after each token", open_low=True,
                      tensor="runtime_top_p_decay", is_in_apis=False, is_in_vllm=False),
        SamplingField("top_p_min", MIN_TOP_P, 0.0, 1.0, "where the decay of top_p ends", open_low=True,
                      tensor="runtime_top_p_min", is_in_apis=False, is_in_vllm=False),
        SamplingField("top_p_reset_id", -1, -1, LARGEST_INT32, "the token after which top_p is its first value again",
                      tensor="runtime_top_p_reset_ids", is_in_apis=False, is_in_vllm=False),
    )
}  # fmt: skip
"""By name."""
API_SAMPLING = tuple(name for name, field in SAMPLING_FIELDS.items() if field.is_in_apis)
"""Those of the HTTP APIs and the commands."""
DEFAULT_FIELDS = tuple(name for name, field in SAMPLING_FIELDS.items() if field.is_default)
"""Those of generation_config.json. vLLM reads the same, and no `do_sample`."""
AUTO, NONE = GENERATION_CONFIGS = ("auto", "none")
"""The model's own generation_config.json, or no such file."""
