"""A model with a SwiftKV cut (arXiv 2410.03960) for vLLM, of any family of ``model_defs``."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from kvforge.vllm_models.coverage import check_cut
from kvforge.vllm_models.layers import VllmBlock, VllmSingleInputKV
from model_defs import ModelConfig, load_config, supported_family
from model_defs.weights import weight_specs


class SwiftKVForCausalLM(nn.Module):
    """Layers below the cut run for all tokens, those above it for the tokens whose logits are wanted.

    The latter needs ``--kv-sharing-fast-prefill``; without it all tokens run all layers, with the same result. It has
    no pipeline parallelism. Raises ValueError for a model that it cannot run.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        hf = vllm_config.model_config.hf_config.to_dict()
        self.family, self.config = supported_family(hf), load_config(hf)
        config = self.config
        _check(config, vllm_config)
        self.embed = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(layer): VllmBlock(config, vllm_config, layer) for layer in range(config.cut)})
        self.single_input = VllmSingleInputKV(config, vllm_config)
        for layer in range(config.cut, config.num_layers):
            owner_name = VllmSingleInputKV.cache_name(config.owner_of_layer[layer])
            self.layers[str(layer)] = VllmBlock(config, vllm_config, layer, owner_name)
        self.k_norms = {
            owner: self.layers[str(owner)].k_norm for owner in config.upper_owners if config.qk_norm
        }  # a plain dict: the blocks hold the parameters
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
        if config.tie_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.embed)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Return ``[T, hidden]``."""
        return self.embed(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the normed hidden state ``[T, hidden]``, which is 0 for tokens that were dropped at the cut."""
        hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in range(self.config.cut):
            hidden = self.layers[str(layer)](positions, hidden)
        self.single_input(positions, hidden, self.k_norms)
        survivors = self._survivors()
        if survivors is None:
            return self._above_the_cut(positions, hidden)
        result = torch.zeros_like(hidden)
        result[survivors] = self._above_the_cut(positions[survivors], hidden[survivors])
        return result

    def _above_the_cut(self, positions: Tensor, hidden: Tensor) -> Tensor:
        for layer in range(self.config.cut, self.config.num_layers):
            hidden = self.layers[str(layer)](positions, hidden)
        return self.norm(hidden)

    def _survivors(self) -> Tensor | None:
        """The indices of the tokens that the layers above the cut have metadata for; None where it is all of them."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # a step without requests
            return None
        last = metadata[self.layers[str(self.config.num_layers - 1)].attn.layer_name]
        indices = getattr(last, "logits_indices_padded", None)
        return None if indices is None else indices[: last.num_logits_indices]

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Return ``[R, vocab]`` of R rows of ``forward``'s result, on the rank that samples."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take this rank's part of each tensor of a checkpoint; those of the teacher alone are passed over.

        Raises:
            ValueError: a tensor is missing.
        """
        places = _places(self.config)
        parameters, loaded, missing = dict(self.named_parameters()), set[str](), set(places)
        for stored, tensor in weights:
            source = self.family.weight_name(stored)
            if source not in places:
                continue
            name, shard = places[source]
            parameter = parameters[name]
            load = getattr(parameter, "weight_loader", default_weight_loader)
            load(parameter, tensor) if shard is None else load(parameter, tensor, shard)
            loaded.add(name)
            missing.discard(source)
        if missing:
            raise ValueError(f"the checkpoint lacks {sorted(missing)[0]}; make it again with kvforge rewire.")
        return loaded


def _check(config: ModelConfig, vllm_config: VllmConfig) -> None:
    size = get_tensor_model_parallel_world_size()
    if not config.is_swiftkv:
        raise ValueError("the model has no cut; serve the checkpoint that it was made of.")
    check_cut(config, vllm_config.quant_config is not None)
    if config.num_kv_heads % size:
        raise ValueError(
            f"the {config.num_kv_heads} KV heads cannot be divided among {size} ranks; give a tensor parallel size "
            "that divides them."
        )


def _places(config: ModelConfig) -> dict[str, tuple[str, int | str | None]]:
    """Return for each checkpoint tensor the parameter that holds it and which of its shards it is."""
    places: dict[str, tuple[str, int | str | None]] = {}
    for spec in weight_specs(config):
        if "early_exit" in spec.name:
            continue
        names: Iterable[int | str | None] = range(len(spec.sources))
        if len(spec.sources) == 1:
            names = [None]
        elif ".qkv." in spec.name:
            names = "qkv"
        places.update((source.name, (spec.name, shard)) for source, shard in zip(spec.sources, names, strict=True))
    return places
