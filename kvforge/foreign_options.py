"""Options of vLLM, llama.cpp and TensorRT-LLM: what they are spelt here, what is nearest, or what there is instead.

Names in the last two tables have hyphens and no leading dashes; those that read the same with hyphens here need no row.
"""

ALIASES = {
    # sizes
    "--max-seq-len": ("--max-model-len", "--ctx-size", "-c"),
    "--max-num-tokens": ("--max-num-batched-tokens",),
    "--max-num-seqs": ("--max-batch-size", "--parallel", "-np"),
    "--prefix-host-gib": ("--kv-offloading-size",),
    "--page-size": ("--block-size", "--tokens-per-block"),
    # formats and ranks
    "--kv-dtype": ("--kv-cache-dtype",),
    "--weight-dtype": ("--quantization",),
    "--tensor-parallel-size": ("-tp", "--tp-size", "--tp"),
    "--pipeline-parallel-size": ("-pp", "--pp-size", "--pp"),
    # the server
    "--address": ("--host",),
    "--openai-port": ("--port",),
    "--served-model-name": ("--alias",),
    "--tool-call-format": ("--tool-call-parser", "--tool-parser"),
    "--chat-template": ("--chat-template-file",),
    "--threads": ("-t",),
    "--no-prefix-cache": ("--no-enable-prefix-caching",),
    # speculation
    "--num-speculative-tokens": ("--draft-max",),
    "--prompt-lookup-max": ("--ngram-prompt-lookup-max",),
    "--prompt-lookup-min": ("--ngram-prompt-lookup-min",),
    # sampling
    "--temperature": ("--temp",),
    "--max-tokens": ("--n-predict", "--predict", "--max-new-tokens"),
    "--repetition-penalty": ("--repeat-penalty",),
    "--stop": ("--reverse-prompt",),
    "--system": ("--system-prompt",),
    "--prompt": ("-p",),
    # measuring
    "--input-len": ("--random-input-len", "-p"),
    "--output-len": ("--random-output-len", "-n"),
    "--concurrency": ("--max-concurrency",),
}
"""Options by their spellings elsewhere, whose values have the same form: any command that has the option takes them."""

ALWAYS_ON = (
    "--enable-prefix-caching", "--enable-block-reuse", "--enable-chunked-prefill", "--cont-batching",
    "--enable-auto-tool-choice", "--jinja", "--metrics",
)  # fmt: skip
"""Switches of other servers that ask for what a server here does in any case: ``kvforge serve`` takes them."""

NEAREST = {
    # sizes
    "max-input-len": "--max-seq-len",
    "max-prefill-tokens": "--max-num-tokens",
    "batch-size": "--max-num-tokens",
    "ubatch-size": "--max-num-tokens",
    "gpu-memory-utilization": "--kv-cache-gib",
    "kv-cache-memory-bytes": "--kv-cache-gib",
    "free-gpu-memory-fraction": "--kv-cache-gib",
    "slot-save-path": "--prefix-dir",
    "prompt-cache": "--prefix-dir",
    "cache-ram": "--prefix-host-gib",
    "host-cache-size": "--prefix-host-gib",
    "kv-cache-free-gpu-memory-fraction": "--kv-cache-gib",
    # formats
    "cache-type-k": "--kv-dtype",
    "cache-type-v": "--kv-dtype",
    "n": "--max-tokens",
    "ctk": "--kv-dtype",
    "ctv": "--kv-dtype",
    "qformat": "--weight-dtype",
    # ranks and targets
    "backend": "--target",
    "device": "--target",
    # the server
    "allowed-origins": "--cors-origin",
    "model-name": "--served-model-name",
    "reasoning-parser": "--reasoning-format",
    "uvicorn-log-level": "--log-level",
    "disable-log-requests": "--log-level",
    # speculation
    "speculative-config": "--speculative-method",
    "speculative-decoding-mode": "--speculative-method",
    "speculative-model": "--draft-engine",
    "spec-type": "--speculative-method",
    "model-draft": "--draft-engine",
    "md": "--draft-engine",
    # files
    "output-dir": "--output",
    "config": "--recipe",
    "extra-llm-api-options": "--recipe",
    "dataset": "--workloads",
    "dataset-path": "--workloads",
}
"""Options by the nearest one here, whose values may be of another form."""

_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_ALWAYS = "this is always on"
_TLS = "the gateway speaks plain HTTP: put a proxy with TLS in front"
_POSITIONAL = "name the engine or checkpoint without an option"
_TEXT_ONLY = "engines take text alone"
_GENERATES = "engines generate text; embeddings and ranks are not supported"
_ONE_TARGET = "an engine is for one target, which kvforge build --target chooses"
_OPERATORS = "operators are chosen by the target"
_ONE_ENGINE = "a server has one engine: start one for each replica"

OTHERWISE = {
    **dict.fromkeys(("enable-lora", "lora-modules", "max-lora-rank", "max-loras", "lora", "lora-dir"), _LORA),
    **dict.fromkeys(("lora-plugin", "lora-scaled", "lora-target-modules"), _LORA),
    **dict.fromkeys(("cb", "paged-kv-cache", "use-paged-context-fmha", "remove-input-padding"), _ALWAYS),
    **dict.fromkeys((name[2:] for name in ALWAYS_ON), _ALWAYS),
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-key-file", "ssl-cert-file"), _TLS),
    **dict.fromkeys(("model", "m", "checkpoint-dir", "engine-dir", "hf-repo", "hf"), _POSITIONAL),
    **dict.fromkeys(("limit-mm-per-prompt", "mmproj", "max-multimodal-len"), _TEXT_ONLY),
    **dict.fromkeys(("embedding", "embeddings", "reranking", "runner"), _GENERATES),
    **dict.fromkeys(("n-gpu-layers", "ngl", "gpu-layers", "cpu-offload-gb"), _ONE_TARGET),
    "weight-streaming": _ONE_TARGET,
    "swap-space": "a sequence that is preempted is computed again",
    "stream": "texts are shown as they grow",
    **dict.fromkeys(("gemm-plugin", "gpt-attention-plugin", "attention-backend", "flash-attn", "fa"), _OPERATORS),
    "override-generation-config": "give --temperature, --top-p, --top-k, --min-p or --repetition-penalty",
    "enforce-eager": "graphs are compiled when an engine is built",
    **dict.fromkeys(("data-parallel-size", "enable-expert-parallel", "ep-size"), _ONE_ENGINE),
    **dict.fromkeys(("base-url", "url"), "generate, chat and bench take a server's URL in place of the engine"),
    "trust-remote-code": "code of checkpoints is never run",
    "tokenizer": "an engine has the tokenizer of its checkpoint",
    "load-format": "checkpoints are read as safetensors",
    "download-dir": "HF_HOME says where the Hub's files go",
    "max-beam-width": "beam search is not supported",
    "calculate-kv-scales": "kvforge quantize makes a checkpoint with scales of the cache",
}
"""Options by a clause that says what there is in their place."""
