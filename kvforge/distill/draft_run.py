"""`kvforge distill --draft-head` as a function: from a checkpoint and data to an EAGLE-3 head in the published form."""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvforge.checkpoint import Checkpoint
from kvforge.checkpoint.draft_head import IDS, IS_DRAFTED, TOKENS, default_layers, head_config
from kvforge.checkpoint.model import check_has_no_states, check_is_rewired, check_weights, open_model, read_model_config
from kvforge.checkpoint.output import check_output, work_folder
from kvforge.checkpoint.safetensors_writer import DTYPES, TensorSpec
from kvforge.checkpoint.sharded_writer import write_sharded
from kvforge.common.dtypes import COMPUTE_DTYPES
from kvforge.common.errors import CheckpointError, KvforgeError
from kvforge.common.staging import staging_directory
from kvforge.distill.config import DistillConfig
from kvforge.distill.data import load_data
from kvforge.distill.draft_module import DraftModule
from kvforge.distill.draft_trainer import DraftTrainee, train_head
from kvforge.distill.export import MAX_SHARD_BYTES
from kvforge.distill.loop import RunSummary
from kvforge.distill.packing import DataSettings, PackedData
from kvforge.swiftkv import SwiftKVForCausalLM, load_model
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead

MOST_TOKENS = 32000
"""Of a head, unless it is told: the target's most frequent ones."""


@dataclass(frozen=True)
class HeadSummary(RunSummary):
    """The head ``output`` reads the streams that enter ``layers`` and drafts ``draft_vocab`` tokens."""

    layers: tuple[int, ...]
    draft_vocab: int


def layers_of(config: ModelConfig) -> tuple[int, int, int]:
    """Return the layers that a head is trained to read: at a cut none above it, so that it knows prompts too."""
    if config.has_cut:
        return min(1, config.cut), config.cut // 2, config.cut
    return default_layers(config) if config.num_layers >= 6 else (1, config.num_layers // 2, config.num_layers - 1)


def train_draft_head(
    src: str | Path,
    dst: str | Path,
    data: str | Path,
    config: DistillConfig,
    settings: DataSettings | None = None,
    *,
    draft_vocab: int | None = None,
    work: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> HeadSummary:
    """Train a head for the checkpoint ``src``, with a cut or without one, on ``data`` (see ``load_data``), and write it
    to ``dst``. ``draft_vocab`` of the target's tokens, those most frequent in the data, are drafted. A run that was
    interrupted continues from ``work``, as with ``distill_checkpoint``.

    Raises:
        CheckpointError: ``src`` cannot be read, or is a model that heads are not trained for.
        KvforgeError: ``dst`` may not be written (``check_output``), ``draft_vocab`` is out of its range, the data is
            unusable, or see ``train_head``.
    """
    src, dst = Path(src), Path(dst)
    check_output(dst, [src, Path(data)], overwrite)
    work = work_folder(work, dst, [src])
    checkpoint, sizes = _open(src)
    vocab = min(MOST_TOKENS, sizes.vocab_size) if draft_vocab is None else draft_vocab
    if not 1 <= vocab <= sizes.vocab_size:
        raise KvforgeError(f"--draft-vocab is {vocab}; give 1 to {sizes.vocab_size}, the tokens of the model.")
    settings = settings or DataSettings(config.length)
    settings = dataclasses.replace(settings, length=min(settings.length, sizes.max_position))
    config = dataclasses.replace(config, length=settings.length)
    packed, report = load_data(data, src, sizes.vocab_size, settings, progress and sys.stderr.isatty())
    head, token_of = head_for(sizes, vocab), _most_frequent(packed, sizes.vocab_size, vocab)
    target = load_model(checkpoint, sizes, COMPUTE_DTYPES[config.dtype])
    trainee = DraftTrainee(target, _new_module(target, head, token_of, config.seed), head, token_of, config)
    state = train_head(trainee, packed, work, progress=progress)
    check_output(dst, [src], overwrite)  # another thing may have come there while the run went on
    with staging_directory(dst, replace=overwrite) as staging:
        dtype = DTYPES[checkpoint.dtype("model.embed_tokens.weight")]
        write_head(staging, trainee.module, head, token_of, sizes, dtype)
    return HeadSummary.of(dst, work, state, report, layers=head.layers, draft_vocab=head.draft_vocab)


def head_for(config: ModelConfig, draft_vocab: int) -> DraftHead:
    """Return the head that is trained for a model: of its size and rotation, with one layer of such heads."""
    layer = dataclasses.replace(
        config.first_layers(1),
        layer_windows=(0,),
        layer_owners=(),
        qk_norm=False,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )
    return DraftHead(layer, layers_of(config), draft_vocab)


def write_head(
    folder: Path, module: nn.Module, head: DraftHead, token_of: Tensor, config: ModelConfig, dtype: torch.dtype
) -> None:
    """Write a trained head into ``folder``, its weights in ``dtype``."""
    tensors: dict[str, Tensor] = {name: each.detach().cpu().to(dtype) for name, each in module.state_dict().items()}
    if head.draft_vocab < config.vocab_size:
        tensors[TOKENS] = token_of.long().cpu() - torch.arange(head.draft_vocab)
        tensors[IS_DRAFTED] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(
            0, token_of.long().cpu(), True
        )
    specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    write_sharded(folder, specs, lambda spec: tensors[spec.name], MAX_SHARD_BYTES)
    fields: dict[str, Any] = head_config(head) | {
        IDS: list(head.layers),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _open(src: Path) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = open_model(src)
    if checkpoint.quantization is not None:
        raise CheckpointError(f"{src} is quantized ({checkpoint.quantization}); train a head for the original.")
    sizes = read_model_config(checkpoint)
    check_is_rewired(checkpoint)
    check_has_no_states(checkpoint)
    check_weights(checkpoint, sizes)
    if sizes.latent is not None or sizes.rope.kind != "default" or sizes.activation != "silu":
        raise CheckpointError(
            f"{src} has latent attention, scaled RoPE or another activation than SiLU, which no head is trained with; "
            "take a published head for it."
        )
    return checkpoint, sizes


def _new_module(target: SwiftKVForCausalLM, head: DraftHead, token_of: Tensor, seed: int) -> DraftModule:
    """Return a head with random weights and the target's LM head."""
    generator = torch.Generator().manual_seed(seed)
    module = DraftModule(target.sizes.hidden_size, head)
    for parameter in module.parameters():
        with torch.no_grad():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
    output = target.model.embed_tokens if target.sizes.tie_embeddings else target.lm_head
    module.lm_head.weight.data.copy_(output.weight.data[token_of.long()])
    return module


def _most_frequent(data: PackedData, vocab_size: int, count: int) -> Tensor:
    """Return the ``count`` most frequent tokens of the data, ascending; of equally frequent ones the lowest."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in range(data.num_sequences):
        batch = data.batch([index])
        padding = batch.segments.max()
        ids = batch.input_ids[(batch.segments < padding) | (batch.weight > 0)]
        counts += torch.bincount(ids, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values.int()
