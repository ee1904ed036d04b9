"""ModelOpt's form of the SwiftKV attention: quantizers on K and V as they enter the cache."""

import modelopt.torch.quantization as mtq
from modelopt.torch.quantization.nn import QuantModule, QuantModuleRegistry, TensorQuantizer
from torch import Tensor

from kvforge.swiftkv.attention import SwiftKVAttention


class QuantSwiftKVAttention(QuantModule):
    """Adds ``k_bmm_quantizer`` and ``v_bmm_quantizer``, the names ModelOpt's recipes and export look for."""

    def _setup(self) -> None:
        if self.is_owner:
            self.k_bmm_quantizer = TensorQuantizer()
            self.v_bmm_quantizer = TensorQuantizer()

    def cached(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and dequantize K and V; called in owners only."""
        return self.k_bmm_quantizer(k), self.v_bmm_quantizer(v)


def register_attention() -> None:
    """Tell ModelOpt of the class, once in a process."""
    if QuantModuleRegistry.get(SwiftKVAttention) is None:
        mtq.register(original_cls=SwiftKVAttention, quantized_cls=QuantSwiftKVAttention)
