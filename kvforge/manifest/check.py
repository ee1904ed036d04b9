"""Whether what an engine's manifest says can be true of an engine."""

import re

from kvforge.common.errors import KvforgeError
from kvforge.common.number_formats import ELEMENT_BYTES, INT4_WEIGHTS, KV_FORMATS, WEIGHT_BYTES
from kvforge.common.relative_names import is_inside
from kvforge.costs.weights import matrix_shapes
from kvforge.kv_policies import Need
from kvforge.manifest.manifest import Manifest
from model_defs.config import MAX_SIZE
from model_defs.draft_head import STATES_OF

_CAPABILITY = re.compile(r"[1-9]\d?\.\d")


def is_possible(manifest: Manifest) -> bool:
    """Whether the numbers of a manifest, whose fields have their types, can belong to an engine."""
    model = manifest.model
    limits = (manifest.page_size, manifest.max_num_seqs, manifest.max_num_tokens, manifest.max_seq_len)
    tokens = (manifest.special_tokens, manifest.punctuation_tokens, *manifest.policy_texts)
    return (
        all(1 <= limit <= MAX_SIZE for limit in limits)
        and len(manifest.isa) >= 1
        and manifest.dtype in ELEMENT_BYTES
        and manifest.weight_dtype in WEIGHT_BYTES
        and _has_int8_layers(manifest)
        and 0 <= manifest.max_draft_len <= MAX_SIZE
        and manifest.kv_dtype in KV_FORMATS
        and len(manifest.kv_scales) == (model.num_owners if manifest.kv_format.scales == "static" else 0)
        and all(scale > 0 for scales in manifest.kv_scales for scale in scales)
        and all(0 <= token < model.vocab_size for each in tokens for token in each)
        and all(map(is_inside, manifest.files))
        and all(map(_CAPABILITY.fullmatch, manifest.plan_capabilities))
        and _has_policy(manifest)
        and _has_draft_head(manifest)
        and not (
            manifest.predicts and (model.has_cut or manifest.max_draft_len or Need.OWN_CACHE in manifest.policy.needs)
        )
    )


def _has_int8_layers(manifest: Manifest) -> bool:
    """Whether the layers that are int8, if there are some, are the model's, and others have 4 bits."""
    is_mixed = manifest.weight_dtype in INT4_WEIGHTS and {*manifest.int8_layers} <= {*matrix_shapes(manifest.model)}
    return is_mixed or not manifest.int8_layers


def _has_draft_head(manifest: Manifest) -> bool:
    """Whether the draft head, if there is one, is for such a model, and the engine verifies drafts."""
    head, model = manifest.draft_head, manifest.model
    return head is None or (
        manifest.max_draft_len > 0
        and Need.OWN_CACHE not in manifest.policy.needs
        and manifest.policy.sealing is None
        and len(head.layers) == STATES_OF[head.kind]
        and all(0 <= layer <= model.num_layers for layer in head.layers)
        and 1 <= head.draft_vocab <= head.model.vocab_size == model.vocab_size
        and head.model.num_layers == 1
        and ((head.own_embedding and head.own_lm_head) or head.width == model.hidden_size)
        and (head.own_lm_head or (head.draft_vocab == model.vocab_size and not model.tie_embeddings))
    )


def _has_policy(manifest: Manifest) -> bool:
    """Whether the policy is one, with all its parameters in range and for such heads and pages."""
    try:
        manifest.policy.check(manifest.model.num_kv_heads, manifest.model.head_dim, manifest.page_size)
        probing = manifest.policy.probing
        has_texts = len(manifest.policy_texts) == (0 if probing is None else len(probing.texts))
        return has_texts and manifest.policy.parameters == manifest.kv_policy_parameters
    except KvforgeError:
        return False
