"""``kvforge inspect``: what an engine is, and whether its files are intact."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvforge.commands.parsers import add_command

if TYPE_CHECKING:
    from kvforge.manifest import Manifest


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = add_command(
        subparsers,
        "inspect",
        help="show what an engine is and check its files",
        example="kvforge inspect ENGINE --verify",
    )
    parser.add_argument("engine", type=Path, help="engine directory")
    parser.add_argument("--verify", action="store_true", help="also compare every file with its recorded SHA-256")
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the manifest with derived sizes; raises EngineError for a damaged engine."""
    from kvforge.manifest import load_manifest, load_plans, verify_files
    from kvforge.planning.sequence_memory import sequence_bytes
    from kvforge.tensorrt.compatibility import capabilities_of
    from kvforge.tensorrt.installed import TITLES

    manifest = load_manifest(args.engine)
    model = manifest.model
    if args.verify:
        verify_files(args.engine, manifest)
    memory = sequence_bytes(manifest)
    plans = load_plans(args.engine, manifest)
    derived = {
        "owners": list(model.owners),
        "kv_bytes_per_token": manifest.kv_bytes_per_token,
        "kv_scale_bytes_per_token": manifest.kv_scale_bytes_per_token,
        "auxiliary_bytes_per_token": manifest.auxiliary_bytes_per_token,
        "draft_head_bytes_per_token": manifest.draft_head_bytes_per_token,
        "state_bytes": manifest.state_bytes,
        "page_bytes": manifest.page_bytes,
        "upper_page_bytes": manifest.upper_page_bytes,
        "exact_bytes": manifest.exact_bytes,
        **memory,
        "weight_bytes": manifest.weight_bytes,
        "weight_bits": manifest.weight_bits,
        "prefill_flops_per_token_at_1024": manifest.prefill_flops_per_token(1024),
        "engine_bytes": sum(path.stat().st_size for path in args.engine.rglob("*") if path.is_file()),
    }
    if args.json:
        print(json.dumps(manifest.shown() | derived | ({"plans": plans} if plans else {}), indent=1))
        return 0
    rows = {
        "model": f"{model.model_type}, {manifest.num_parameters / 1e6:.1f}M parameters, {manifest.dtype}",
        "weights": f"{manifest.weight_dtype} linear layers{_rounded_by(manifest)}, "
        + (f"{len(manifest.int8_layers)} of them int8, " if manifest.int8_layers else "")
        + f"{manifest.weight_bits:.2f} bits a weight, {manifest.weight_bytes / 1e6:.1f} MB read by a decode step",
        "target": f"{manifest.target} ({manifest.isa[0]}), torch {manifest.torch_version}",
        "layers": f"{model.num_layers} x {model.hidden_size}, {model.num_heads} heads / "
        f"{model.num_kv_heads} KV heads of {model.head_dim}",
        "SwiftKV": (f"prompt tokens stop at layer {model.cut}" if model.has_cut else "no cut")
        + (", early exit there" if model.early_exit else "")
        + (f", layers above it see {model.num_anchors} anchors and what follows" if model.is_blind else ""),
        "KV cache": f"{model.num_owners} of {model.num_layers} layers own one (layers "
        f"{', '.join(map(str, model.owners))}), pages of {manifest.page_size} tokens, "
        f"{manifest.kv_bytes_per_token} bytes per token"
        + (f", {manifest.upper_page_bytes // manifest.page_size} of them above the cut" if model.is_blind else ""),
        "KV format": _kv_format(manifest),
        "KV policy": str(manifest.policy),
        "sequence": _sequence(manifest, memory),
        "limits": f"{manifest.max_num_seqs} sequences, {manifest.max_num_tokens} tokens a step, "
        f"{manifest.max_seq_len} tokens a sequence, "
        + (f"{manifest.max_draft_len} drafts a sequence" if manifest.max_draft_len else "no drafts"),
        "prefill": f"{derived['prefill_flops_per_token_at_1024'] / 1e6:.2f} MFLOP per prompt token at 1024 tokens",
        "size": f"{derived['engine_bytes'] / 1e6:.1f} MB on disk",
        "checkpoint": f"sha256 {manifest.checkpoint_sha256[:16]}…",
    }
    if model.linear is not None:
        rows["states"] = (
            f"{len(model.linear_layers)} layers that keep a state, {manifest.state_bytes} bytes per sequence"
        )
    if manifest.auxiliary_model is not None:
        layers = manifest.auxiliary_model.num_layers
        rows["prediction"] = (
            f"{layers} layer{'' if layers == 1 else 's'} of an auxiliary model for the cache of prompts, "
            f"{manifest.auxiliary_bytes_per_token} more bytes per token"
        )
    if (head := manifest.draft_head) is not None:
        entered = [str(layer) for layer in head.layers if layer < model.num_layers]
        read = [f"enters layers {', '.join(entered)}"] if entered else []
        read += [f"leaves layer {model.num_layers - 1}"] if len(entered) < len(head.layers) else []
        rows["draft head"] = (
            f"{head.kind}, reads what {' and what '.join(read)}, drafts {head.draft_vocab} of "
            f"{model.vocab_size} tokens, {manifest.draft_head_bytes_per_token} more bytes per token"
        )
    if plans:
        rows["plans"] = (
            f"{TITLES.get(manifest.plan_builder or '', 'TensorRT')} {manifest.plan_version}, compute capability "
            f"{capabilities_of(manifest)}; plugins {', '.join(manifest.plan_plugins)}"
        )
        rows |= {f"  {graph}": _plan(plan) for graph, plan in plans.items()}
    for name, value in rows.items():
        print(f"{name:<11} {value}")
    if args.verify:
        print(f"{'files':<11} all {len(manifest.files)} match their recorded SHA-256")
    return 0


def _sequence(manifest: "Manifest", memory: dict[str, int]) -> str:
    """Say what a prompt of the longest length keeps, and beside another policy what it would keep in full."""
    from kvforge.common.byte_sizes import format_bytes
    from kvforge.kv_policies import Need

    device, host, full = (memory[f"sequence_{name}_bytes"] for name in ("device", "host", "full"))
    size = f"{format_bytes(device)} on the device"
    if Need.OWN_CACHE in manifest.policy.needs:
        size += f", {format_bytes(host)} in host memory (in full {format_bytes(full)})"
    return f"{size} after a prompt of {manifest.max_seq_len} tokens"


def _plan(plan: dict[str, Any]) -> str:
    """Say how large a plan is, and what its builder says that it takes of the GPU."""
    from kvforge.common.byte_sizes import format_bytes

    size = format_bytes(plan["plan_bytes"])
    if "layers" not in plan:
        return size
    weights, working = (format_bytes(plan[f"{name}_bytes"]) for name in ("weight", "activation"))
    return f"{size}, of which {weights} weights; {working} of working memory, {sum(plan['layers'].values())} layers"


def _rounded_by(manifest: "Manifest") -> str:
    """Say by which text weights were rounded, if by one."""
    if manifest.calibration is None:
        return ""
    return f", rounded by {'the text of kvforge' if manifest.calibration == 'package' else 'a text of your own'}"


def _kv_format(manifest: "Manifest") -> str:
    """Say how the cache stores its numbers, and what the scales cost."""
    from kvforge.common.byte_sizes import format_bytes

    if manifest.kv_format.scales == "dynamic":
        share = manifest.kv_scale_bytes_per_token
        return f"{manifest.kv_dtype}, one float32 scale per token and head ({share} of the bytes per token)"
    if manifest.kv_format.scales == "static":
        flat = [scale for scales in manifest.kv_scales for scale in scales]
        return f"{manifest.kv_dtype}, one scale per owner for K and for V ({min(flat):.3g} to {max(flat):.3g})"
    if manifest.kv_format.is_grouped:
        share = manifest.kv_scale_bytes_per_token
        exact = format_bytes(manifest.exact_bytes)
        return (
            f"{manifest.kv_dtype}, two float16 a group ({share} of the bytes per token); exact pages take {exact} more"
        )
    return manifest.kv_dtype
