"""The manifest: everything that compiler and runtime share of an engine, and the names of its files."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from kvforge.common.number_formats import KV_FORMATS, KVFormat
from kvforge.costs.cache import (
    cached_numbers,
    kv_bytes,
    kv_bytes_above,
    kv_bytes_below,
    kv_element_bytes,
    kv_scale_bytes,
    state_bytes,
)
from kvforge.costs.cache_layout import CacheLayout
from kvforge.costs.flops import skipped_token
from kvforge.costs.weights import bytes_more_as_int8, step_weight_bytes, weight_bits
from kvforge.kv_policies import Full, KVPolicy, OwnerCache, load, of_cache
from model_defs import ModelConfig
from model_defs.draft_head import DraftHead

SCHEMA_VERSION = 7

TOKENIZER_DIR = "tokenizer"
RANK_DIR = "rank0"
WEIGHTS_FILE = f"{RANK_DIR}/weights.safetensors"
OPERATORS_FILE = f"{RANK_DIR}/operators.so"
PLANS_FILE = f"{RANK_DIR}/plans.json"
"""What the builder said of the plans of target ``tensorrt``."""


def graph_names(max_draft_len: int, early_exit: bool, predict: bool = False, draft: bool = False) -> tuple[str, ...]:
    """Return the names of an engine's graphs, in the order they are built: ``early_exit`` only where the model has that
    head, ``verify`` only where there are drafts, ``predict`` only where another model fills the cache, ``draft`` only
    with a draft head."""
    optional = {"early_exit": early_exit, "verify": max_draft_len > 0, "predict": predict, "draft": draft}
    return ("lower", "upper", *(name for name, is_there in optional.items() if is_there))


def package_file(graph: str) -> str:
    """Return where the AOTInductor package of a graph lies in an engine."""
    return f"{RANK_DIR}/{graph}.pt2"


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime knows about an engine.

    ``model`` is what its graphs compute. ``dtype`` is the activations' and that of weights which are no matrices;
    ``weight_dtype``, a key of ``WEIGHT_BYTES`` (``kvforge.common.number_formats``), is that of linear layers.
    ``kv_dtype`` is a key of ``KV_FORMATS``; ``kv_scales`` holds (k_scale, v_scale) of each owner where it is static,
    else nothing. Limits: ``max_num_seqs`` sequences and ``max_num_tokens`` packed tokens a step, ``max_seq_len`` tokens
    a sequence, ``max_draft_len`` draft tokens of a sequence in one step; above 0 the engine has the graph ``verify``.
    With ``model.early_exit`` it has the graph ``early_exit``, whose head is counted in ``num_parameters``.
    ``kv_policy`` and all of its parameters say what becomes of K,V once a prompt is computed
    (``kvforge.kv_policies``). ``isa`` names the machine code: the architecture followed by the extensions it needs.
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
    model: ModelConfig
    page_size: int
    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    max_draft_len: int
    num_parameters: int
    weights_file_bytes: int
    checkpoint_sha256: str
    operators: dict[str, int]
    files: dict[str, str]
    """SHA-256 of every file the engine was written with, by relative path; ``inspect --verify`` checks all."""
    kv_policy: str = Full.name
    kv_policy_parameters: dict[str, int] = field(default_factory=dict)
    decoupled_mode: bool = True
    """Whether `kvforge serve` streams where it is not told."""
    special_tokens: tuple[int, ...] = ()
    """Ids of the tokenizer's special tokens, for a KV policy that ``reads_tokens``."""
    punctuation_tokens: tuple[int, ...] = ()
    """Ids of the tokens that are punctuation, likewise."""
    policy_texts: tuple[tuple[int, ...], ...] = ()
    """Ids of the tokens of each of the KV policy's ``texts``."""

    auxiliary_model: ModelConfig | None = None
    """The layers that are run of the model which fills the cache of prompts; None without one."""
    draft_head: DraftHead | None = None
    """The head that drafts from the model's hidden states; None without one."""
    int8_layers: tuple[str, ...] = ()
    """Linear layers whose weights are int8, where ``weight_dtype`` has 4 bits."""
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
        return graph_names(self.max_draft_len, self.model.early_exit, self.predicts, self.draft_head is not None)

    @property
    def predicts(self) -> bool:
        """Whether another model fills the cache of prompts; the engine then has the graph ``predict``."""
        return self.auxiliary_model is not None

    @property
    def auxiliary_bytes_per_token(self) -> int:
        """Bytes of K and V that the auxiliary model keeps of a token, in the dtype of the computation."""
        return 0 if self.auxiliary_model is None else kv_bytes(self.auxiliary_model, self.dtype)

    @property
    def draft_head_bytes_per_token(self) -> int:
        """Bytes of K and V that the draft head keeps of a token, in the dtype of the computation."""
        return 0 if self.draft_head is None else kv_bytes(self.draft_head.model, self.dtype)

    @property
    def upper_pools(self) -> slice:
        """Which of the owners' pools, in order, the upper graph is given: from the first on that it reads."""
        return slice(self.model.num_owners - len(self.model.owners_above), self.model.num_owners)

    @property
    def lower_pools(self) -> slice:
        """Which of the owners' pools, in order, the lower graph is given and writes, and those of layers with linear
        attention behind them."""
        return slice(len(self.model.written_below) + len(self.model.linear_layers))

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.model.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a text."""
        return self.model.eos_token_ids

    @property
    def kv_format(self) -> KVFormat:
        """What ``kv_dtype`` says of the cache."""
        return KV_FORMATS[self.kv_dtype]

    @property
    def cache_layout(self) -> CacheLayout:
        """The tensors of the cache."""
        return CacheLayout(self.model, self.kv_dtype, self.dtype, self.page_size, self.policy)

    @property
    def owner_cache(self) -> OwnerCache:
        """The cache of one owner."""
        return self.cache_layout.owner_cache

    @property
    def kv_element_bytes_per_token(self) -> int:
        """Bytes of K and V one token keeps over all owners, without scales."""
        return kv_element_bytes(self.model, self.kv_dtype)

    @property
    def kv_scale_bytes_per_token(self) -> int:
        """Bytes of the scales, dynamic or of groups, of one token over all owners."""
        return kv_scale_bytes(self.model, self.kv_dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token keeps in the cache over all owners: K, V and their scales."""
        return kv_bytes(self.model, self.kv_dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of a sequence over all layers that keep a state; 0 without such layers."""
        return state_bytes(self.model, self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one logical page over all owners, or those below a blind cut, and of the parts of an auxiliary
        model, a draft head and the KV policy."""
        more = self.auxiliary_bytes_per_token + self.draft_head_bytes_per_token
        own = self.page_size * (kv_bytes_below(self.model, self.kv_dtype) + more)
        return own + self.cache_layout.added_page_bytes

    @property
    def upper_page_bytes(self) -> int:
        """Bytes of one page over all owners above a blind cut, which have pages of their own; else 0."""
        return self.page_size * kv_bytes_above(self.model, self.kv_dtype)

    @property
    def exact_page_bytes(self) -> int:
        """Bytes over all owners of a page in the dtype of the computation."""
        return self.page_size * kv_bytes(self.model, self.dtype)

    @property
    def exact_bytes(self) -> int:
        """Bytes of all exact pages of as many sequences as the engine serves; 0 unless pages are sealed."""
        return self.num_exact_pages(self.max_num_seqs) * self.exact_page_bytes

    def num_exact_pages(self, max_num_seqs: int) -> int:
        """Return the exact pages for so many running sequences; 0 unless pages are sealed."""
        sealing = self.policy.sealing
        return 0 if sealing is None else sealing.num_exact_pages(max_num_seqs, self.max_num_tokens, self.page_size)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a decode step reads: every linear layer and the head, without biases and scales, the
        lookup of embeddings and an early exit's head."""
        more = bytes_more_as_int8(self.model, self.weight_dtype, self.int8_layers)
        return step_weight_bytes(self.model, self.weight_dtype) + more

    @property
    def weight_bits(self) -> float:
        """Bits of each of these weights on average, with scales of groups."""
        return weight_bits(self.model, self.weight_bytes)

    def prefill_flops_per_token(self, context_length: int) -> float:
        """Return the mean FLOPs of one prompt token that is not sampled from (``skipped_token``), and that is not
        computed besides where prompts are predicted."""
        auxiliary = self.auxiliary_model
        if auxiliary is None:
            return skipped_token(self.model, context_length).total
        return skipped_token(auxiliary, context_length).total + 2 * auxiliary.hidden_size * cached_numbers(self.model)

    @property
    def has_observers(self) -> bool:
        """Tokens go past the cut for what the KV policy makes of their attention."""
        return self.model.has_cut and self.policy.observing is not None

    @property
    def max_num_survivors(self) -> int:
        """Tokens of one step that can go past the cut: the last of each sequence, and the drafts before it; any where
        the KV policy observes them there, or a blind cut lets anchors and what was generated before go past."""
        if self.has_observers or self.model.is_blind:
            return self.max_num_tokens
        return min(self.max_num_tokens, self.max_num_seqs * (1 + self.max_draft_len))

    @property
    def sha256(self) -> str:
        """The digest in ``engine.json``, which no other engine has: it covers the digests of the engine's files."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as JSON-ready data."""
        return dataclasses.asdict(self)

    def shown(self) -> dict[str, Any]:
        """Return what commands print of it as JSON: its fields and its model's side by side."""
        fields = self.to_json()
        of_model = fields.pop("model") | {"owner_of_layer": self.model.owner_of_layer}
        return fields | of_model


def digest_of(data: dict[str, Any]) -> str:
    """Return the SHA-256 of JSON data, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
