"""SwiftKV models as differentiable torch modules with Hugging Face parameter names; teacher and student share weights.

For calibration, rewiring and distillation, which transformers cannot do: it knows no ``<family>_swiftkv``. Engines are
compiled from ``model_defs.graphs`` instead.
"""

from kvforge.swiftkv.load import load_model, load_weights
from kvforge.swiftkv.model import DecoderLayer, SwiftKVForCausalLM
from kvforge.swiftkv.token_layout import Layout, make_chunk_layout, make_layout

__all__ = [
    "DecoderLayer",
    "Layout",
    "SwiftKVForCausalLM",
    "load_model",
    "load_weights",
    "make_chunk_layout",
    "make_layout",
]
