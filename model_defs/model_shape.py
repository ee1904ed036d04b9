"""What a model consists of, and what follows for each layer: dimensions, RoPE, attention variants, cut and groups."""

from dataclasses import dataclass
from functools import cached_property

from model_defs.channel_delta import ChannelDelta
from model_defs.experts import Experts
from model_defs.gated_conv import GatedConv
from model_defs.kv_layout import NO_OWNER, hybrid_owner_table, owner_table
from model_defs.latent import LatentAttention
from model_defs.linear import LinearAttention
from model_defs.mamba2 import Mamba2
from model_defs.rope_config import UNROTATED, QueryGrowth, RopeConfig


@dataclass(frozen=True)
class LayerNorms:
    """What checkpoints call a layer's norms but the first: that before the MLP, and with ``branch_norms`` those of what
    attention and MLP add."""

    before_mlp: str = "post_attention_layernorm"
    of_attention: str = "post_self_attn_layernorm"
    of_mlp: str = "post_mlp_layernorm"


@dataclass(frozen=True)
class ModelShape:
    """What the graphs need to know of a decoder-only model; ``ModelConfig`` is one whose parts fit each other.

    ``cut`` is SwiftKV's k: layers ``cut..num_layers-1`` take K and V from the hidden state entering layer ``cut``
    (arXiv 2410.03960, section 3.2); ``cut == num_layers`` is the plain model. ``group_size`` is AcrossKV's G (section
    3.3): that many consecutive layers above the cut share one K,V; the last group may be smaller. ``layer_windows[i]``
    is layer i's sliding window in tokens, 0 for full attention. ``early_exit`` says that there is a second LM head on
    the hidden state entering the cut layer (appendices E and F). ``branch_norms`` are norms of what attention and MLP
    add to the residual stream; without ``pre_norms`` layers have no others, and a cut's single input has none either.
    With ``qk_norm`` q and k are normed, head by head or, ``qk_norm_whole``, all together. ``experts`` take the place of
    some layers' MLPs. ``activation`` is the gate's, ``silu`` or ``gelu_tanh``; with ``relu2`` there is no gate, and
    what goes up is squared where it is positive, in experts too. ``local_rope`` rotates in layers with a window, where
    these have another; heads of ``unrotated_layers`` do not rotate, and layers that share a cache rotate as its owner
    does. Scores are multiplied by ``attention_scale``, by head_dim^-0.5 where it is None; token embeddings by
    ``embedding_scale``, and what attention and MLP add by ``residual_scale``. Logits are divided by ``logit_divisor``.
    ``norm_offset`` is added to the gains of all norms as checkpoints store them.

    ``layer_owners`` are the layers whose K,V caches the layers read, where the model was trained so: then no layer from
    ``cut`` on owns one, and prompt tokens need not run those. ``global_head_dim`` is the size of heads in layers
    without a window, and ``layer_intermediate_sizes`` those of the MLPs, where they differ. ``v_norm`` norms values,
    without gains. ``layer_scalar`` multiplies what leaves each layer. ``logit_cap`` bounds logits by tanh. Each layer
    adds a projection of ``per_layer_input`` numbers of its own for each token, of a table for ``per_layer_vocab`` ids.
    ``attention_sinks`` are scores that each head of a layer has besides those of keys, and that no value goes with.
    With ``kv_scorer`` each owner has a scorer of its tokens (``model_defs.token_scores``): linear where it is 0, else
    with a hidden layer of so many units.

    With ``num_anchors`` the cut is blind (SPEED, arXiv 2605.06105): layers from ``cut`` on make K and V of their own
    inputs, as they did before, and see no tokens of a prompt but that many first ones and its last.

    With ``latent`` a layer's K and V are one row of ``head_dim`` numbers, ``latent.width``, with a single KV head.

    The layers of ``linear`` have no cache, but a state of each sequence. Above the cut its updates are made of the
    single input too, and queries of the layer's own input, without a convolution. With ``attention_gate`` each number
    that the other layers' attention gives is multiplied by the sigmoid of another, which the projection of q makes too.

    A layer is a mixer (attention, or what keeps a state) and an MLP (or experts), each behind a norm of its own; those
    of ``layers_without_mixer`` are the second alone, those of ``layers_without_mlp`` the first.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    layer_windows: tuple[int, ...]
    cut: int
    group_size: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_whole: bool = False
    pre_norms: bool = True
    branch_norms: bool = False
    tie_embeddings: bool = False
    early_exit: bool = False
    experts: Experts | None = None
    activation: str = "silu"
    local_rope: RopeConfig | None = None
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    norm_offset: float = 0.0
    layer_norms: LayerNorms = LayerNorms()
    layer_owners: tuple[int, ...] = ()
    num_anchors: int = 0
    global_head_dim: int | None = None
    layer_intermediate_sizes: tuple[int, ...] = ()
    v_norm: bool = False
    layer_scalar: bool = False
    logit_cap: float | None = None
    per_layer_input: int = 0
    per_layer_vocab: int = 0
    latent: LatentAttention | None = None
    linear: ChannelDelta | GatedConv | LinearAttention | Mamba2 | None = None
    attention_gate: bool = False
    attention_sinks: bool = False
    unrotated_layers: tuple[int, ...] = ()
    layers_without_mixer: tuple[int, ...] = ()
    layers_without_mlp: tuple[int, ...] = ()
    query_growth: QueryGrowth | None = None
    kv_scorer: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def rope_of(self, layer: int) -> RopeConfig:
        """How the heads of a layer rotate."""
        owner = self.owner_of_layer[layer] if self.unrotated_layers else layer
        return self.rope_of_own(layer if owner == NO_OWNER else owner)

    def rope_of_own(self, layer: int) -> RopeConfig:
        """How the heads of a layer rotate where it makes its own K, as all do before a model is cut."""
        if layer in self.unrotated_layers:
            return UNROTATED
        return self.local_rope if self.local_rope is not None and self.layer_windows[layer] else self.rope

    def head_dim_of(self, layer: int) -> int:
        """Elements of a layer's heads."""
        return self.global_head_dim if self.global_head_dim and not self.layer_windows[layer] else self.head_dim

    @property
    def layer_head_dims(self) -> tuple[int, ...]:
        """``head_dim_of`` each layer; () where it is ``head_dim`` in all."""
        dims = tuple(map(self.head_dim_of, range(self.num_layers)))
        return dims if set(dims) != {self.head_dim} else ()

    def rotation_of(self, layer: int) -> tuple[RopeConfig, int]:
        """How the heads of a layer rotate, and how many elements they have, or their part that rotates by itself."""
        return self.rope_of(layer), self.rotated_dim_of(layer)

    def rotated_dim_of(self, layer: int) -> int:
        """Elements of a layer's heads, or of their part that rotates by itself."""
        return self.latent.rope_dim if self.latent else self.head_dim_of(layer)

    @property
    def rotations(self) -> tuple[tuple[RopeConfig, int], ...]:
        """``rotation_of`` all layers, each once, that of layer 0 first."""
        return tuple(dict.fromkeys(map(self.rotation_of, range(self.num_layers))))

    @property
    def stream_eps(self) -> float:
        """The epsilon of norms of the residual stream as graphs have it: divided by ``residual_scale``, so that what
        layers add to it is not multiplied. Such a norm gives the same."""
        return self.rms_norm_eps / self.residual_scale**2

    def score_scale(self, layer: int) -> float:
        """What a layer's scores are multiplied by before softmax."""
        return self.head_dim_of(layer) ** -0.5 if self.attention_scale is None else self.attention_scale

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer has attention or a state before its MLP, or alone."""
        return layer not in self.layers_without_mixer

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts behind its mixer, or alone."""
        return layer not in self.layers_without_mlp

    @property
    def mlp_inputs(self) -> tuple[str, ...]:
        """The projections of an MLP, or of an expert, that read its input."""
        return ("up",) if self.activation == "relu2" else ("gate", "up")

    @property
    def mlp_matrices(self) -> int:
        """How many projections an MLP has."""
        return len(self.mlp_inputs) + 1

    def intermediate_of(self, layer: int) -> int:
        """The size of a layer's MLP; 0 where it has none."""
        if not self.has_mlp(layer):
            return 0
        return self.layer_intermediate_sizes[layer] if self.layer_intermediate_sizes else self.intermediate_size

    def kv_dim_of(self, layer: int) -> int:
        """Elements of one token's K (or V) in a layer."""
        return self.num_kv_heads * self.head_dim_of(layer)

    def q_dim_of(self, layer: int) -> int:
        """Elements of one token's Q in a layer; 0 where it has no mixer."""
        if not self.has_mixer(layer):
            return 0
        dim = self.latent.query_dim if self.latent else self.head_dim_of(layer)
        return self.num_heads * dim

    def projected_q_dim_of(self, layer: int) -> int:
        """Elements that the projection of q makes of one token: with those of the gate, where attention has one."""
        return self.q_dim_of(layer) * (2 if self.attention_gate else 1)

    def attended_dim_of(self, layer: int) -> int:
        """Elements that a layer's attention gives its output projection of one token."""
        if self.linear is not None and self.is_linear(layer):
            return self.linear.result_dim
        if not self.has_mixer(layer):
            return 0
        return self.num_heads * (self.latent.value_dim if self.latent else self.head_dim_of(layer))

    @property
    def kv_vectors(self) -> int:
        """Rows that a KV head keeps of a token: K and V, or the one of latent attention that is both."""
        return 1 if self.latent else 2

    def cached_numbers_of(self, layer: int) -> int:
        """Numbers that one token keeps in the cache of a layer."""
        return self.kv_vectors * self.kv_dim_of(layer)

    @property
    def kv_dim(self) -> int:
        """Elements of one token's K (or V) in a layer, where all have the same."""
        return self.num_kv_heads * self.head_dim

    @property
    def q_dim(self) -> int:
        """Elements of one token's Q in a layer, where all have the same."""
        return self.q_dim_of(0)

    @property
    def may_be_cut(self) -> bool:
        """Whether the model may have a cut with a single input."""
        has_fixed_states = self.linear is not None and not self.linear.may_be_above_a_cut
        has_lone_parts = bool(self.layers_without_mixer or self.layers_without_mlp)
        return not (has_fixed_states or has_lone_parts or self._has_own_values)

    @property
    def _has_own_values(self) -> bool:
        """Whether layers norm values or scale what they give, for which no weights of a single input are defined."""
        return self.v_norm or self.layer_scalar

    @property
    def has_cut(self) -> bool:
        """Whether there are layers that prompt tokens need not run."""
        return self.cut < self.num_layers

    @property
    def is_swiftkv(self) -> bool:
        """Whether layers above the cut take their K and V from a single input."""
        return self.has_cut and not self.layer_owners and not self.is_blind

    @property
    def is_blind(self) -> bool:
        """Whether layers above the cut see no tokens of a prompt but its anchors and its last."""
        return self.num_anchors > 0

    @property
    def width_at_cut(self) -> int:
        """Numbers of a token that pass the cut: the hidden state, and what the layers above it have of their own."""
        return self.hidden_size + (self.num_layers - self.cut) * self.per_layer_input

    def has_experts(self, layer: int) -> bool:
        """Whether a mixture of experts takes the place of a layer's MLP."""
        return self.experts is not None and layer in self.experts.layers

    def has_own_kv(self, layer: int) -> bool:
        """Whether a layer makes its K and V itself, of its own input."""
        return (layer < self.cut or self.is_blind) and self.owner_of_layer[layer] == layer

    @cached_property
    def owner_of_layer(self) -> tuple[int, ...]:
        """For each layer, the layer whose K,V cache it reads; -1 for one that keeps a state, or has no mixer at all."""
        if without := {*self.linear_layers, *self.layers_without_mixer}:
            return hybrid_owner_table(self.num_layers, self.cut, self.group_size, without)
        return self.layer_owners or owner_table(self.num_layers, self.cut, self.group_size)

    @property
    def owners(self) -> tuple[int, ...]:
        """Layers that have a K,V cache, ascending."""
        return tuple(sorted(set(self.owner_of_layer) - {NO_OWNER}))

    def is_linear(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of K and V."""
        return self.linear is not None and layer in self.linear.layers

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers that keep a state, ascending."""
        return () if self.linear is None else self.linear.layers

    @property
    def upper_linear(self) -> tuple[int, ...]:
        """Those of them at or above the cut, whose states the lower graph writes and the upper graph reads."""
        return tuple(layer for layer in self.linear_layers if layer >= self.cut)

    def state_pool_of(self, layer: int) -> int:
        """Where the two pools of a linear layer are among those of the lower graph: behind those of K and V."""
        return len(self.written_below) + self.linear_layers.index(layer)

    def state_shapes_of(self, layer: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of one row of a layer's pools for states."""
        assert self.linear is not None
        return self.linear.row_shapes(layer >= self.cut)

    @property
    def num_owners(self) -> int:
        """Number of layers that have a K,V cache."""
        return len(self.owners)

    @property
    def upper_owners(self) -> tuple[int, ...]:
        """Owners at or above the cut: the leaders of the AcrossKV groups."""
        return tuple(owner for owner in self.owners if owner >= self.cut)

    @property
    def written_below(self) -> tuple[int, ...]:
        """Owners whose caches the lower graph is given and writes, ascending: all, but with a blind cut."""
        return tuple(owner for owner in self.owners if owner < self.cut) if self.is_blind else self.owners

    @property
    def owners_above(self) -> tuple[int, ...]:
        """Owners whose caches the upper graph is given, ascending: from the first on that a layer above the cut reads.
        Without ``layer_owners`` these are ``upper_owners``."""
        above = set(self.owner_of_layer[self.cut :]) - {NO_OWNER}
        first = min(above, default=self.num_layers)
        return tuple(owner for owner in self.owners if owner >= first)
