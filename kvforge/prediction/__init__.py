"""KV prediction (arXiv 2410.08391): a small model fills the cache of a large one. From checkpoint to checkpoint."""
