"""The frozen recipes of the tiny models: sizes, seeds and schedules. The assets come from this file alone."""

from dataclasses import dataclass
from typing import Any

from kvforge.distill import DistillConfig
from kvforge.rewire import RewireOptions
from kvforge.tasks.chains import HOPS
from model_defs import ModelConfig, load_config

MIX = (
    ("needle_single", 0.12), ("variables", 0.15), ("quoting", 0.1), ("list_recall", 0.08), ("arithmetic", 0.1),
    ("amounts", 0.1), ("needle_values", 0.08), ("needle_queries", 0.07), ("common_words", 0.06), ("qa_single", 0.07),
    ("qa_two_hop", 0.1),
)  # fmt: skip
"""Weight of each task among the facts of a document. Those of ``needle_multi`` are ``needle_single``'s."""


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length: `max_steps` steps of `sequences` documents of `length` tokens.

    `first_weight`: loss weight of an answer's tokens up to the first word or digit, which alone needs the key.
    `min_density`: least share of facts and their questions in a sequence.
    `num_misfits`: facts too long for what is left before a sequence counts as full.
    `pair_share`: share of the sequences that are bare pairs of words, to learn looking a key up.
    `question_share`: share of the sequences that ask in full sentences.
    `lr_end`: what the learning rate falls to linearly by the end of the stage, as a share of itself.
    `mix`: weight of each task among the facts.
    `chain_hops`: where positive, the sequences that are no pairs are chains of amounts of up to so many links.
    """

    length: int
    sequences: int
    max_steps: int
    first_weight: float = 1.0
    min_density: float = 0.05
    num_misfits: int = 1
    pair_share: float = 0.0
    question_share: float = 0.6
    lr_end: float = 1.0
    mix: tuple[tuple[str, float], ...] = MIX
    chain_hops: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for longer chains than there is a task for."""
        if self.chain_hops > HOPS[-1]:
            raise ValueError(f"chain_hops is at most {HOPS[-1]}: there is no task for longer chains")


@dataclass(frozen=True)
class TeacherConfig:
    """`lr` is warmed up over `warmup_steps`."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    clip_norm: float = 1.0
    threads: int = 2
    checkpoint_every: int = 100
    log_every: int = 10


@dataclass(frozen=True)
class StudentConfig:
    """What the student is rewired to, the documents it is distilled on (`max_steps * sequences` of them; all tokens
    count alike), and how."""

    rewire: RewireOptions
    documents: Stage
    distill: DistillConfig
    seed: int = 1


@dataclass(frozen=True)
class TokenizerConfig:
    vocab_size: int = 1664
    seed: int = 0
    num_items: int = 5000


TINY_TOKENIZER = TokenizerConfig()
BOS_ID, EOS_ID = 0, 1
TINY_HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": TINY_TOKENIZER.vocab_size,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "torch_dtype": "bfloat16",
}  # fmt: skip
"""config.json of the teacher."""
TINY_MODEL = load_config(TINY_HF_CONFIG)
TINY_TEACHER = TeacherConfig(
    model=TINY_MODEL,
    stages=(
        Stage(128, 512, 400, first_weight=5.0, min_density=0.6, num_misfits=4, pair_share=0.5, question_share=0.3),
        Stage(256, 256, 1200, first_weight=5.0, min_density=0.4, num_misfits=3, pair_share=0.1),
        Stage(512, 128, 400, first_weight=5.0, min_density=0.2, num_misfits=2),
        Stage(1024, 64, 700, first_weight=4.0),
        Stage(2048, 32, 100, first_weight=4.0),
        Stage(1024, 64, 1000, first_weight=3.0, lr_end=0.02),
    ),
)
TINY_STUDENT = StudentConfig(
    rewire=RewireOptions(cut=4, group_size=2, init="mean"), documents=Stage(512, 3200, max_steps=1),
    distill=DistillConfig(
        early_exit=True, max_steps=400, length=512, batch_size=8, micro_batch=8, lr=1e-3, seed=1, device="cpu",
        checkpoint_every=25,
    ),
)  # fmt: skip

CHAINS_TEACHER = TeacherConfig(
    model=TINY_MODEL,
    lr=1e-3,
    stages=(
        Stage(256, 256, 300, first_weight=5.0, min_density=0.9, chain_hops=3),
        Stage(256, 256, 600, first_weight=5.0, min_density=0.9, chain_hops=8),
        Stage(512, 128, 400, first_weight=5.0, min_density=0.3, lr_end=0.02, chain_hops=8),
    ),
)
"""The tiny teacher trained on, on chains alone: more hops than an upper half of its layers could follow by itself."""
CHAINS_DOCUMENTS = Stage(512, 3200, max_steps=1, min_density=0.3, chain_hops=8)
"""What the students of that teacher are distilled on."""
HYBRID_SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512},
}
"""What tiny models of layers that keep a state have in place of these."""


def _kinds(state: str) -> dict[str, Any]:
    """Attention in layers 1 and 5 of eight."""
    return {"layer_types": ["full_attention" if layer in (1, 5) else state for layer in range(8)]}


HYBRIDS: dict[str, dict[str, Any]] = {
    "attention alone": {},
    "gated convolutions": {
        **{"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3},
        **{"block_auto_adjust_ff_dim": False, **_kinds("conv")},
    },
    "Mamba-2": {
        **{"model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 4},
        **{"mamba_d_state": 16, "mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 128},
        **{"position_embedding_type": "rope", **_kinds("mamba")},
    },
    "gated delta rule": {
        **{"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        **_kinds("linear_attention"),
    },
}
"""By what such layers compute, beside one with attention alone."""
