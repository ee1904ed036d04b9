"""The manifest: everything that compiler and runtime share of an engine, and the names of its files."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from kvforge.common.number_formats import ELEMENT_BYTES, KV_FORMATS, KVFormat
from kvforge.costs.cache import kv_bytes, kv_element_bytes, kv_scale_bytes, owner_cache
from kvforge.costs.shape import (
    Experts,
    LatentAttention,
    cached_numbers,
    cached_rows,
    expansion_weights,
    output_dim,
    query_dim,
)
from kvforge.costs.weights import step_weight_bytes
from kvforge.kv_policies import Full, KVPolicy, Need, OwnerCache, load, of_cache

SCHEMA_VERSION = 6
LATER_FIELDS = frozenset(
    {
        *("kv_bias", "k_norm", "decoupled_mode", "special_tokens", "punctuation_tokens", "policy_texts"),
        *("num_experts", "num_active_experts", "expert_intermediate_size", "dense_layers"),
        *("layer_head_dims", "layer_intermediate_sizes", "per_layer_input", "num_shared_experts", "query_rank"),
        *("latent_rank", "latent_rope_dim", "latent_nope_dim", "latent_value_dim"),
        *("auxiliary_model", "calibration"),
        *("plan_builder", "plan_version", "plan_capabilities", "plan_is_portable", "plan_plugins"),
    }
)
"""Fields that came after the schema version did: engines without them load, and keep their digest."""

AUXILIARY_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
"""What an engine says of its auxiliary model: ``num_layers`` are those that are run and have a cache."""

TOKENIZER_DIR = "tokenizer"
RANK_DIR = "rank0"
WEIGHTS_FILE = f"{RANK_DIR}/weights.safetensors"
OPERATORS_FILE = f"{RANK_DIR}/operators.so"
PLANS_FILE = f"{RANK_DIR}/plans.json"
"""What the builder said of the plans of target ``tensorrt``."""


def graph_names(max_draft_len: int, early_exit: bool, predict: bool = False) -> tuple[str, ...]:
    """Return the names of an engine's graphs, in the order they are built: ``early_exit`` only where the model has that
    head, ``verify`` only where there are drafts, ``predict`` only where another model fills the cache."""
    optional = {"early_exit": early_exit, "verify": max_draft_len > 0, "predict": predict}
    return ("lower", "upper", *(name for name, is_there in optional.items() if is_there))


def package_file(graph: str) -> str:
    """Return where the AOTInductor package of a graph lies in an engine."""
    return f"{RANK_DIR}/{graph}.pt2"


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime knows about an engine; ``cut == num_layers`` means the model has no cut.

    ``dtype`` is the activations' and that of weights which are no matrices; ``weight_dtype``, a key of
    ``WEIGHT_BYTES`` (``kvforge.common.number_formats``), is that of linear layers. ``owner_of_layer[i]`` is the layer
    whose K,V cache layer i reads. ``kv_dtype`` is a key of ``KV_FORMATS``;
    ``kv_scales`` holds (k_scale, v_scale) of each owner where it is static, else nothing. Limits: ``max_num_seqs``
    sequences and ``max_num_tokens`` packed tokens a step, ``max_seq_len`` tokens a sequence, ``max_draft_len``
    draft tokens of a sequence in one step; above 0 the engine has the graph ``verify``. With ``early_exit`` it has the
    graph ``early_exit``, whose head is counted in ``num_parameters``. ``kv_policy`` and all of its parameters say what
    becomes of K,V once a prompt is computed (``kvforge.kv_policies``). ``isa`` names the machine code: the architecture
    followed by the extensions it needs. ``kv_bias`` and ``k_norm`` say whether the K and V projections have biases and
    K a norm, None where an earlier kvforge, which did not record it, built the engine.
    """

    schema_version: int
    kvforge_version: str
    target: str
    isa: tuple[str, ...]
    torch_version: str
    dtype: str
    weight_dtype: str
    kv_dtype: str
    kv_scales: tuple[tuple[float, float], ...]
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    layer_windows: tuple[int, ...]
    cut: int
    owner_of_layer: tuple[int, ...]
    early_exit: bool
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    weights_file_bytes: int
    checkpoint_sha256: str
    operators: dict[str, int]
    files: dict[str, str]
    """SHA-256 of every file the engine was written with, by relative path; ``inspect --verify`` checks all."""
    kv_policy: str = Full.name
    kv_policy_parameters: dict[str, int] = field(default_factory=dict)
    kv_bias: bool | None = None
    k_norm: bool | None = None
    decoupled_mode: bool | None = None
    """Whether `kvforge serve` streams where it is not told; None is as true."""
    special_tokens: tuple[int, ...] = ()
    """Ids of the tokenizer's special tokens, for a KV policy that ``reads_tokens``."""
    punctuation_tokens: tuple[int, ...] = ()
    """Ids of the tokens that are punctuation, likewise."""
    policy_texts: tuple[tuple[int, ...], ...] = ()
    """Ids of the tokens of each of the KV policy's ``texts``."""

    num_experts: int | None = None
    """The experts of each layer but ``dense_layers``; None without a mixture of experts."""
    num_active_experts: int | None = None
    """How many of them a token goes to."""
    expert_intermediate_size: int | None = None
    """What ``intermediate_size`` is to an expert."""
    dense_layers: tuple[int, ...] = ()
    """Layers with an MLP in place of experts."""
    layer_head_dims: tuple[int, ...] = ()
    """Elements of each layer's heads, where they are not all ``head_dim``."""
    layer_intermediate_sizes: tuple[int, ...] = ()
    """The sizes of the layers' MLPs, where they are not all ``intermediate_size``."""
    per_layer_input: int | None = None
    """Numbers that each layer has of a token by itself; None for nothing."""
    num_shared_experts: int | None = None
    """Experts that every token goes to besides; None for nothing."""
    latent_rank: int | None = None
    """Of latent attention, with ``latent_rope_dim``: a token's row has ``head_dim`` numbers, the sum of both, which are
    its K and its V. None without it, like the fields that follow."""
    latent_rope_dim: int | None = None
    """Numbers of a row, and of each query, that rotate."""
    latent_nope_dim: int | None = None
    """Numbers of a head's query that do not rotate."""
    latent_value_dim: int | None = None
    """Numbers of a head's value."""
    query_rank: int | None = None
    """Numbers of the latent that queries are made of; None where there is no such latent."""
    auxiliary_model: dict[str, int] = field(default_factory=dict)
    """Of the model that fills the cache of prompts, ``AUXILIARY_SIZES``; empty for nothing."""
    calibration: str | None = None
    """The text that linear layers were rounded by: ``package`` or a file's SHA-256; None where they were not."""

    plan_builder: str | None = None
    """What built the plans of target ``tensorrt``: the extra that brings it; None without plans."""
    plan_version: str | None = None
    """Its version."""
    plan_capabilities: tuple[str, ...] = ()
    """The compute capabilities that the plans were built for."""
    plan_is_portable: bool = False
    """Later GPUs run them, too."""
    plan_plugins: tuple[str, ...] = ()
    """The plugins in the plans."""

    @property
    def policy(self) -> KVPolicy:
        """The KV policy; raises BuildError for one that is none, or that does not go with the cache."""
        return of_cache(load(self.kv_policy, self.kv_policy_parameters), self.kv_dtype)

    @property
    def graphs(self) -> tuple[str, ...]:
        """The names of the engine's graphs."""
        return graph_names(self.max_draft_len, self.early_exit, self.predicts)

    @property
    def predicts(self) -> bool:
        """Whether another model fills the cache of prompts; the engine then has the graph ``predict``."""
        return bool(self.auxiliary_model)

    @property
    def auxiliary_bytes_per_token(self) -> int:
        """Bytes of K and V that the auxiliary model keeps of a token, in the dtype of the computation."""
        sizes = self.auxiliary_model
        if not sizes:
            return 0
        return 2 * sizes["num_layers"] * sizes["num_kv_heads"] * sizes["head_dim"] * ELEMENT_BYTES[self.dtype]

    @property
    def upper_pools(self) -> slice:
        """Which of the owners' pools, in order, the upper graph is given: from the first on that it reads."""
        first = min(self.owner_of_layer[self.cut :], default=self.num_layers)
        return slice(sum(owner < first for owner in self.owners), None)

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that have a K,V cache, ascending."""
        return tuple(sorted(set(self.owner_of_layer)))

    @property
    def num_owners(self) -> int:
        """Number of layers that have a K,V cache."""
        return len(self.owners)

    @property
    def kv_format(self) -> KVFormat:
        """What ``kv_dtype`` says of the cache."""
        return KV_FORMATS[self.kv_dtype]

    @property
    def owner_cache(self) -> OwnerCache:
        """The cache of one owner."""
        return owner_cache(self, self.kv_dtype, self.page_size, 8 * ELEMENT_BYTES[self.dtype])

    @property
    def latent(self) -> LatentAttention | None:
        """The sizes of latent attention, where the model has that."""
        rank, rope_dim, nope_dim = self.latent_rank, self.latent_rope_dim, self.latent_nope_dim
        if rank is None or rope_dim is None or nope_dim is None or self.latent_value_dim is None:
            return None
        return LatentAttention(rank, rope_dim, nope_dim, self.latent_value_dim, self.query_rank)

    @property
    def query_dim(self) -> int:
        """Outputs of a layer's query projection."""
        return query_dim(self)

    @property
    def output_dim(self) -> int:
        """Inputs of a layer's output projection."""
        return output_dim(self)

    @property
    def cached_numbers(self) -> int:
        """Numbers one token keeps in the cache of one owner."""
        return cached_numbers(self)

    @property
    def cached_rows(self) -> int:
        """Rows of the cache that one token adds to one owner: a head's K, or its V, or both in one."""
        return cached_rows(self)

    @property
    def expansion_weights(self) -> int:
        """Weights of one owner that expand a latent row to keys and values; 0 without latent attention."""
        return expansion_weights(self)

    @property
    def experts(self) -> Experts | None:
        """The mixture of experts, where there is one."""
        num_experts, active, size = self.num_experts, self.num_active_experts, self.expert_intermediate_size
        if num_experts is None or active is None or size is None:
            return None
        return Experts(num_experts, active, self.num_shared_experts or 0, size, self.dense_layers)

    @property
    def kv_element_bytes_per_token(self) -> int:
        """Bytes of K and V one token keeps over all owners, without scales."""
        return kv_element_bytes(self, self.kv_dtype)

    @property
    def kv_scale_bytes_per_token(self) -> int:
        """Bytes of the scales, dynamic or of groups, of one token over all owners."""
        return kv_scale_bytes(self, self.kv_dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token keeps in the cache over all owners: K, V and their scales."""
        return kv_bytes(self, self.kv_dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one logical page over all owners, and of an auxiliary model's part of it."""
        return self.page_size * (self.kv_bytes_per_token + self.auxiliary_bytes_per_token)

    @property
    def exact_page_bytes(self) -> int:
        """Bytes over all owners of a page in the dtype of the computation."""
        return self.page_size * self.num_owners * self.cached_numbers * ELEMENT_BYTES[self.dtype]

    @property
    def exact_bytes(self) -> int:
        """Bytes of all exact pages of as many sequences as the engine serves; 0 unless pages are sealed."""
        count = self.policy.num_exact_pages(self.max_num_seqs, self.max_num_tokens, self.page_size)
        return count * self.exact_page_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: every linear layer and the head, without biases and scales, the
        lookup of embeddings and an early exit's head."""
        return step_weight_bytes(self, self.weight_dtype)

    @property
    def has_observers(self) -> bool:
        """Tokens go past the cut for what the KV policy makes of their attention."""
        return self.cut < self.num_layers and Need.ATTENTION_SCORES in self.policy.needs

    @property
    def max_num_survivors(self) -> int:
        """Tokens of one step that can go past the cut: the last of each sequence, and the drafts before it; any where
        the KV policy observes them there."""
        if self.has_observers:
            return self.max_num_tokens
        return min(self.max_num_tokens, self.max_num_seqs * (1 + self.max_draft_len))

    @property
    def sha256(self) -> str:
        """The digest in ``engine.json``, which no other engine has: it covers the digests of the engine's files."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON-ready data."""
        data = dataclasses.asdict(self)
        return {name: value for name, value in data.items() if value not in (None, (), {}) or name not in LATER_FIELDS}


def digest_of(data: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
