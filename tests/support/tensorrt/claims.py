"""What target ``tensorrt`` claims, derived from what refuses the rest: engines that have each claimed value."""

from dataclasses import dataclass, replace
from typing import Any

from kvforge.common.errors import BuildError
from kvforge.common.number_formats import KV_FORMATS
from kvforge.compiler.options import BuildOptions, ResolvedOptions, resolve
from kvforge.kv_policies import policies
from model_defs import ModelConfig, ModelError, families, load_config
from tests.support.models.checkpoints import SMALL
from tests.support.onnx.engine import static_scales

LAYERS, MAX_SEQ_LEN = 3, 256
POLICIES = {"shadowkv": "shadowkv:rank=8,chunk_size=8,sparse_budget=32,num_outlier_chunks=2,num_local_tokens=8"}
"""KV policies whose defaults are too large for small models."""
_ALGORITHMS = {"fp8_static": "FP8", "int8_static": "INT8"}


@dataclass(frozen=True)
class Claim:
    """An engine: the fields are the dimensions of what a target can claim."""

    family: str = "llama"
    cut: int | None = 1
    group_size: int = 1
    kv_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    max_draft_len: int = 0
    early_exit: bool = False
    kv_policy: str = "full"

    @property
    def config(self) -> ModelConfig:
        """A small model with random weights."""
        has_cut = {"swiftkv": True, "num_key_value_layers": self.cut, "key_value_group_size": self.group_size}
        hf = {**SMALL, "num_hidden_layers": LAYERS, "model_type": self.family, "early_exit": self.early_exit}
        if self.cut is not None:
            hf |= {**has_cut, "model_type": f"{self.family}_swiftkv"}
        return load_config(hf)

    @property
    def options(self) -> ResolvedOptions:
        """The options of its build; raises BuildError where it is refused."""
        options = BuildOptions(
            "tensorrt",
            self.dtype,
            self.kv_dtype,
            max_num_seqs=4,
            max_num_tokens=64,
            max_seq_len=MAX_SEQ_LEN,
            page_size=8,
            max_draft_len=self.max_draft_len,
            early_exit=self.early_exit,
            kv_policy=self.kv_policy,
        )
        config = self.config
        resolved = resolve(options, config, "BF16", _ALGORITHMS.get(self.kv_dtype))
        scales = static_scales(config, self.kv_dtype)[:1]  # of all owners: each other pair compiles its own kernels
        return replace(resolved, kv_scales=scales * len(config.owners))


def values() -> dict[str, list[Any]]:
    """Every value of each dimension that there is, claimed or not."""
    return {
        "family": sorted(families()),
        "cut": [None, 1, 2],
        "group_size": [1, 2],
        "kv_dtype": list(KV_FORMATS),
        "dtype": ["bfloat16", "float32"],
        "max_draft_len": [0, 2],
        "early_exit": [False, True],
        "kv_policy": [POLICIES.get(name, name) for name in sorted(policies())],
    }


def is_claimed(claim: Claim) -> bool:
    """Whether the build takes it."""
    try:
        return claim.options is not None
    except (BuildError, ModelError):
        return False


def claimed_values() -> dict[str, list[Any]]:
    """Those values that some engine can have."""
    return {name: [value for value in found if claim_with(name, value) is not None] for name, found in values().items()}


def claim_with(name: str, value: Any) -> Claim | None:
    """An engine that has this value, if there is one: what observes all queries goes without a cut."""
    found = (replace(Claim(cut=cut), **{name: value}) for cut in (Claim.cut, None))
    return next(filter(is_claimed, found), None)


EVERYTHING = Claim(group_size=2, kv_dtype="fp8", max_draft_len=2, early_exit=True)
"""What a user of this target has first of all."""


def claims() -> list[Claim]:
    """As few engines as have each claimed value at least once, each accepted by the build."""
    claimed = claimed_values()
    count = max(map(len, claimed.values()))
    found = []
    for row in range(count):
        claim = Claim(**{name: of[(row + shift) % len(of)] for shift, (name, of) in enumerate(claimed.items())})
        if claim.cut is None:
            claim = replace(claim, group_size=1, early_exit=False)
        if not is_claimed(claim):
            claim = replace(claim, kv_policy="full")
        if not is_claimed(claim):
            claim = replace(claim, cut=None, group_size=1, early_exit=False)
        if claim.cut == LAYERS - 1:
            claim = replace(claim, group_size=1)
        if claim.dtype == "float32" and claim.kv_dtype == "bfloat16":
            claim = replace(claim, kv_dtype="float32")
        found.append(claim)
    missing = [
        claim_with(name, value)
        for name, of in claimed.items()
        for value in of
        if all(getattr(claim, name) != value for claim in found)
    ]
    return [EVERYTHING, *found, *missing]
