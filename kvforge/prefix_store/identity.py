"""Whose pages a file may hold: the engines that compute the same K and V, bit by bit."""

import hashlib
import json
import os
from typing import Any

from kvforge.common.hardware import best_isa
from kvforge.manifest import WEIGHTS_FILE, Manifest
from kvforge.prefix_store.page_file import FORMAT

WITHOUT_EFFECT = ("max_num_seqs", "max_num_tokens", "max_draft_len", "decoupled_mode")
MODEL_WITHOUT_EFFECT = ("bos_token_id", "eos_token_ids")
"""Fields of a manifest and of its model that K and V do not depend on. All others, also those to come, tell engines
apart."""


def engine_key(manifest: Manifest) -> bytes:
    """Return 16 bytes that two engines share if they have the same weights, cut, owners, formats, page size, policy,
    version and kernels; of their files only the weights count."""
    data = {name: value for name, value in manifest.to_json().items() if name not in WITHOUT_EFFECT}
    data["model"] = {name: value for name, value in data["model"].items() if name not in MODEL_WITHOUT_EFFECT}
    data["files"] = manifest.files.get(WEIGHTS_FILE)
    if manifest.target == "cpu":  # those of a GPU are in the manifest
        data["kernels"] = os.environ.get("KVFORGE_CPU_ISA") or best_isa()
    return hashlib.sha256(FORMAT + json.dumps(data, sort_keys=True).encode()).digest()[:16]


def describe(manifest: Manifest) -> dict[str, Any]:
    """Return what ``kvforge cache`` says of an engine's pages."""
    return {
        "model": f"{manifest.model.model_type}, {manifest.num_parameters / 1e6:.0f}M parameters, "
        f"cut {manifest.model.cut} of {manifest.model.num_layers}",
        "kv_dtype": manifest.kv_dtype,
        "kv_policy": str(manifest.policy),
        "page_size": manifest.page_size,
    }
