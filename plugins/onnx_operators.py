"""The ONNX operators of this project, by name."""

from plugins.landmark_select.onnx import OPERATORS as _LANDMARK_SELECT
from plugins.low_rank_key_reconstruct.onnx import OPERATORS as _LOW_RANK_KEY_RECONSTRUCT
from plugins.onnx_node import OnnxOperator
from plugins.paged_attention.onnx import OPERATORS as _PAGED_ATTENTION
from plugins.rope_paged_kv_write.onnx import OPERATORS as _ROPE_PAGED_KV_WRITE
from plugins.speculative_verify.onnx import OPERATORS as _SPECULATIVE_VERIFY

ONNX_OPERATORS: dict[str, OnnxOperator] = {
    operator.name: operator
    for operators in (
        _ROPE_PAGED_KV_WRITE,
        _PAGED_ATTENTION,
        _LOW_RANK_KEY_RECONSTRUCT,
        _SPECULATIVE_VERIFY,
        _LANDMARK_SELECT,
    )
    for operator in operators
}
