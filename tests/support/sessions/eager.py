"""An engine's session without an engine: the graphs as torch runs them, on the compiled CPU operators.

It takes what any session takes, ShadowKV's pools and inputs included, and is there in a second, where building an
engine takes many. What AOTInductor makes of a graph is not tested by it.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import plugins
from kvforge.checkpoint.model import open_model, read_model_config
from kvforge.compiler.build import find_scorer, num_positions, open_draft, open_prediction, tokens_of_policy
from kvforge.compiler.calibration import calibration_of
from kvforge.compiler.convert import convert_weights
from kvforge.compiler.cpu_graph import linears, packed_tensors
from kvforge.compiler.export import make_graph, uninitialised
from kvforge.compiler.manifest_fields import manifest_fields
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.runtime.sessions.compatibility import rope_tables
from kvforge.runtime.sessions.inputs import (
    DraftStep,
    LowerStep,
    PredictStep,
    UpperStep,
    VerifyStep,
    past_cut_inputs,
    policy_inputs,
)
from kvforge.runtime.sessions.pools import (
    Pool,
    Pools,
    allocate_auxiliary_pools,
    allocate_draft_pool,
    upper_pools,
)
from kvforge.runtime.sessions.session import Session
from model_defs import ModelConfig
from model_defs.graphs import EarlyExitGraph, LowerGraph, UpperGraph, VerifyGraph
from model_defs.head_kinds import HEAD_CODE
from model_defs.predict_graph import PredictGraph
from tests.support.sessions.fake import fake_manifest

load_operators = functools.cache(plugins.load_library)
"""Once in a process: each call reads all their sources."""


class EagerSession(Session):
    """See ``kvforge.runtime.sessions.session.Session``; ``weights`` are engine tensors by name."""

    def __init__(
        self,
        config: ModelConfig,
        options: ResolvedOptions,
        weights: Mapping[str, Tensor],
        tokens: Mapping[str, Any] | None = None,
    ) -> None:
        load_operators()
        self.config, self.options = config, options
        self.manifest = dataclasses.replace(manifest_of(config, options), **tokens or {})
        self._policy = self.manifest.policy
        self._weights = weights
        head = options.draft_head
        lower, upper = (make_graph(graph, config, options) for graph in (LowerGraph, UpperGraph))
        with torch.device("meta"):
            early_exit = EarlyExitGraph(config) if config.early_exit else None
        self._lower, self._upper = self._with_weights(lower), self._with_weights(upper)
        self._early_exit = None if early_exit is None else self._with_weights(early_exit)
        if options.prediction is not None:
            with torch.device("meta"):
                predict = PredictGraph(options.prediction, options.rotates_keys)
            self._predict = self._with_weights(predict)

        if head is not None:
            with torch.device("meta"):
                draft = HEAD_CODE[head.kind].graph(config, head)
            self._draft = self._with_weights(draft)

    def _with_weights(self, graph: nn.Module) -> nn.Module:
        graph = uninitialised(graph, self.config, self.options)
        graph.load_state_dict({name: self._weights[name] for name in graph.state_dict()}, assign=True)
        return graph.requires_grad_(False)

    @property
    def rope_tables(self) -> tuple[Tensor, Tensor]:
        return rope_tables(self._weights)

    def allocate_auxiliary_pools(self, num_pages: int) -> Pools:
        return allocate_auxiliary_pools(self.manifest, num_pages)

    @torch.inference_mode()
    def predict(self, step: PredictStep, pools: Pools, auxiliary_pools: Pools) -> Tensor:
        return self._predict(*step.inputs, pools, auxiliary_pools)

    def allocate_draft_pool(self, num_pages: int) -> Pool:
        return allocate_draft_pool(self.manifest, num_pages)

    @torch.inference_mode()
    def draft(self, step: DraftStep, pool: Pool) -> tuple[Tensor, Tensor]:
        return self._draft(*step, pool)

    @torch.inference_mode()
    def upper_and_states(self, step: UpperStep, pools: Pools) -> tuple[Tensor, Tensor]:
        behind = policy_inputs(step, self._policy), past_cut_inputs(step)
        return self._upper(*step.inputs, upper_pools(self.manifest, pools), *behind)

    @torch.inference_mode()
    def lower(self, step: LowerStep, pools: Pools) -> Tensor:
        return self._lower(
            *step.inputs, pools[self.manifest.lower_pools], policy_inputs(step, self._policy), *step.rows
        )

    @torch.inference_mode()
    def upper(self, step: UpperStep, pools: Pools) -> Tensor:
        behind = policy_inputs(step, self._policy), past_cut_inputs(step)
        result = self._upper(*step.inputs, upper_pools(self.manifest, pools), *behind)
        return result[0] if isinstance(result, tuple) else result

    @torch.inference_mode()
    def early_exit(self, hidden: Tensor, survivor_index: Tensor) -> Tensor:
        return self._early_exit(hidden, survivor_index)

    @torch.inference_mode()
    def verify(self, step: VerifyStep) -> tuple[Tensor, Tensor]:
        return VerifyGraph()(*step)


def eager_session(checkpoint: Path, options: BuildOptions, config: ModelConfig | None = None) -> EagerSession:
    """Return a session of the engine that ``build_engine`` would make with these arguments; or of the checkpoint's
    weights as ``config`` has them."""
    source = open_model(checkpoint)
    config = config or read_model_config(source)
    resolved = resolve(options, config, source.dtype("model.embed_tokens.weight"))
    config, predictor = config.for_length(resolved.max_seq_len), None
    scorer, config = find_scorer(options, resolved, config, source)
    if options.kv_prediction is not None:
        opened, prediction = open_prediction(options.kv_prediction, config, resolved)
        resolved, predictor = dataclasses.replace(resolved, prediction=prediction), (opened, prediction)
    draft = None
    if options.draft_head is not None:
        draft = open_draft(options.draft_head, source, config, resolved)
        resolved = dataclasses.replace(resolved, draft_head=draft[1])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        calibration = calibration_of(options, resolved, config, source)
        if calibration is not None:
            resolved = calibration.mix(source, config, resolved, options.weight_bits)
        convert_weights(
            source,
            config,
            resolved.torch_dtype,
            path,
            packed_dtype=resolved.packed_dtype,
            num_positions=num_positions(resolved),
            predictor=predictor,
            rounded=None if calibration is None else calibration.round(source, config, resolved),
            draft=draft,
            scorer=scorer,
            int8_layers=resolved.int8_layers,
        )
        weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tokens = None
    if resolved.policy.keeping.reads_tokens or resolved.policy.probing:
        tokens = tokens_of_policy(checkpoint / "tokenizer.json", config.vocab_size, resolved.policy)
    return EagerSession(config, resolved, weights, tokens)


def random_session(config: ModelConfig, options: BuildOptions, seed: int = 0, strength: float = 1.0) -> EagerSession:
    """Return a session of a model with random weights, drawn as those of ``make_checkpoint``, without one; those of its
    layers and of an early exit's head times ``strength``. A KV policy that reads tokens takes every seventh for special
    and every fifth for punctuation."""
    resolved = resolve(options, config, "F32")
    graphs = [LowerGraph(config), UpperGraph(config), *([EarlyExitGraph(config)] if config.early_exit else [])]
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for graph in graphs:
        for name, parameter in graph.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * (0.1 if parameter.dim() == 2 else 0.2)
            noise *= strength if name.startswith(("layers.", "lm_head_early_exit.")) and "norm" not in name else 1.0
            weights.setdefault(name, (1 + noise if "norm" in name else noise).to(resolved.torch_dtype))
    for name, layer in linears(config).items() if resolved.packed_dtype is not None else ():
        packed = packed_tensors(weights[f"{name}.weight"], layer, resolved.packed_dtype)
        weights |= {f"{name}.{part}": tensor for part, tensor in packed.items()}
    selecting = LowerGraph(config, (), resolved.policy.insertion.layer_insertion())
    buffers = dict(uninitialised(selecting, config, resolved).named_buffers())
    positions = {name: buffers[name] for name in ("inverse_frequencies", "rope_cos", "rope_sin") if name in buffers}
    tokens: dict[str, Any] = {
        "special_tokens": tuple(range(0, config.vocab_size, 7)),
        "punctuation_tokens": tuple(token for token in range(0, config.vocab_size, 5) if token % 7),
    }
    probing = resolved.policy.probing
    num_texts = 0 if probing is None else len(probing.texts)
    texts = tuple(tuple(range(5 * index, 5 * index + 4)) for index in range(num_texts))
    tokens = (tokens if resolved.policy.keeping.reads_tokens else {}) | {"policy_texts": texts}
    return EagerSession(config, resolved, weights | positions, tokens)


def manifest_of(config: ModelConfig, options: ResolvedOptions) -> Any:
    """Return the manifest of an engine, without what only its files can say."""
    return fake_manifest(**manifest_fields(config, options))
