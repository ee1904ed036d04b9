"""The command line options that are fields of BuildOptions, the same for every command that builds an engine."""

import argparse
from collections.abc import Collection
from typing import Any

from kvforge.kv_policies import policies


def _flags() -> dict[str, dict[str, Any]]:
    """Return how each field is declared; None stands for what was not given."""
    return {
        "target": {"help": "cpu (this machine), cuda, tensorrt or vllm (default: cpu)"},
        "dtype": {"help": "of weights and arithmetic: auto, float32 or bfloat16 (default: auto)"},
        "weight_dtype": {
            "help": "weights of linear layers: auto (as --dtype), int8 (a scale per output), int4 (steps of it per 32 "
            "inputs), int4_scales (a scale per 32 inputs) or int4_zeros (and a zero point), these for --target cpu "
            "(default: auto)",
        },
        "kv_dtype": {
            "help": "the KV cache: auto, float32, bfloat16, fp8, int8, int4 or k8v4, which is int8 for K and int4 for "
            "V (a scale per token and head), kivi4, kivi3 or kivi2 (that many bits, whole pages at once), fp8_static "
            "or int8_static (a scale per layer, from a calibrated checkpoint) (default: auto)",
        },
        "max_num_seqs": {"type": int, "metavar": "N", "help": "sequences in one step (default: 64)"},
        "max_num_tokens": {"type": int, "metavar": "N", "help": "packed tokens in one step (default: 2048)"},
        "max_seq_len": {
            "type": int, "metavar": "N", "help": "tokens of prompt and output (default: the model's maximum)"
        },
        "page_size": {"type": int, "metavar": "N", "help": "tokens in a KV cache page (default: 32)"},
        "max_draft_len": {
            "type": int,
            "metavar": "N",
            "help": "draft tokens of a sequence in one step, for speculative decoding (default: 0, none)",
        },
        "early_exit": {
            "flag": "--no-early-exit",
            "action": "store_const",
            "const": False,
            "help": "leave the checkpoint's early-exit head out (default: build it where there is one)",
        },
        "compute_capabilities": {
            "metavar": "LIST",
            "help": "--target tensorrt: GPUs that plans are for: auto (with TensorRT for RTX all that it names, with "
            "TensorRT 11 the GPU here), current, or for RTX e.g. 8.9,12.0 (default: auto)",
        },
        "decoupled_mode": {
            "flag": "--no-decoupled-mode",
            "action": "store_const",
            "const": False,
            "help": "have `kvforge serve` give one response a request and no streaming, unless it is told --decoupled",
        },
        "kv_policy": {
            "metavar": "POLICY",
            "help": f"what becomes of K,V once they are written: {', '.join(policies())}; parameters follow as "
            "NAME:budget=512,…, of which docs/kv-policies.md tells (default: full)",
        },
        "engine_python": {
            "metavar": "PYTHON",
            "help": "--target vllm: the python of the environment with vLLM (default: $KVFORGE_VLLM_PYTHON)",
        },
        "tensor_parallel_size": {
            "type": int, "metavar": "N", "help": "--target vllm: ranks that divide each layer's heads (default: 1)"
        },
        "pipeline_parallel_size": {
            "type": int, "metavar": "N", "help": "--target vllm: ranks that divide the layers (default: 1)"
        },
        "engine_args": {"metavar": "JSON", "help": "--target vllm: further arguments of vLLM's engine, as an object"},
        "copy_checkpoint": {
            "action": "store_const",
            "const": True,
            "help": "--target vllm: have the checkpoint in the engine, not its path",
        },
        "kv_prediction": {
            "metavar": "PREDICTOR",
            "help": "a checkpoint of kvforge predict train, which fills the cache of prompts in the model's place",
        },
        "draft_head": {
            "metavar": "HEAD",
            "help": "what drafts for the method of its kind: a checkpoint of an EAGLE-3 head (eagle3), or mtp, the "
            "checkpoint's own module for multi-token prediction, or another checkpoint that carries it; with "
            "--max-draft-len",
        },
        "kv_scorer": {
            "metavar": "SCORER",
            "help": "what scores tokens for --kv-policy kvzap, of kvforge predict scorer or of kvpress (default: "
            "CHECKPOINT/kvzap)",
        },
        "calibration": {
            "metavar": "TEXT",
            "help": "what int8 and int4 weights are rounded by: a UTF-8 text, package (the text that comes with "
            "kvforge), none (to the nearest) or auto: package for int8 weights of models of up to 500 million "
            "parameters and int4 weights of up to 2 billion, else none (default: auto)",
        },
        "weight_bits": {
            "type": float,
            "metavar": "BITS",
            "help": "weights in 4 bits: so many bits a weight on average at most, more than 4 and less than 8; layers "
            "where 4 bits lose most are int8, chosen by the calibration text (default: all layers in 4 bits)",
        },
    }  # fmt: skip


def add_build_options(parser: argparse._ActionsContainer, leave_out: Collection[str] = ()) -> None:
    """Declare an option for each field of BuildOptions but those of ``leave_out``."""
    for name, how in _flags().items():
        if name not in leave_out:
            how.pop("flag", None)
            parser.add_argument(flag_of(name), dest=name, **how)


def flag_of(name: str) -> str:
    """Return the option for the field ``name`` of BuildOptions."""
    return str(_flags()[name].get("flag", f"--{name.replace('_', '-')}"))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of BuildOptions that the command line gives. Reads no torch: a server is told some of them."""
    values = {name: getattr(args, name, None) for name in _flags()}
    return {name: value for name, value in values.items() if value is not None}
