"""KV policies: what becomes of a sequence's K,V once they are written, what that needs, and what it keeps."""

from kvforge.kv_policies.full import Full
from kvforge.kv_policies.owner_cache import OwnerCache
from kvforge.kv_policies.policy import KVPolicy, Need
from kvforge.kv_policies.registry import broken_policies, load, of_cache, parse, policies

__all__ = ["Full", "KVPolicy", "Need", "OwnerCache", "broken_policies", "load", "of_cache", "parse", "policies"]
