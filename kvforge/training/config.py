"""The frozen recipe of the tiny model: sizes, seeds and schedules. The assets come from this file alone."""

from dataclasses import dataclass
from typing import Any

from kvforge.distill import DistillConfig
from kvforge.rewire import RewireOptions
from model_defs import ModelConfig, load_config

DEFAULT_MIX = (
    ("needle_single", 0.45),
    ("quoting", 0.2),
    ("list_recall", 0.15),
    ("variables", 0.12),
    ("arithmetic", 0.08),
)
ALL_MIX = (
    ("needle_single", 0.4),
    ("amounts", 0.12),
    ("quoting", 0.15),
    ("list_recall", 0.15),
    ("variables", 0.12),
    ("arithmetic", 0.06),
)
KEY_MIX = (
    ("amounts", 0.6),
    ("needle_single", 0.25),
    ("list_recall", 0.05),
    ("quoting", 0.05),
    ("variables", 0.03),
    ("arithmetic", 0.02),
)


@dataclass(frozen=True)
class Stage:
    """Training at one sequence length: `sequences` of `length` tokens per step.

    Ends after `max_steps`, or earlier (not before `min_steps`) once the running average of the teacher-forced
    accuracy on needle answers reaches `target`.

    `first_weight`: loss weight of an answer's tokens up to the first word or digit, which alone needs the key.
    `min_density`: least share of facts and their questions in a sequence.
    `num_misfits`: facts too long for what is left before a sequence counts as full.
    `loosen`: chance that a fact, and independently its answer line, lacks the verb between key and value; with
    them side by side the link is easy to learn, and then carries over.
    `pair_share`: share of the sequences that are bare pairs of words, to learn looking a key up.
    `question_share`: share of the sequences that ask in full sentences.
    `lr_scale`: multiplies the learning rate, which falls linearly to `lr_end` times that by the end of the stage.
    `mix`: share of each task among the facts.
    """

    length: int
    sequences: int
    max_steps: int
    target: float = 2.0
    min_steps: int = 0
    first_weight: float = 1.0
    min_density: float = 0.05
    num_misfits: int = 1
    loosen: float = 0.0
    pair_share: float = 0.0
    question_share: float = 0.6
    lr_scale: float = 1.0
    lr_end: float = 1.0
    mix: tuple[tuple[str, float], ...] = DEFAULT_MIX


@dataclass(frozen=True)
class TeacherConfig:
    """`lr` is warmed up over `warmup_steps`; the stages scale it."""

    model: ModelConfig
    stages: tuple[Stage, ...]
    seed: int = 0
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 60
    clip_norm: float = 1.0
    threads: int = 2
    checkpoint_every: int = 100


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
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": TINY_TOKENIZER.vocab_size,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "bfloat16",
}
"""config.json of the teacher."""
TINY_MODEL = load_config(TINY_HF_CONFIG)
TINY_TEACHER = TeacherConfig(
    model=TINY_MODEL,
    stages=(
        Stage(length=128, sequences=64, max_steps=1200, target=0.93, min_steps=200),
        Stage(length=256, sequences=32, max_steps=190, target=0.94, min_steps=40),
        Stage(256, 32, max_steps=99, first_weight=5.0, min_density=0.4, lr_scale=1.5),
        Stage(128, 32, max_steps=400, target=0.97, min_steps=100, first_weight=5.0, min_density=0.6, mix=KEY_MIX),
        Stage(
            length=128,
            sequences=32,
            max_steps=150,
            first_weight=5.0,
            min_density=0.9,
            num_misfits=6,
            question_share=0.1,
            lr_scale=1.5,
            mix=KEY_MIX,
        ),
        Stage(
            length=128,
            sequences=32,
            max_steps=100,
            first_weight=5.0,
            min_density=0.9,
            num_misfits=6,
            loosen=0.5,
            question_share=0.1,
            lr_scale=1.5,
            mix=KEY_MIX,
        ),
        Stage(
            length=128,
            sequences=32,
            max_steps=150,
            first_weight=5.0,
            min_density=0.9,
            num_misfits=6,
            loosen=0.5,
            pair_share=0.7,
            question_share=0.1,
            lr_scale=1.5,
            mix=KEY_MIX,
        ),
        Stage(256, 16, max_steps=80, first_weight=5.0, min_density=0.5, num_misfits=3, loosen=0.2, mix=ALL_MIX),
        Stage(512, 16, max_steps=60, first_weight=5.0, min_density=0.2, mix=ALL_MIX),
        Stage(1024, 4, max_steps=60, first_weight=4.0, mix=ALL_MIX),
        Stage(2048, 2, max_steps=40, first_weight=4.0, mix=ALL_MIX),
        Stage(1024, 4, max_steps=10, first_weight=3.0, lr_end=1 - 9 / 110, mix=ALL_MIX),
        Stage(1024, 4, max_steps=130, first_weight=4.0, mix=ALL_MIX),
        Stage(2048, 2, max_steps=20, first_weight=4.0, mix=ALL_MIX),
        Stage(1024, 4, max_steps=120, first_weight=3.0, lr_end=0.1, mix=ALL_MIX),
    ),
    checkpoint_every=50,
)
TINY_STUDENT = StudentConfig(
    rewire=RewireOptions(cut=4, group_size=2, init="mean"),
    documents=Stage(512, 1200, max_steps=1, mix=ALL_MIX),
    distill=DistillConfig(
        early_exit=True,
        max_steps=150,
        length=512,
        batch_size=4,
        micro_batch=4,
        lr=1e-3,
        seed=1,
        device="cpu",
        checkpoint_every=25,
    ),
)
