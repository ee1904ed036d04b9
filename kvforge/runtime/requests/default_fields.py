"""What a model says of sampling, and whether it is listened to: names that parsers need without numpy."""

DEFAULT_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of SamplingParams, and of generation_config.json under the same names. vLLM reads the same, and no `do_sample`."""
AUTO, NONE = GENERATION_CONFIGS = ("auto", "none")
"""The model's own generation_config.json, or no such file."""
