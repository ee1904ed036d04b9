"""ShadowKV (arXiv 2410.21465)."""

from kvforge.kv_policies.shadowkv.policy import ShadowKV

__all__ = ["ShadowKV"]
