"""Triton's interpreter with right conversions: import this before any kernel, in a process with TRITON_INTERPRET=1.

The interpreter loses the carry when a float rounds up to a power of two, truncates to bfloat16, converts integers to
bfloat16 by their bits, and multiplies bfloat16 matrices as integers. Here torch converts, and `tl.dot` multiplies
float64 copies: products of float32 sum in an order of the CPU's own, which is not the same in every row.
"""

import os

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1 before starting Python"

_STORED = {  # formats that numpy lacks: how the interpreter stores them, as torch sees the bits
    tl.bfloat16: (np.uint16, torch.int16, torch.bfloat16),
    tl.float8e4nv: (np.uint8, torch.int8, torch.float8_e4m3fn),
}


def _decode(data: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype not in _STORED:
        return data
    _, bits, torch_dtype = _STORED[dtype]
    return torch.from_numpy(np.ascontiguousarray(data)).view(bits).view(torch_dtype).float().numpy()


def _encode(values: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype not in _STORED:
        return values.astype(interpreter._get_np_dtype(dtype))
    stored, bits, torch_dtype = _STORED[dtype]
    exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return exact.to(torch_dtype).view(bits).numpy().view(stored)


def _cast(self, src, dst_type):
    values = _decode(src.data, src.dtype.scalar).reshape(src.data.shape)
    return interpreter.TensorHandle(_encode(values, dst_type.scalar).reshape(src.data.shape), dst_type.scalar)


def _fp_to_fp(self, src, dst_type, rounding_mode):
    return _cast(self, src, dst_type)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    left, right = (_decode(x.data, x.dtype.scalar).astype(np.float64) for x in (a, b))
    product = np.matmul(left, right).astype(np.float32)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


_builder = interpreter.InterpreterBuilder
for _name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
    setattr(_builder, f"create_{_name}", _cast)
_builder.create_int_cast = lambda self, src, dst_type, is_signed: _cast(self, src, dst_type)
_builder.create_fp_to_fp = _fp_to_fp
_builder.create_dot = _dot
