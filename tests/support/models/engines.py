"""Small engines for tests; ``shelf.py`` builds each once."""

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from kvforge.compiler import BuildOptions
from kvforge.manifest import TOKENIZER_DIR, load_manifest, save_manifest, sha256_of


@dataclass(frozen=True)
class EngineSpec:
    """A random-weight model and the options to build it with; equal specs share one engine."""

    family: str = "llama"
    cut: int | None = None
    group_size: int = 1
    early_exit: bool = False
    bfloat16: bool = False
    seed: int = 0
    model: tuple[tuple[str, Any], ...] = ()
    options: BuildOptions = field(default_factory=lambda: BuildOptions(page_size=8, max_num_tokens=256))

    @property
    def key(self) -> str:
        """A name that is equal for equal specs."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:16]


SWIFTKV = EngineSpec("llama", cut=2, group_size=2, model=(("num_hidden_layers", 5),))
"""The engine most tests share: fp32, 5 layers cut at 2, AcrossKV groups of 2 with a ragged last one."""

PLAIN = EngineSpec("llama", model=(("num_hidden_layers", 2),))
"""A small fp32 engine without a cut."""

EARLY_EXIT = dataclasses.replace(SWIFTKV, early_exit=True)
"""SWIFTKV with a head at the cut."""

SWIFTKV_BF16 = dataclasses.replace(SWIFTKV, bfloat16=True)
"""SWIFTKV in bf16."""

INT8_WEIGHTS = EngineSpec(
    "qwen2",
    cut=1,
    group_size=2,
    options=dataclasses.replace(SWIFTKV.options, weight_dtype="int8"),
    model=(("num_hidden_layers", 3), ("tie_word_embeddings", True)),
)
"""A smaller bf16 engine with biases, a tied head and int8 weights."""

INT4_WEIGHTS = dataclasses.replace(INT8_WEIGHTS, options=dataclasses.replace(INT8_WEIGHTS.options, weight_dtype="int4"))
"""The same with int4 weights."""

SWIFTKV_FP8 = dataclasses.replace(
    SWIFTKV, options=dataclasses.replace(SWIFTKV.options, kv_dtype="fp8", max_draft_len=4)
)
"""SWIFTKV with an e4m3 cache of dynamic scales, and the graph that verifies up to 4 drafts a sequence."""

SWIFTKV_INT4 = dataclasses.replace(
    SWIFTKV_BF16, options=dataclasses.replace(SWIFTKV.options, kv_dtype="int4", max_draft_len=4)
)
"""SWIFTKV_BF16 with a cache in 4 bits and the graph that verifies drafts."""

SWIFTKV_K8V4 = dataclasses.replace(SWIFTKV_INT4, options=dataclasses.replace(SWIFTKV_INT4.options, kv_dtype="k8v4"))
"""The same with keys in 8 bits."""

PLAIN_INT4 = dataclasses.replace(PLAIN, bfloat16=True, options=SWIFTKV_INT4.options)
"""PLAIN in bf16 with such a cache and graph."""

PLAIN_INT4_WEIGHTS = dataclasses.replace(INT4_WEIGHTS, cut=None, group_size=1)
"""INT4_WEIGHTS without a cut."""

SHADOWKV = EngineSpec(
    "qwen2",
    cut=1,
    group_size=2,
    model=(("num_hidden_layers", 3),),
    options=BuildOptions(
        page_size=8,
        max_num_tokens=256,
        max_num_seqs=8,
        kv_policy="shadowkv:rank=12,chunk_size=4,sparse_budget=16,num_outlier_chunks=2,num_local_tokens=8",
    ),
)
"""A small fp32 engine with ShadowKV, cut at 1, whose layers 1 and 2 share an owner: prompts from 36 tokens on are
factored."""

EVICTING = EngineSpec(
    "qwen2",
    model=(("num_hidden_layers", 2), ("max_position_embeddings", 65536)),  # longer than a wait of a test
    options=BuildOptions(page_size=8, max_num_tokens=64, max_num_seqs=8, kv_policy="batchmax:budget=48,block=8"),
)
"""A small fp32 engine that evicts by the attention of whole prompts, of a model with a long context."""

AWKWARD = EngineSpec(
    "qwen2",
    cut=3,
    group_size=3,
    options=SWIFTKV.options,
    model=(("num_hidden_layers", 5), ("num_key_value_heads", 1), ("head_dim", 80), ("tie_word_embeddings", True)),
)
"""1 KV head of 80, biases, tied embeddings, 5 layers cut at 3 with a ragged group of 2."""

LONG = EngineSpec(
    "llama", cut=2, group_size=2, model=(("num_hidden_layers", 5), ("max_position_embeddings", 65536)),
    options=BuildOptions(page_size=16, max_num_tokens=256),
)  # fmt: skip
"""A context so long that a request can outlast every wait of a test, unless it is cancelled."""

SHARED = (
    LONG,
    SWIFTKV,
    PLAIN,
    SWIFTKV_BF16,
    SWIFTKV_FP8,
    AWKWARD,
    EARLY_EXIT,
    INT8_WEIGHTS,
    INT4_WEIGHTS,
    SHADOWKV,
    EVICTING,
)
"""Those that a run without ``--full`` wants compiled."""


def with_tokens_around(engine: Path, copy: Path, before: str, after: str | None = None) -> Path:
    """Copy an engine to ``copy`` with a tokenizer that puts special tokens around a text."""

    def change(tokenizer: Tokenizer) -> Tokenizer:
        single = f"{before} $A" if after is None else f"{before} $A {after}"
        special = [(token, tokenizer.token_to_id(token)) for token in (before, after) if token]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
        return tokenizer

    return with_tokenizer(engine, copy, change)


def with_tokenizer(engine: Path, copy: Path, change: Callable[[Tokenizer], Tokenizer]) -> Path:
    """Copy an engine to ``copy`` with what ``change`` makes of its tokenizer."""
    return with_file(
        engine,
        copy,
        f"{TOKENIZER_DIR}/tokenizer.json",
        lambda path: change(Tokenizer.from_file(str(path))).save(str(path)),
    )


def with_file(engine: Path, copy: Path, name: str, change: Callable[[Path], object]) -> Path:
    """Copy an engine to ``copy``, where ``change`` writes the file ``name`` anew; the manifest has its digest."""
    shutil.copytree(engine, copy)
    change(copy / name)
    manifest = load_manifest(engine)
    files = manifest.files | {name: sha256_of(copy / name)}
    save_manifest(dataclasses.replace(manifest, files=files), copy)
    return copy
