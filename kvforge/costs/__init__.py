"""What a model costs, in numbers: FLOPs of tokens, bytes of K and V, bytes of weights. Nothing else computes these.

A model is whatever has the sizes: a ``ModelShape``, or an engine's manifest.
"""
