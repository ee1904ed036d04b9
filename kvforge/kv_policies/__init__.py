"""KV policies: what becomes of a sequence's K,V once its prompt is computed, what that needs, and what it keeps."""

from kvforge.kv_policies.full import Full
from kvforge.kv_policies.policy import KVPolicy, Need, OwnerCache
from kvforge.kv_policies.registry import POLICIES, load, parse
from kvforge.kv_policies.shadowkv import ShadowKV

__all__ = ["POLICIES", "Full", "KVPolicy", "Need", "OwnerCache", "ShadowKV", "load", "parse"]
