"""Names of the files that a Hugging Face-format checkpoint has."""

CONFIG = "config.json"
QUANTIZATION = "hf_quant_config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
