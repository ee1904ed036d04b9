"""Options of vLLM, llama.cpp and TensorRT-LLM by the nearest option here, or by what there is in its place.

Names have hyphens and no leading dashes; those that read the same with hyphens here need no row.
"""

NEAREST = {
    # sizes
    "max-model-len": "--max-seq-len",
    "ctx-size": "--max-seq-len",
    "max-input-len": "--max-seq-len",
    "max-num-batched-tokens": "--max-num-tokens",
    "max-prefill-tokens": "--max-num-tokens",
    "batch-size": "--max-num-tokens",
    "ubatch-size": "--max-num-tokens",
    "max-batch-size": "--max-num-seqs",
    "parallel": "--max-num-seqs",
    "max-concurrency": "--concurrency",
    "block-size": "--page-size",
    "tokens-per-block": "--page-size",
    "gpu-memory-utilization": "--kv-cache-gib",
    "kv-cache-memory-bytes": "--kv-cache-gib",
    "free-gpu-memory-fraction": "--kv-cache-gib",
    "kv-cache-free-gpu-memory-fraction": "--kv-cache-gib",
    # formats
    "kv-cache-dtype": "--kv-dtype",
    "cache-type-k": "--kv-dtype",
    "cache-type-v": "--kv-dtype",
    "quantization": "--weight-dtype",
    "qformat": "--weight-dtype",
    # ranks and targets
    "tp-size": "--tensor-parallel-size",
    "tp": "--tensor-parallel-size",
    "pp-size": "--pipeline-parallel-size",
    "pp": "--pipeline-parallel-size",
    "backend": "--target",
    "device": "--target",
    # the server
    "host": "--address",
    "port": "--openai-port",
    "api-key": "--api-key-file",
    "alias": "--served-model-name",
    "model-name": "--served-model-name",
    "tool-call-parser": "--tool-call-format",
    "tool-parser": "--tool-call-format",
    "reasoning-parser": "--reasoning-format",
    "chat-template-file": "--chat-template",
    "uvicorn-log-level": "--log-level",
    "no-enable-prefix-caching": "--no-prefix-cache",
    # speculation
    "speculative-config": "--speculative-method",
    "speculative-decoding-mode": "--speculative-method",
    "speculative-model": "--draft-engine",
    "model-draft": "--draft-engine",
    "draft-max": "--num-speculative-tokens",
    "ngram-prompt-lookup-max": "--prompt-lookup-max",
    "ngram-prompt-lookup-min": "--prompt-lookup-min",
    # sampling
    "temp": "--temperature",
    "n-predict": "--max-tokens",
    "predict": "--max-tokens",
    "max-new-tokens": "--max-tokens",
    "repeat-penalty": "--repetition-penalty",
    "reverse-prompt": "--stop",
    "system-prompt": "--system",
    # files
    "output-dir": "--output",
    "config": "--recipe",
    "extra-llm-api-options": "--recipe",
    "dataset": "--workloads",
    "dataset-path": "--workloads",
    "random-input-len": "--input-len",
    "random-output-len": "--output-len",
}
"""Options by the nearest one here, whose values may be of another form."""

_LORA = "LoRA adapters are not supported: merge them into the checkpoint"
_ALWAYS = "this is always on"
_TLS = "the gateway speaks plain HTTP: put a proxy with TLS in front"
_POSITIONAL = "name the engine or checkpoint without an option"
_TEXT_ONLY = "engines take text alone"
_GENERATES = "engines generate text; embeddings and ranks are not supported"
_ONE_TARGET = "an engine is for one target, which kvforge build --target chooses"
_ONE_ENGINE = "a server has one engine: start one for each replica"

OTHERWISE = {
    **dict.fromkeys(("enable-lora", "lora-modules", "max-lora-rank", "max-loras", "lora", "lora-dir"), _LORA),
    **dict.fromkeys(("lora-plugin", "lora-scaled", "lora-target-modules"), _LORA),
    **dict.fromkeys(("enable-chunked-prefill", "cont-batching", "paged-kv-cache", "enable-auto-tool-choice"), _ALWAYS),
    **dict.fromkeys(("use-paged-context-fmha", "remove-input-padding", "jinja", "metrics"), _ALWAYS),
    "enable-prefix-caching": "prefixes are cached unless --no-prefix-cache is given",
    "enable-block-reuse": "prefixes are cached unless --no-prefix-cache is given",
    **dict.fromkeys(("ssl-keyfile", "ssl-certfile", "ssl-key-file", "ssl-cert-file"), _TLS),
    **dict.fromkeys(("model", "checkpoint-dir", "engine-dir", "hf-repo"), _POSITIONAL),
    **dict.fromkeys(("limit-mm-per-prompt", "mmproj", "max-multimodal-len"), _TEXT_ONLY),
    **dict.fromkeys(("embedding", "embeddings", "reranking", "runner"), _GENERATES),
    **dict.fromkeys(("n-gpu-layers", "gpu-layers", "cpu-offload-gb", "swap-space", "weight-streaming"), _ONE_TARGET),
    "override-generation-config": "give --temperature, --top-p, --top-k, --min-p or --repetition-penalty",
    "enforce-eager": "graphs are compiled when an engine is built",
    **dict.fromkeys(("data-parallel-size", "enable-expert-parallel", "ep-size"), _ONE_ENGINE),
    "trust-remote-code": "code of checkpoints is never run",
    "tokenizer": "an engine has the tokenizer of its checkpoint",
    "load-format": "checkpoints are read as safetensors",
    "download-dir": "HF_HOME says where the Hub's files go",
    "max-beam-width": "beam search is not supported",
    "threads": "OMP_NUM_THREADS sets the number of threads",
    "gemm-plugin": "operators are chosen by the target",
    "gpt-attention-plugin": "operators are chosen by the target",
    "calculate-kv-scales": "kvforge quantize makes a checkpoint with scales of the cache",
}
"""Options by a clause that says what there is in their place."""
