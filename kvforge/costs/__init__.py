"""What a model costs, in numbers: FLOPs of tokens, bytes of K and V, bytes of weights.

What a KV policy keeps besides, the policy says.

A model is whatever has the sizes: a ``ModelShape``, or an engine's manifest.
"""
