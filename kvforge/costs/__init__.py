"""What a model costs, in numbers: FLOPs of tokens, bytes of K and V, bytes of weights.

What a KV policy keeps besides, the policy says.
"""
